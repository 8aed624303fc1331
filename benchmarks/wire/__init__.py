"""Bench `wire`: a trajectory over the wire beside AReaL's serialization."""
