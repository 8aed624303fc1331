"""Members of the ring: who is there, who failed, what each may hold. Pure. Begin with `membership.py`."""
