"""The simulated engine: makes up tokens at configured speeds and follows the engine protocol.

The lengths follow a law and the seed of the request, the speeds another law and the clock (`workload`). Of the weights
it keeps a hash. Versions, spans and log-probs are exact, but of a distribution that is no language model.
docs/engines.md describes what such a job shows.

The next-token distribution is a function of the weights and the tokens so far. All tokens except stop tokens have a
rank, with fixed probabilities by rank (Zipf's law). A hash of the tokens so far, with the key of the weights that read
each run of them, rotates the ranks. So other weights or another earlier token give other log-probs, and tokens that old
weights read keep their effect, as in a kept KV cache. `workload` decides when a text ends: the stop token takes that
probability, and the ranks share the rest.
"""

import hashlib
import itertools
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from actors.engines.builtin.sequence import Sequence, filtered_row, new_sequence
from actors.engines.protocol import Completion, Done, Request, check_order
from areal_bus.config.rollout import OnUpdate
from areal_bus.errors import ConfigError, EngineError
from areal_bus.messages import Finish
from areal_lab.ring.workload import LengthLaw, SpeedLaw


def key_of(tensors: Mapping[str, Any]) -> bytes:
    """32 bytes that stand for these weights: of all names, types, shapes and bytes."""
    import torch  # only where weights come in

    whole = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.digest()


class ReadTokens:
    """The tokens that were read, each run of them with the key of the weights that read it."""

    __slots__ = ("_key", "_state", "n")

    def __init__(self) -> None:
        self._state, self._key = hashlib.blake2b(digest_size=8), b""
        self.n = 0  # tokens read

    def read(self, key: bytes, ids: list[int]) -> None:
        if key != self._key:
            self._state.update(key)
            self._key = key
        self._state.update(struct.pack(f"<{len(ids)}i", *ids))
        self.n += len(ids)

    def turn(self, n_ranks: int) -> int:
        """By how much the ranks are turned for the next token."""
        return int.from_bytes(self._state.digest(), "little") % n_ranks


class RankLaw:
    """The law of ranks at one temperature and nucleus: p(rank) ~ (rank + 1) ** (-1 / temperature)."""

    def __init__(self, n: int, *, temperature: float, top_p: float) -> None:
        """Temperature 0 takes the first, and gives its log-prob at temperature 1."""
        logits = [-math.log(rank) / (temperature or 1.0) for rank in range(1, n + 1)]
        total = math.log(math.fsum(map(math.exp, logits)))
        self.logps = [logit - total for logit in logits]
        below = list(itertools.accumulate(map(math.exp, self.logps)))
        n_kept = 1 if not temperature else next((i + 1 for i, p in enumerate(below) if p >= top_p), n)
        self._below = below[:n_kept]

    def at(self, uniform: float) -> int:
        """The rank at this quantile of the nucleus."""
        return min(bisect_right(self._below, uniform * self._below[-1]), len(self._below) - 1)


if TYPE_CHECKING:
    from actors.engines.servers.model_spec import ModelSpec

WAIT_S = 0.02  # that a step waits for its time, at most: messages are heard in between
ALMOST = 1.0 - 2.0**-30  # of the end of a text that min_new_tokens forbids
LATE_S = 1.0  # a process that was stopped makes up for so much of the time, and no more

Key = tuple[str, int, int, int, int]


@dataclass(slots=True)
class Text:
    """One live sample."""

    row: Sequence
    reading: ReadTokens
    ranks: RankLaw
    ends_at: int  # sampled tokens, the one that ends it included; it may be cut before


@dataclass(frozen=True, slots=True)
class SimulatedRules:
    """How long texts are, how fast they come, and what happens to them at a weight update."""

    n_slots: int
    lengths: LengthLaw
    speeds: SpeedLaw
    on_update: OnUpdate = "recompute"


