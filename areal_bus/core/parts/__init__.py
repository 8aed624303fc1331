"""State machines below `state.py`, each pure. Imports `rows.py` only. Begin with `gate.py` and `ledger.py`."""
