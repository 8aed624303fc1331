"""Sentences on a run: what limits it, whether it learns, whether it is healthy, and what to change.

Pure: facts go in, remarks come out. Begin with `remarks.py`.
"""