class SimulatedEngine:
    """An `Engine` without a model. `clock` and `wait` are `time.monotonic` and `time.sleep`, or a virtual pair."""

    def __init__(
        self,
        shape: "ModelSpec",
        rules: SimulatedRules,
        *,
        stop_ids: frozenset[int],
        tokenizer: Any = None,
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        """`tokenizer`: for stop strings. Raises ConfigError for a vocabulary without text ends, or with ends alone."""
        self._stop_ids, self._tokenizer = stop_ids, tokenizer
        self._tokens = [token for token in range(shape.vocabulary) if token not in stop_ids]
        if not self._tokens or len(self._tokens) == shape.vocabulary:
            raise ConfigError(
                'rollout.engine = "simulated" ends its texts with the model\'s stop token: of its '
                f"{shape.vocabulary} tokens {shape.vocabulary - len(self._tokens)} stop"
            )
        self._shape, self._stop, self._n_slots = shape, min(stop_ids), rules.n_slots
        self._lengths, self._speeds, self._on_update = rules.lengths, rules.speeds, rules.on_update
        self._clock, self._wait = clock, wait
        self._waiting: dict[Key, Request] = {}  # in the order in which they came
        self._texts: dict[Key, Text] = {}
        self._due = clock()  # when the step under way ends
        self._held: tuple[int, int] | None = None  # (term, version)
        self._key = b""  # of the weights held
        self._holds = False  # no further request is begun before the next update
        self._rests = False  # nothing is sampled before the next update
        self.n_tokens = 0
        self.prefill_s = 0.0  # seconds of prefills so far

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held[1]

    @property
    def n_live(self) -> int:
        return len(self._texts) + len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it does not fit the model, is invalid, or its key is not unique."""
        if request.key in self._texts or request.key in self._waiting:
            raise EngineError(f"a request must have a key that no live request has: {request.key}")
        self._shape.check_request(request, self._tokenizer)
        self._waiting[request.key] = request

    def step(self) -> list[Completion]:
        """The steps whose time has come, up to one that ends a sample; waits a moment when none has."""
        version = self.version
        if version is None or self._rests:
            return []
        now = self._clock()
        self._begin(version, now)
        if not self._texts:
            return []
        if self._due > now:
            self._wait(min(self._due - now, WAIT_S))
            now = self._clock()
        self._due = max(self._due, now - LATE_S)
        ended: list[Completion] = []
        while self._due <= now and not ended:
            for text in self._texts.values():
                self._sample(text, version)
            self._due += self._speeds.step_s(len(self._texts))
            ended = self._collect()
        return ended

    def abort(self, key: Key) -> Completion | None:
        """Forget a request; its tokens so far, or None if it is not live."""
        if (request := self._waiting.pop(key, None)) is not None:
            return self._row(request, 0).completion(Finish.ABORT)
        text = self._texts.pop(key, None)
        return None if text is None else text.row.completion(Finish.ABORT)

    def newest(self, key: Key) -> int | None:
        """Version that sampled the latest token of a request; None when it has none, or is not live."""
        return done.spans[-1][0] if (done := self.so_far(key)) is not None else None

    def so_far(self, key: Key) -> Done | None:
        """A copy of a live request's tokens; None when it has no token, or is not live."""
        if (request := self._waiting.get(key)) is not None:
            return request.done
        text = self._texts.get(key)
        return None if text is None or not text.row.sampled else text.row.so_far()

    def parameters(self) -> Mapping[str, Any]:
        """Name -> tensor on the meta device; a tied weight once."""
        return self._shape.parameters

    def hold(self) -> bool:
        """Begin no episode before the next update; whether one is under way."""
        self._holds = True
        return bool(self._texts) or any(key[4] for key in self._waiting)

    def pause(self) -> None:
        """Sample nothing before the next update."""
        self._rests = True

    def check(self) -> None:
        """Nothing that it needs is in another process."""

    def close(self) -> None:
        """Nothing was started."""

    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        """Take the key of new weights; returns `tensors`. Raises EngineError, with nothing changed, for other forms."""
        check_order(self._held, term, version)
        self._shape.check_weights(tensors)
        prefill_s = 0.0
        if self._on_update != "keep" or self._held is None or term > self._held[0]:  # of lost weights nothing is kept
            prefill_s = self._speeds.prefill_s(self._read_again(version))
        self._key = key_of(tensors)
        self._held, self._holds, self._rests = (term, version), False, False
        self._due = max(self._due, self._clock()) + self._speeds.update_s + prefill_s
        self.prefill_s += prefill_s
        return tensors

    def _read_again(self, version: int) -> int:
        """All samples forget what they have read. Returns the tokens to prefill, a prompt of several samples once."""
        for text in self._texts.values():
            text.reading, text.row.filled = ReadTokens(), version
        rows = [text.row for text in self._texts.values()]
        return sum(len(row.sampled) for row in rows) + sum(map(len, {row.prompt for row in rows}))

    def _begin(self, version: int, now: float) -> None:
        """Fill the free slots, first with samples that continue an episode. A prompt that is there costs no prefill."""
        n_free = self._n_slots - len(self._texts)
        may_begin = [key for key in self._waiting if key[4] or not self._holds] if n_free else []
        taken = sorted(may_begin, key=lambda key: not key[4])[:n_free]
        if not taken:
            return
        if not self._texts:
            self._due = max(self._due, now)
        prompts = {text.row.prompt for text in self._texts.values() if text.row.filled == version}
        is_first = not self._texts
        for key in taken:
            text = self._texts[key] = self._text(self._waiting.pop(key), version)
            shared = text.row.prompt in prompts and not text.row.sampled
            cost_s = 0.0 if shared else self._speeds.prefill_s(text.row.length)
            self._due += cost_s
            self.prefill_s += cost_s
            prompts.add(text.row.prompt)
        if is_first:
            self._due += self._speeds.step_s(len(self._texts))

    def _text(self, request: Request, version: int) -> Text:
        row = self._row(request, version)
        ranks = _ranks(len(self._tokens), request.temperature, request.top_p)
        quantile = row.uniforms.at(-len(row.prompt))  # no token has this position
        beyond = max(len(row.sampled), request.controls.min_new_tokens)
        return Text(row, ReadTokens(), ranks, self._lengths.draw(quantile, beyond=beyond))

    def _row(self, request: Request, version: int) -> Sequence:
        return new_sequence(request, version=version, stop_ids=self._stop_ids, tokenizer=self._tokenizer)

    def _sample(self, text: Text, version: int) -> None:
        """The next token: the end of the text by its hazard, or one by its rank."""
        row, reading = text.row, text.reading
        reading.read(self._key, [*row.prompt, *row.sampled][reading.n :] if reading.n + 1 < row.length else [row.last])
        n = len(row.sampled) + 1
        hazard = self._lengths.hazard(n)
        if self._ends(text, n, hazard):
            row.add([self._stop], [math.log(hazard)], version)
            if row.request.controls.ignore_eos:  # it goes on, to another end
                text.ends_at = self._lengths.draw(row.uniforms.at(-row.length), beyond=n)
        else:
            turn = reading.turn(len(self._tokens))
            rank = self._filtered_rank(row, turn) if row.is_filtered else text.ranks.at(row.uniforms.at(row.length))
            token = self._tokens[(rank + turn) % len(self._tokens)]
            row.add([token], [math.log1p(-min(hazard, ALMOST)) + text.ranks.logps[rank]], version)
        self.n_tokens += 1

    def _ends(self, text: Text, n: int, hazard: float) -> bool:
        """At temperature 0 when nothing is likelier; never before min_new_tokens."""
        if n <= text.row.request.controls.min_new_tokens:
            return False
        if not text.row.request.temperature:
            return hazard > (1.0 - hazard) * math.exp(text.ranks.logps[0])
        return n == text.ends_at

    def _filtered_rank(self, row: Sequence, turn: int) -> int:
        """The rank of a token that is drawn under sampling controls, as the builtin engine draws it."""
        import torch  # only where it is asked for

        from actors.engines.builtin.sampler import filtered, invert

        n = len(self._tokens)
        logits_V = torch.full((self._shape.vocabulary,), -torch.inf)
        ranks_n = (torch.arange(n) - turn) % n
        logits_V[torch.tensor(self._tokens)] = -torch.log1p(ranks_n.float())
        uniform = torch.tensor([row.uniforms.at(row.length)], dtype=torch.float64)
        token = int(invert(filtered(logits_V[None], [filtered_row(row)]), uniform))
        return int(ranks_n[self._tokens.index(token)])

    def _collect(self) -> list[Completion]:
        """Take out the samples that ended."""
        ended = []
        for key, text in list(self._texts.items()):
            if (finish := text.row.ended()) is not None:
                del self._texts[key]
                ended.append(text.row.completion(finish))
        return ended


@lru_cache(maxsize=8)
def _ranks(n: int, temperature: float, top_p: float) -> RankLaw:
    return RankLaw(n, temperature=temperature, top_p=top_p)
