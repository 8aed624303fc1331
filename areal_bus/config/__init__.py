"""Typed settings: sections, loading and merging, rules between keys.

Imports `errors` only; no torch. Begin with `sections.py`.
"""
