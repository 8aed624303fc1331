"""Errors that a client gets as an answer."""


class Rejected(Exception):
    """A request that the server does not carry out; the text is for its user."""

    def __init__(self, text: str, *, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def fault(error: Exception) -> str:
    """The answer for an error that no client has caused, as far as is known."""
    return f"a fault of this server, see its log: {type(error).__name__}: {error}"[:1000]
