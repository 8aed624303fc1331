"""Messages to bytes and back; hostile input is rejected before memory is allocated.

Imports `messages` and `errors`. Begin with `codec.py`; `schema.py` has the limits of each message.
"""
