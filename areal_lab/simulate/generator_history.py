"""The samples of one generator over time, from its journal: decoding and prefills.

Times of work are those with a core (`work_time.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from areal_bus.config.capacity import slots
from areal_bus.config.sections import Config
from areal_lab.simulate.work_time import Crowd, clock_of, windows, within
from tools.run import Line

HALF_SLOTS = (0.0, *(0.5 * 1.25**i for i in range(32)))  # values of h that a fit tries, up to 500 samples

Key = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Exposure:
    """One complete sample: its tokens and, for each h of HALF_SLOTS, integrals of 1 / (live samples + h) over it."""

    n_tokens: int
    alone: Sequence[float]  # integral of dt, in seconds of work
    crowded: Sequence[float]  # the same, weighted by the share of the other cores that was busy


@dataclass(frozen=True, slots=True)
class Prefill:
    """A window of one generator."""

    n_prompts: int
    n_tokens: float  # of live samples, read again after an update
    seconds: float


def is_finished(line: Line) -> bool:
    """Whether it is a training sample that ended with an end token or at its length limit."""
    return line["event"] == "completion" and not line.get("evaluation") and line["finish"] != "abort"


def sample_key(line: Line) -> Key:
    return line.get("evaluation") or "", line["uid"], line["sample"], line["attempt"]


@dataclass(frozen=True, slots=True)
class Lived:
    """One sample in a slot of a generator."""

    key: Key
    begin: float
    end: float
    n_tokens: int


class GeneratorHistory:
    """The samples of one generator over time."""

    def __init__(self, lines: Sequence[Line], config: Config) -> None:
        self.windows = windows(lines, "generator")
        self._samples = samples_in_slots([line for line in lines if line["event"] != "spans"], slots(config))
        self._stalls = [(line["t"], line["stall_s"]) for line in lines if line["event"] == "pushed"]
        self._reads_again = config.rollout.on_update == "recompute"
        self._clock = clock_of(self.windows)

    @property
    def busy(self) -> list[tuple[float, int]]:
        """(time, +1 or -1) where it begins or ends to have live samples."""
        found, live = list[tuple[float, int]](), 0
        for t, change in self._changes():
            if 0 in (live, live + change):
                found.append((t, change))
            live += change
        return found

    def _changes(self) -> list[tuple[float, int]]:
        return sorted(change for one in self._samples for change in ((one.begin, 1), (one.end, -1)))

    def exposures(self, token_s: float, n_prompt: float, crowd: Crowd, computes: float) -> list[Exposure]:
        """Of each sample, without prefills (`token_s` a token), stalls and waits for a core.

        `computes`: share of its busy time that the generator computes on a core.
        """
        owed = [(t, 0, n_prompt * token_s) for t in self._prompt_begins()]
        for t, stall_s in self._stalls:
            n_prompts, n_tokens = self._read_again(t)
            owed.append((t, 0, stall_s + token_s * (n_prompts * n_prompt + n_tokens)))
        changes = [(t, change, 0.0) for t, change in self._changes()] + owed + [(t, 0, 0.0) for t in crowd.times]
        sums = [0.0] * len(HALF_SLOTS), [0.0] * len(HALF_SLOTS)
        at: dict[float, tuple[list[float], list[float]]] = {}  # time -> integrals until then
        live, owed_s, last = 0, 0.0, 0.0
        for t, change, pause_s in sorted(changes):
            if t > last and live:
                worked_s = self._clock.between(last, t)
                decoded_s, owed_s = max(0.0, worked_s - owed_s), max(0.0, owed_s - worked_s)
                crowded_s = decoded_s * computes * crowd.share(last)
                sums = plus(sums[0], decoded_s, live), plus(sums[1], crowded_s, live)
            live, owed_s, last = live + change, owed_s + pause_s, t
            at[t] = sums
        return [
            Exposure(one.n_tokens, *(difference(a, b) for a, b in zip(at[one.begin], at[one.end], strict=True)))
            for one in self._samples
            if one.n_tokens
        ]

    def prefills(self, began: float, ended: float) -> list[Prefill]:
        """What was prefilled in each window. Empty if the engine does not measure it."""
        found = []
        begins = self._prompt_begins()
        for window in within(self.windows, began, ended):
            prompts = sum(window.begin < t <= window.end for t in begins)
            again = [self._read_again(t) for t, _ in self._stalls if window.begin < t <= window.end]
            n_prompts, n_tokens = prompts + sum(n for n, _ in again), sum(n for _, n in again)
            seconds = window.worked_s("p_generate:prefill")
            found.append(Prefill(n_prompts, n_tokens, seconds))
        return found if any(one.seconds for one in found) else []

    def _prompt_begins(self) -> list[float]:
        """Times at which a prompt was read: the first of its samples began while none was live."""
        by_uid = sorted(self._samples, key=lambda one: (one.key[:2], one.key[3], one.begin))
        found = []
        for _, group in groupby(by_uid, key=lambda one: (one.key[:2], one.key[3])):
            until = -1.0
            for one in group:
                if one.begin > until:
                    found.append(one.begin)
                until = max(until, one.end)
        return found

    def _read_again(self, t: float) -> tuple[int, float]:
        """(prompts, tokens of samples) that an update at this time makes the engine read again."""
        live = [one for one in self._samples if one.begin < t < one.end] if self._reads_again else []
        done = [self._clock.between(one.begin, t) / max(1e-9, self._clock.between(one.begin, one.end)) for one in live]
        return len({one.key[1] for one in live}), sum(
            share * one.n_tokens for share, one in zip(done, live, strict=True)
        )


def prefill_token_s(over: Sequence[Prefill], prompt_tokens: float) -> float:
    """Seconds of a prefilled token; 0 if the engine does not measure prefills."""
    n_tokens = sum(one.n_prompts * prompt_tokens + one.n_tokens for one in over)
    return sum(one.seconds for one in over) / n_tokens if n_tokens else 0.0


def plus(sums: Sequence[float], seconds: float, n_live: int) -> list[float]:
    """The integrals after so many seconds more with so many live samples."""
    return [total + seconds / (n_live + half) for total, half in zip(sums, HALF_SLOTS, strict=True)]


def difference(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(before, after, strict=True)]


def samples_in_slots(lines: Sequence[Line], n_slots: int) -> list[Lived]:
    """The samples of one generator: each begins when it is requested or, with full slots, when one is free."""
    begun: dict[Key, float] = {}
    waiting: deque[Key] = deque()
    found = []
    for line in lines:
        if line["event"] == "request":
            waiting.append(sample_key(line))
        elif line["event"] == "completion":
            key = sample_key(line)
            if key in begun:
                found.append(Lived(key, begun.pop(key), line["t"], line["n_tokens"]))
            elif key in waiting:
                waiting.remove(key)
        while waiting and len(begun) < n_slots:
            begun[waiting.popleft()] = line["t"]
    return found
