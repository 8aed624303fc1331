"""Trackers fed from the journal: series, a writer each. Imports tools, areal_bus. Begin with series.py."""
