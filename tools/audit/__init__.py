"""A run checked by its journal alone: I1 to I12 of docs/invariants.md, and what became of its prompts and tokens.

The rules are written out a second time here, from docs/journal.md, and none of the head's own objects is used: what
the ring believes of itself is what is being checked.
"""
