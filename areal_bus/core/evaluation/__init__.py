"""Evaluations: which one is due, its open problems, and its metrics.

Imports `parts/` only. Begin with `evaluation_plan.py`.
"""
