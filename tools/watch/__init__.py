"""Live views of a run, terminal and page, from its journal. Imports tools, areal_bus. Begin with live_run.py."""
