"""The head as a state machine: events go in, ordered effects come out.

Imports the standard library, `messages` and `errors` only; no clock, file, socket or thread. Begin with `head.py`
(events) and `state.py` (what the head knows). docs/staleness.md proves `staleness.py`, `gate.py` and `ledger.py`.
"""
