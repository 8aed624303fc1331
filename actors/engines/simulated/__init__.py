"""An engine without a model: tokens, lengths and times follow given laws. Begin with `engine.py`."""
