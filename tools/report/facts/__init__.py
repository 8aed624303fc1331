"""What the report knows of a run: one bounded pass. Imports tools, areal_bus. Begin with `run_facts.py`."""
