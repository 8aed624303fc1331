"""Live views of a run: in the terminal, and as a page of a local web server. Both read the journal only.

Imports tools and areal_bus. Begin with live_run.py; a view gets one `Frame` at a time.
"""
