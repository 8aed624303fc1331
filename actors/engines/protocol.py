"""The interface of an inference engine. It does not depend on the bus, the head or the rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_bus.errors import EngineError


@dataclass(frozen=True, slots=True)
class Done:
    """Tokens of a completion that are sampled already, here or by another engine; a token or more."""

    ids: list[int]
    logps: list[float]
    spans: list[list[int]]


@dataclass(frozen=True, slots=True)
class SamplingControls:
    """What changes the distribution that tokens are drawn from, or ends a completion (docs/engines.md).

    No log-prob depends on it. Order: logit_bias, min_new_tokens, penalties, temperature, min_p, top_k, top_p.
    """

    top_k: int = 0  # draw from so many likeliest tokens, and those that are equal to the last; 0: from all
    min_p: float = 0.0  # draw from tokens of at least this share of the likeliest one's probability
    min_new_tokens: int = 0  # no stop token and no stop string before so many tokens
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens of prompt and completion
    presence_penalty: float = 0.0  # subtracted from the logits of tokens of the completion
    frequency_penalty: float = 0.0  # the same, times how often the token is there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    stop: tuple[str, ...] = ()  # the token that completes one of these texts is the last one
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    ignore_eos: bool = False  # the model's own stop tokens end nothing

    @property
    def counts_completion(self) -> bool:
        """Whether logits depend on which tokens are the completion's, and not the prompt's."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether the likeliest token may be another one."""
        return self.counts_completion or bool(self.repetition_penalty != 1 or self.logit_bias or self.min_new_tokens)

    @property
    def changes_sampling(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's."""
        return self.changes_logits or bool(self.top_k or self.min_p)


PLAIN = SamplingControls()


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    key: tuple[str, int, int, int, int]  # (evaluation, uid, attempt, sample, turn): unique among live requests
    ids: Sequence[int]  # tokens so far, given and sampled
    seed: tuple[int, ...]  # every sampled token is a function of the logits, this seed and its position
    max_new_tokens: int
    temperature: float
    top_p: float
    done: Done | None = None  # the completion begins with these; they count in max_new_tokens
    controls: SamplingControls = PLAIN


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request."""

    key: tuple[str, int, int, int, int]
    ids: list[int]  # sampled tokens, the stop token included
    logps: list[float]  # log-prob of each under the version stamped on it, at the request's temperature
    spans: list[list[int]]  # [[version, n_tokens], ...], stamped at the decode step (I5)
    finish: str  # messages.Finish
    n_reused: int | None = None  # tokens of the prompt whose keys and values were known; None: the engine does not say


def stamp(spans: list[list[int]], version: int, n: int) -> None:
    """Add `n` tokens of this version in place: to the last span if it is of this version, else as a new one."""
    if spans and spans[-1][0] == version:
        spans[-1][1] += n
    else:
        spans.append([version, n])


def check_order(held: tuple[int, int] | None, term: int, version: int) -> None:
    """Raises EngineError for weights older than those held, (term, version)."""
    if held is not None and (term, version) < held:  # I6
        raise EngineError(
            f"versions never go back within a term: version {version} of term {term} comes after version {held[1]} of "
            f"term {held[0]}"
        )


class Engine(Protocol):
    """Continuous batching over weights that may change between two tokens.

    An engine in this process works on the caller's thread. `step` prefills new requests and decodes one token for all
    live requests, or several until one ends. `update` runs between two steps, so running samples continue under the new
    weights. An inference server decodes by itself: `step` receives its results, and waits a moment for them.
    """

    @property
    def version(self) -> int | None:
        """Version of the weights held; None before the first update."""

    @property
    def n_live(self) -> int:
        """Requests submitted and not yet returned."""

    @property
    def n_tokens(self) -> int:
        """Tokens sampled so far, over all requests."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError when prompt and budget exceed what the model holds."""

    def step(self) -> list[Completion]:
        """Decode one or several steps; returns the completions that ended. Decodes nothing without weights."""

    def abort(self, key: tuple[str, int, int, int, int]) -> Completion | None:
        """Drop a request; returns its tokens so far (finish "abort"), or None if it is not live."""

    def newest(self, key: tuple[str, int, int, int, int]) -> int | None:
        """Version of the latest token of a live request; None if it has no token or is not live.

        If the engine does not know what its server has sampled by now, a newer version; never an older one.
        """

    def so_far(self, key: tuple[str, int, int, int, int]) -> Done | None:
        """A copy of a live request's tokens whose versions are known; None if there are none or it is not live."""

    def parameters(self) -> Mapping[str, Any]:
        """Name -> tensor of the live weights (shapes and dtypes are those a push must bring)."""

    def hold(self) -> bool:
        """Start no episode before the next update; running ones continue. Returns whether one is running."""

    def pause(self) -> None:
        """Sample nothing before the next update: the current weights must not be used."""

    def check(self) -> None:
        """Health check, called in every turn. Raises EngineLost if the server has ended or no longer answers."""

    def close(self) -> None:
        """Stop the processes and threads that the engine started."""

    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        """Replace all weights; running requests continue as `on_update` says (recompute or keep).

        Versions are compared as (term, version) and never go back: EngineError, with nothing changed (I6), as for other
        names or shapes. EngineLost if the engine does not know what has changed. At the first weights of a newer term,
        `on_update` has no effect: all KV caches are recomputed, because lost weights may have made them.
        Returns the former weights, into which the next push may be received.
        """


MEMBERS = sorted(name for name in vars(Engine) if not name.startswith("_"))  # what an engine must have
