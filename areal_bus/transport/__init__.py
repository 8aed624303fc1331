"""The bus over ZeroMQ sockets: authentication, connection limits, receive and send queues.

Imports `wire`, `messages` and `errors`. Begin with `bus.py`.
"""
