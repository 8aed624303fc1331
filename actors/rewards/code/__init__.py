"""The rewards `code` and `code_share`: tests of a program that a model has written, in the sandbox.

The program answers with plain values only. Another process, which never sees the program, runs the tests on these
values. docs/code-rewards.md has the forms of tests.
"""

from actors.rewards.code.scoring import score, score_share

__all__ = ["score", "score_share"]
