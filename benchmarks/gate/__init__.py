"""Bench `gate`: the staleness rule's cost for a prompt."""
