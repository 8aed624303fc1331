"""Bench `generate`: the built-in engine beside transformers' generate."""
