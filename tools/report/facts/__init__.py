"""What the report knows of a run: one pass over its journal, bounded in memory. No HTML.

Imports tools and areal_bus. Begin with `run_facts.py`.
"""
