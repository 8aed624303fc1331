"""State machines of the head below `state.py`: gate, ledger, membership, terms, pushes. Each is pure and tested alone.

Imports `rows.py` only. Begin with `gate.py` and `ledger.py`.
"""
