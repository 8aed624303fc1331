"""The actors: one loop each, around the pure core."""
