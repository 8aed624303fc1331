r"""Reward "math": the verdict, and what it is made of.

`verdict` holds the rules. It takes the final answer out of a completion (`extraction`), rewrites its notation
(`notation`), reads it (`reading`, `expressions`, `units`) and compares it with the row's (`comparison`).
"""

from actors.rewards.mathematics.verdict import score

__all__ = ["score"]
