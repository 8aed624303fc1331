"""A logged sample as trajectories, turns and facts, which every view of samples shows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from areal_bus.core.parts.split import count
from tools.run import Line, is_number
from tools.surviving_history import Spans, trained_spans

ROLE = "role/"  # begins the name of a reward part that is the reward of a role
NAME = r"([\w.:/-]+)"
CALLS = re.compile(  # the forms of docs/endpoint.md
    rf'<tool_call>\s*\{{\s*"name"\s*:\s*"{NAME}"|<function={NAME}>|\[TOOL_CALLS\]\s*(?:\[\s*\{{\s*"name"\s*:\s*")?{NAME}'
    rf'|\A\s*\{{\s*"name"\s*:\s*"{NAME}"|\A\s*\[([A-Za-z_][\w.]*)\('
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model."""

    number: int  # 1, 2, ... within the episode
    given: str  # text since the trajectory's last sampled token
    sampled: str
    spans: Spans  # version, number of sampled tokens; [] for a run that logged no segments
    n_masked: int  # of the sampled tokens, the first ones
    calls: str  # names of the tools that it calls
    given_title: str = "prompt"

    @property
    def trained(self) -> Spans:
        return trained_spans(self.spans, self.n_masked)

    @property
    def masked(self) -> Spans:
        return split_spans(self.spans, [self.n_masked])[0]

    @property
    def sampled_title(self) -> str:
        masked = f", {self.n_masked} masked" if self.n_masked else ""
        told = f" ({count(sum(n for _, n in self.spans), 'token')}, {versions_text(self.spans)}{masked})"
        return f"completion{told if self.spans else ''}{f', calls {self.calls}' if self.calls else ''}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one history."""

    number: int
    role: str
    reward: float | None  # of its role; None: the episode's
    turns: list[Turn] = field(default_factory=list)

    @property
    def title(self) -> str:
        role = f" ({self.role})" if self.role else ""
        reward = "" if self.reward is None else f", reward {self.reward:g}"
        return f"trajectory {self.number}{role}: {count(len(self.turns), 'turn')}{reward}"


def trajectories_of(sample: Line) -> list[Trajectory]:
    """The trajectories, each with its turns; a sample of one turn has one of each. Missing fields are tolerated."""
    texts = sample.get("turns") or [[sample.get("prompt", ""), sample.get("completion", "")]]
    numbers = sample.get("trajectories") or []
    numbers = numbers if len(numbers) == len(texts) else [0] * len(texts)
    roles, parts = sample.get("roles", "").split(), sample.get("parts") or {}
    found: dict[int, Trajectory] = {}
    for turn, number in zip(_turns(sample, texts), numbers, strict=True):
        if number not in found:
            role = roles[number] if number < len(roles) else ""
            found[number] = Trajectory(number, role, parts.get(f"{ROLE}{role}") if role else None)
        earlier = found[number].turns
        title = "prompt" if not earlier else "result of the call" if earlier[-1].calls else "given"
        earlier.append(replace(turn, given_title=title))
    return list(found.values())


def _turns(sample: Line, texts: Sequence[Sequence[str]]) -> list[Turn]:
    segments, spans, left = sample.get("segments") or [], sample.get("versions") or [], sample.get("n_masked") or 0
    sizes = [n for _, n in segments] if len(segments) == len(texts) > 1 else []
    each, out = split_spans(spans, sizes) if sizes else [[] for _ in texts], []
    for number, (given, sampled) in enumerate(texts, start=1):
        masked = min(left, sum(n for _, n in each[number - 1]))  # versions never decrease (I5): the first ones
        left -= masked
        calls = dict.fromkeys(next(filter(None, match.groups())) for match in CALLS.finditer(sampled))
        out.append(Turn(number, given, sampled, each[number - 1], masked, ", ".join(calls)))
    return out


def split_spans(spans: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Spans]:
    """The version spans of consecutive turns of `sizes` sampled tokens."""
    out, waiting = [], [(version, n) for version, n in reversed(spans)]
    for size in sizes:
        own: Spans = []
        while size > 0 and waiting:
            version, n = waiting.pop()
            own.append((version, min(n, size)))
            if n > size:
                waiting.append((version, n - size))
            size -= n
        out.append(own)
    return out


def versions_text(spans: Sequence[Sequence[int]]) -> str:
    """For example "version 3" or "versions 3 x12, 4 x7"."""
    if len(spans) == 1:
        return f"version {spans[0][0]}"
    return "versions " + (", ".join(f"{version} x{n}" for version, n in spans) or "none")


def facts_of(sample: Line) -> list[str]:
    """Reward, finish reason, tokens and versions of the whole episode, and the error of its verdict."""
    reward, status = sample.get("reward"), sample.get("status", "value")
    verdict = f"{reward:.3f}" if is_number(reward) else "none"
    verdict += f" ({status})" if status != "value" else f" ({word})" if (word := right_or_wrong(sample)) else ""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in (sample.get("parts") or {}).items())
    return [
        f"reward {verdict}{f' ({parts})' if parts else ''}",
        f"finish {sample.get('finish', 'unknown')}",
        f"{sample.get('n_tokens', '?')} tokens, {sample.get('n_masked', '?')} masked",
        "versions " + spans_text(sample),
        *([f"error {sample['error']}"] if sample.get("error") else []),
    ]


def spans_text(sample: Line) -> str:
    """Version spans as text: "3 x12, 4 x7 (lag 0 to 1)"."""
    pairs = sample.get("versions") or []
    text = ", ".join(f"{version} x{n}" for version, n in pairs) or "none"
    if sample.get("evaluation") or not pairs or "version" not in sample:
        return text
    lags = [sample["version"] - version for version, _ in pairs]
    lag = str(lags[0]) if min(lags) == max(lags) else f"{min(lags)} to {max(lags)}"
    return f"{text} (lag {lag})"


def right_or_wrong(sample: Line) -> str:
    """The verdict of the task; "" where it has no yes or no, or no verdict."""
    correct = sample.get("correct") if sample.get("status", "value") == "value" else None
    return "" if correct is None else "right" if correct else "wrong"


def heading_of(sample: Line) -> str:
    """The sample's identity: prompt, sample, attempt, step or evaluation, generator."""
    when = f"evaluation {sample['evaluation']}" if sample.get("evaluation") else f"step {sample.get('step', '?')}"
    undone = " (undone)" if sample.get("undone") else ""
    ids = f"uid {sample.get('uid')} sample {sample.get('sample')} attempt {sample.get('attempt', '?')}"
    return f"{ids}, {when}{undone}, {sample.get('generator', '?')}"


def further_texts(sample: Line) -> list[tuple[str, str]]:
    """(title, text): what the reward scored, if it is another text than the last answer; the row's answer."""
    turns = sample.get("turns")
    scored, answer = sample.get("completion", ""), sample.get("answer")
    out = [("text for the reward", scored)] if turns and scored != turns[-1][1] else []
    return [*out, *([("answer of the row", answer)] if answer else [])]
