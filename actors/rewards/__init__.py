"""Reward functions and the workers that run them."""
