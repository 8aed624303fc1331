"""An engine without a model: tokens, lengths and times follow given laws.

Imports `engines/builtin`, `engines/servers/model_spec`, `models` and `areal_bus`. Begin with `engine.py`; `connect.py`
builds it from the settings.
"""
