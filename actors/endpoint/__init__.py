"""An OpenAI-compatible endpoint: agents in processes of their own, each call a turn of an episode.

Imports `rewards` (worker processes) and `areal_bus`. Begin with `http_server.py`.
"""
