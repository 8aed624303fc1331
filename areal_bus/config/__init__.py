"""Typed settings: sections, loading and merging, rules across keys.

Imports `errors` only; no torch. Begin with `sections.py`.
"""
