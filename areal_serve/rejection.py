"""Errors that a client gets as an answer."""


class Rejected(Exception):
    """A request that the server does not carry out; the text is for its user."""

    def __init__(self, text: str, *, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
