"""Built-in reward functions. `code/` and `judge.py` are next to this folder."""
