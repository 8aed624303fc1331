"""The message bus: messages, the head's state machine, wire format, sockets, weight push, settings, storage.

Imports no other package of ours. Begin with `messages.py`, then `core/head.py`.
"""

__version__ = "0.1.0"
