"""The interface of an inference server, and the description of a kind of server."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.engines.protocol import SamplingControls
from actors.engines.servers.http_client import HttpClient
from actors.engines.servers.model_spec import ModelSpec
from actors.engines.servers.server_process import ServerProcess
from actors.runtime.context import Context
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest


@dataclass(frozen=True, slots=True)
class RequestPiece:
    """One call of a server: a request, or the rest of one."""

    rid: str  # all ids have the same length, so that none is a prefix of another
    ids: list[int]  # given and sampled so far
    max_new_tokens: int
    temperature: float  # 0: the likeliest token
    top_p: float
    controls: SamplingControls  # of this piece: min_new_tokens counts from its first token
    stops: tuple[int, ...]  # all tokens that end it, sorted
    salt: str = ""  # label of the weights that it begins with: no prefix of other weights may be reused


@dataclass(frozen=True, slots=True)
class PieceUpdate:
    """A server's report on a piece since the last report."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str | None = None  # messages.Finish, when it has ended
    labels: list[tuple[str, int]] | None = None  # [(label of the weights, n_tokens)] of the whole piece, at its end
    error: str = ""  # why the server ended it unasked


def has_field(routes: Mapping[str, Any], schema: str, name: str) -> bool:
    """Whether a body that a server takes (a schema of its openapi.json) has this field."""
    return name in routes.get("components", {}).get("schemas", {}).get(schema, {}).get("properties", {})


class Server(Protocol):
    """One server. All calls have a deadline and raise EngineLost if the server misses it or refuses."""

    @property
    def stamps(self) -> bool:
        """Whether it reports the weights of each token. If not, pieces are ended before each update."""

    @property
    def pauses(self) -> bool:
        """Whether it can pause with running pieces."""

    def check_sampling(self, *, temperature: float, top_p: float, controls: SamplingControls) -> None:
        """Raises SettingRefused if it cannot give log-probs of the model's full distribution at that temperature."""

    def ask(self, piece: RequestPiece) -> tuple[str, dict[str, Any]]:
        """Path and body of the POST that samples it, as a stream of events."""

    def read(self, event: Mapping[str, Any], n_known: int) -> PieceUpdate:
        """The update in an event; `n_known` tokens of the piece are known. Raises EngineLost for an invalid event."""

    def abort(self, rid: str) -> None:
        """End a piece, without waiting. A piece that has ended already is no error."""

    def abort_all(self) -> None:
        """End all pieces, without waiting."""

    def pause(self, *, keep: bool) -> None:
        """Sample nothing before `resume`. `keep`: keep the KV cache of running pieces."""

    def resume(self) -> None:
        """Continue sampling."""

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Load these weights under this label. `flush`: drop earlier KV caches. Raises ConfigError: another model."""

    def ping(self) -> None:
        """Raises EngineLost unless the server answers."""

    def check(self) -> None:
        """Raises EngineLost when its process has ended."""

    def close(self) -> None:
        """Disconnect; end the server if this process started it."""


LOOPBACK = ("127.0.0.1", "lo")  # where servers of ours listen: address and interface


@dataclass(frozen=True, slots=True)
class ServerContext:
    """A running server, and the model that it must serve."""

    link: HttpClient
    process: ServerProcess | None  # None: it was attached to
    config: Config
    shape: ModelSpec  # of the model
    architecture: str  # of the model, by its config.json; "" where that does not say
    stop_ids: frozenset[int]
    name: str  # unique among all meetings
    address: str  # of ours, for a group with it
    interface: str
    is_known: bool  # one like it has served this run before

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of one turn, according to the settings."""
        return longest(self.config, self.shape.most_tokens)


class Command(Protocol):
    def __call__(self, context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    """How a server takes adapters."""

    load: str  # path of the order to load one, and of the order to unload it
    unload: str
    field: str  # of a request: the name of its adapter
    info: str  # path of its settings
    largest_rank: Callable[[Mapping[str, Any]], int]  # of its settings; 0 when it takes none
    is_untied: Callable[[Mapping[str, Any]], bool] = lambda settings: False  # it has a head apart from a tied embedding


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One kind of server."""

    oldest: tuple[int, ...]  # version of it that may serve
    ready: str  # path that answers as soon as it can serve
    command: Command  # what follows the interpreter
    environment: Callable[[Context, Config], dict[str, str]]  # beside its own
    meet: Callable[[ServerContext], Server]
    adapters: AdapterRoutes


def longest(config: Config, most_tokens: int) -> int:
    """Tokens of a prompt and its completion at most, in any stage: the server's context length."""
    return min(config.data.max_prompt_tokens + largest(config).gconfig.max_new_tokens, most_tokens)


def seed(run_seed: int, context: Context) -> int:
    """A different number for each incarnation of each generator, so that their samples of one prompt differ."""
    text = f"{run_seed},{context.index},{context.incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def number(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
