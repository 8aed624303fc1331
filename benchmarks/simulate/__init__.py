"""Bench `simulate`: real jobs beside predictions from the journals of other jobs.

Imports the planner and, to make a model, `benchmarks.jobs`. Begin with `pairs.py`.
"""
