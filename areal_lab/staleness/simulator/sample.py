"""Ground truth of one simulated sample: which weights made its tokens, and what its generator reported."""

from dataclasses import dataclass, field

from areal_bus.messages import Partial

Key = tuple[str, int, int, int]  # evaluation, uid, attempt, sample


@dataclass(slots=True)
class SimulatedSample:
    """One sample being decoded."""

    key: Key
    n_tokens: int
    began: float = 0.0
    made: int = 0  # tokens that `spans` holds
    spans: list[list[int]] = field(default_factory=list)
    made_by: list[tuple[int, str]] = field(default_factory=list)  # version and weights of each run of tokens
    n_starts: int = 0
    n_reported: int = 0  # tokens reported to the head
    n_done: int = 0  # tokens of other generators


@dataclass(frozen=True, slots=True)
class SimulatedReport:
    """The tokens that a generator had when it reported a sample."""

    key: Key
    n_tokens: int  # of the finished sample
    spans: list[list[int]]
    made_by: list[tuple[int, str]]


def report(sample: SimulatedSample, *, less: int = 0) -> SimulatedReport:
    """A report of a sample without its last `less` tokens (0 or 1)."""
    spans = [list(span) for span in sample.spans]
    if less:
        spans[-1][1] -= less
        spans = [span for span in spans if span[1]]
    made_by = [(version, weights) for version, weights in sample.made_by if version <= spans[-1][0]]
    return SimulatedReport(sample.key, sample.n_tokens, spans, made_by)


def report_number(partial: Partial) -> int:
    return int.from_bytes(partial.ids[:4], "little")


def begins_with(spans: list[list[int]], first: list[list[int]]) -> bool:
    """Whether the first tokens have these stamps."""
    n = len(first)
    if not n:
        return True
    (version, n_tokens), (stamped, n_stamped) = first[-1], spans[n - 1] if len(spans) >= n else (None, 0)
    return spans[: n - 1] == first[:-1] and stamped == version and n_stamped >= n_tokens
