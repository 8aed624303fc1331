"""Checks of model, prompts, rows and reward before a start. May import `actors`. Begin with `model_checks.py`."""
