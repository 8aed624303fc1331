"""Experiment trackers fed from the journal: scalar series, and one writer for each tracker.

Imports tools and areal_bus; a tracker's own package is imported by its writer only. Begin with series.py.
"""
