"""Runs untrusted programs: bubblewrap or resource limits, and a filter of system calls. Begin with `sandbox.py`."""
