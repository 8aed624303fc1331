"""Inference servers of others behind our engine protocol: one engine over HTTP, one module for each kind of server."""
