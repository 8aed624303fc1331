"""Built-in agents: conversations of several turns, and of tool calls, in worker processes as a user's agent.

Imports `rewards`, `runtime` and `areal_bus`; the standard library calls the endpoint. Begin with `loading.py`.
"""
