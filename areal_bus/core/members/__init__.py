"""Members of the ring: who is there, who failed, and what each may hold. Pure, each tested alone.

Imports nothing of the core. Begin with `membership.py`.
"""
