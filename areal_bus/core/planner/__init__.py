"""The planner of the split: figures in, a decision out. Imports nothing of the core. Begin with `split_planner.py`."""
