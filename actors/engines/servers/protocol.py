"""What `ServerEngine` asks of one kind of inference server; knows no requests of ours and no server's routes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Piece:
    """What a server is asked for at once: a request, or what is left of one."""

    rid: str  # of one length, so that none is the beginning of another
    ids: list[int]  # given and sampled so far
    max_new_tokens: int
    temperature: float  # 0: the likeliest token
    top_p: float


@dataclass(frozen=True, slots=True)
class News:
    """What a server has said of a piece since the last time."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str | None = None  # messages.Finish, when it has ended
    labels: list[tuple[str, int]] | None = None  # [(label of the weights, n_tokens)] of the whole piece, at its end
    error: str = ""  # why it was ended when nobody asked for that


class Server(Protocol):
    """One server. All calls have a deadline and raise EngineLost when it does not keep it, or refuses."""

    @property
    def stamps(self) -> bool:
        """Whether it says of each token which weights made it. Else no piece ever outlives an update."""

    @property
    def pauses(self) -> bool:
        """Whether it can stand still with pieces under way."""

    def check_sampling(self, *, temperature: float, top_p: float) -> None:
        """Raises EngineError where it has no log-probs of the whole distribution at that temperature."""

    def ask(self, piece: Piece) -> tuple[str, dict[str, Any]]:
        """Path and body of the POST that samples it, as a stream of events."""

    def read(self, event: Mapping[str, Any], n_known: int) -> News:
        """What an event of the stream says, `n_known` tokens of the piece being known. Raises EngineLost for what
        is no such event.
        """

    def abort(self, rid: str) -> None:
        """End a piece; nothing is waited for, and one that has ended is no error."""

    def abort_all(self) -> None:
        """End all pieces, as above."""

    def pause(self, *, keep: bool) -> None:
        """Sample nothing before `resume`. `keep`: with the keys and values of the pieces under way."""

    def resume(self) -> None:
        """Go on."""

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Take these weights, and stamp them with this label. `flush`: no key or value of others is used again.

        Raises ConfigError when it is a server of another model.
        """

    def check(self) -> None:
        """Raises EngineLost when its process has ended."""

    def close(self) -> None:
        """Let go of it; end it when it is ours."""
