"""Bench `smollm2`: an update of SmolLM2 beside transformers' model."""
