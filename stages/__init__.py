"""The stages of the pipeline, one package each, and the rooms they share (docs/architecture.md)."""
