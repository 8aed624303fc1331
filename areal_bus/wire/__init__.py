"""Messages to bytes and back; rejects hostile input. Imports `messages`, `errors`. Begin with `codec.py`."""
