"""Benches `pack` and `padding`: micro-batches beside AReaL's, and what padding costs."""
