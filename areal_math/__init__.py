r"""The reward function "math": compares the final answer of a completion with the row's answer.

Begin with `verdict.py`. It extracts the final answer (`extraction`), normalizes its notation (`notation`), parses it
(`reading`, `formulas`, `expressions`, `units`) and compares it with the row's (`comparison`).
"""

from areal_math.verdict import score

__all__ = ["score"]
