"""Errors that a client gets as an answer."""

MOST_CHARACTERS = 1000  # of an answer: a text may quote what the client has sent


class Rejected(Exception):
    """A request that the server does not carry out; the text is for its user."""

    def __init__(self, text: str, *, status: int = 400) -> None:
        super().__init__(text[:MOST_CHARACTERS])
        self.status = status


def fault(error: Exception) -> str:
    """The answer for an error that no client has caused, as far as is known."""
    return f"a fault of this server, see its log: {type(error).__name__}: {error}"[:MOST_CHARACTERS]
