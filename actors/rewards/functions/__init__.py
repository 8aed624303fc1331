"""Built-in reward functions. `mathematics/`, `code/` and `judge/` are next to this folder."""
