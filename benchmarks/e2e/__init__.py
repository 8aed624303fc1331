"""Bench `e2e`: a whole job beside TRL's."""
