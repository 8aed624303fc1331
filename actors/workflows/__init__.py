"""How a row of data becomes an episode.

Imports `endpoint`, `engines/protocol`, `runtime` and `areal_bus`. Begin with `protocol.py`.
"""
