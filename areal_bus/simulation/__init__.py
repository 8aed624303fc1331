"""Whole rings in one thread under a virtual clock, around the very head and messages that run in production.

Everything random comes from one seed, so that a schedule can be run again and tell its story.
"""
