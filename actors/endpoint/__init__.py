"""An OpenAI-compatible endpoint for agents in worker processes; each call is a turn of an episode.

Imports `rewards` (worker processes) and `areal_bus`. Begin with `http_server.py`.
"""
