"""Runs a grid of settings with several seeds and compares the cells, paired by seed. See docs/sweep.md."""
