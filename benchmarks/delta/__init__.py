"""Bench `delta`: pushes of what changed against pushes of all bytes, over loopback and over a slow link."""
