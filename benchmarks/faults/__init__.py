"""Bench `faults`: how fast a job recovers from each kind of death."""
