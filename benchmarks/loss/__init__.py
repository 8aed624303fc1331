"""Bench `loss`: the PPO loss beside AReaL's and verl's."""
