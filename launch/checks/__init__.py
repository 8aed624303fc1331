"""Checks of a model, its prompts, rows, workflow and reward that run once, before any actor starts.

May import `actors` and `areal_bus`. Begin with `model_checks.py`.
"""
