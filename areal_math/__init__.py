r"""Compares the final answers of two texts as mathematics: a package of its own, on the standard library alone.

Begin with `verdict.py`. It extracts the final answer (`extraction`), normalizes its notation (`notation`), parses it
(`reading`, `formulas`, `expressions`, `quantities`) and compares it with the right one (`comparison`). The reward
"math" (actors.rewards.functions.mathematics) is its one caller.
"""
