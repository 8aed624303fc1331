"""Inference servers of others (SGLang, vLLM) over HTTP, behind the engine protocol.

Imports `engines/builtin/limits`, `models`, `runtime` and `areal_bus`. Begin with `engine.py`; one module a server.
"""
