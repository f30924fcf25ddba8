"""What a drafter is worth after a fixed number of core-seconds of training: ours and speculators'.

`make bench-quality PROMPTS=DIR`; see __main__.py for the options and docs/bench-quality.md for the
rules of the comparison.
"""
