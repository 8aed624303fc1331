"""The rewards `code` and `code_share`: tests of a program that a model has written, in `actors.rewards.sandbox`.

The program answers with plain values only. Another process, which never sees the program, runs the tests on these
values (docs/code-rewards.md). Begin with `scoring.py`; `actors.rewards.loading` finds the rewards by name.
"""
