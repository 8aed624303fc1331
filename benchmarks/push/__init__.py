"""Bench `push`: the weight push between two processes."""
