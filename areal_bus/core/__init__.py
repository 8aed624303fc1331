"""The head as a state machine: events go in, ordered effects come out.

Imports the standard library, `messages` and `errors` only; no clock, file, socket or thread. Begin with `head.py`
(events) and `state.py` (what the head knows). Below the state lie `parts/`, `members/`, `rows/`, `evaluation/` and
`planner/`; above it `transitions/` change it and `diagnosis/` reads it.
docs/staleness.md proves staleness, gate and ledger.
"""
