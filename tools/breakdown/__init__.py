"""Where each actor's time went: by role, by step, by cause; stragglers, pushes and FLOP utilisation.

Reads the journal through `tools.run`. Begin with `__main__.py`.
"""
