"""The head as a state machine: events go in, ordered effects come out.

Imports the standard library, `messages` and `errors` only; no clock, file, socket or thread. Begin with `head.py`
(events) and `state.py` (what the head knows). Below the state lie `parts/`, `members/`, `planner/`, `rows.py` and
`evaluation.py`; above it `transitions/` change it and `diagnosis.py` reads it.
docs/staleness.md proves staleness, gate and ledger.
"""
