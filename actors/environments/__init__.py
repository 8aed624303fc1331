"""Environments of the package verifiers, each in a process; only `hosted.py` imports it. Begin with `loading.py`."""
