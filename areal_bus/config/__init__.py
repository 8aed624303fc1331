"""Typed settings: sections, loading, rules. Imports `errors` only; no torch. Begin with `sections.py`."""
