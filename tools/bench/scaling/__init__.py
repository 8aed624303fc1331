"""Bench `curves`: how cost grows."""
