"""Where each actor's time went, by role, step and cause. Reads the journal by `tools.run`. Begin with `__main__.py`."""
