"""Built-in reward functions. `code/` and `judge/` are next to this folder."""
