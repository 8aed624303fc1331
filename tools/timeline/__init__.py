"""A run's journal as a Chrome trace: tracks, spans, flows, counters. It opens in ui.perfetto.dev.

Reads the journal through `tools.run`. Begin with `__main__.py`.
"""
