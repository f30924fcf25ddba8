"""Measurements against peers, on the same data and the same clock. Nothing under stages/ or flows/
imports this room."""
