"""The head actor: carries out what the pure head (`areal_bus.core.head`) decides.

Imports `runtime`, `data` and `areal_bus`; no torch. Begin with `shell.py`.
"""
