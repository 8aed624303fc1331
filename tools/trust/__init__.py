"""Proofs: equal to the plain loop (`prove`), trained again (`replay`). Begin with `prove.py`."""
