"""A run's journal as a Chrome trace for ui.perfetto.dev. Reads by `tools.run`. Begin with `__main__.py`."""
