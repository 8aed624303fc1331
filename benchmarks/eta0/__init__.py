"""Bench `eta0`: eta = 0 beside the plain synchronous loop, bit for bit."""
