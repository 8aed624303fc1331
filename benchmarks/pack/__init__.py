"""Bench `pack`: micro-batches of equal size, beside AReaL's packing."""
