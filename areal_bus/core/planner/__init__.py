"""The planner of the split: measured figures of a ring go in, a decision comes out.

Imports nothing else of the core. Begin with `split_planner.py`.
"""
