"""The head as a state machine: events go in, ordered effects come out.

Imports the standard library, `messages` and `errors` only; no clock, file, socket or thread. Begin with `head.py`;
`staleness.py`, `gate.py` and `ledger.py` are the rules that docs/staleness.md proves.
"""
