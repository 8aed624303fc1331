"""The bus over ZeroMQ sockets. Imports `wire`, `process`, `messages`, `errors`. Begin with `bus.py`."""
