"""The bus over ZeroMQ sockets: authentication, connection limits, receive and send queues.

Imports `wire`, `process`, `messages` and `errors`. Begin with `bus.py`.
"""
