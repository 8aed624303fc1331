"""Where every sampled token went: each finished sample has one fate, by the journal. Pure: lines in, an account out.

A finished sample has a `completion` line of its generator; without that file, a `scored` line of the head.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.audit.figures import TrainedSample, read, trained_tokens
from tools.audit.replay.terms import ATTEMPTS
from tools.audit.run_settings import RunSettings
from tools.report.facts import sampling_time
from tools.report.facts.sampling_time import Sample, SamplingTime
from tools.run import Line, skips_incomplete
from tools.surviving_history import Key, sample_key

EVENTS = (*sampling_time.EVENTS, "admit", "scored", "trajectory", "step", "update")
TRAINED, MASKED, NO_GRADIENT, IN_FLIGHT = "trained", "masked", "without signal", "in flight"
UNDONE, LOST, ANEW, EVALUATION, UNFINISHED = "undone", "lost", "begun anew", "evaluation", "never finished"
ORDER = {TRAINED: -3, MASKED: -2, NO_GRADIENT: -1, IN_FLIGHT: 1, EVALUATION: 2, UNFINISHED: 3}  # of rows; others: 0
OPEN_AT_END = frozenset({IN_FLIGHT, "end_of_run", "end_of_data"})  # the run ended before these were decided


@dataclass(slots=True)
class _Prompt:
    """One admission of a prompt."""

    source: str
    term: int
    attempt: int = -1  # of its last lease
    kept: dict[int, Key] = field(default_factory=dict)  # verdicts that count, by sample
    reason: str = ""  # of its refund


class SampleFate(NamedTuple):
    """One sample and where its tokens went: into a batch (trained, masked, the rest without signal), or its fate."""

    fate: str
    n_tokens: int = 0  # unknown (0) where it never finished
    seconds: float = 0.0
    source: str = ""
    group: tuple[int, int] | None = None  # uid and term of its admission; None: its length counts in no statistic
    n_trained: float = 0.0
    n_masked: int = 0


class FateRow(NamedTuple):
    """One fate. A sample of a batch counts as trained if any of its tokens is."""

    fate: str
    n_samples: int
    n_tokens: int
    seconds: float


def fate_rows(samples: Iterable[SampleFate]) -> list[FateRow]:
    """All tokens and device seconds by fate."""
    n_samples, tokens, seconds = Counter[str](), dict.fromkeys(ORDER, 0.0), dict.fromkeys(ORDER, 0.0)
    for fate, n_tokens, s, _, _, n_trained, n_masked in samples:
        if fate == TRAINED and n_tokens:
            rest = n_tokens - n_trained - n_masked
            parts = {TRAINED: n_trained, MASKED: n_masked, NO_GRADIENT: rest}
        else:
            parts = {fate: n_tokens}
        n_samples[next((part for part, n in parts.items() if n), fate)] += fate != ANEW
        for part, n in parts.items():
            tokens[part] = tokens.get(part, 0.0) + n
            seconds[part] = seconds.get(part, 0.0) + (s * n / n_tokens if n_tokens else s)
    order = sorted(tokens, key=lambda fate: (ORDER.get(fate, 0), -tokens[fate], fate))
    return [FateRow(fate, n_samples[fate], round(tokens[fate]), seconds[fate]) for fate in order]


@dataclass(slots=True)
class TokenAccount:
    """Takes lines of EVENTS of all processes, each process in order."""

    setup: RunSettings
    time: SamplingTime = field(default_factory=SamplingTime)
    _made: dict[Key, int] = field(default_factory=dict)  # finished samples of training and their tokens
    _evaluated: dict[Sample, int] = field(default_factory=dict)  # finished samples of evaluations
    _anew: dict[Key, int] = field(default_factory=dict)  # tokens that an agent dropped
    _continues: dict[Key, int] = field(default_factory=dict)  # tokens of other generators
    _last: dict[tuple[int, int], Key] = field(default_factory=dict)  # the newest finished attempt of a sample
    _live_on: set[Key] = field(default_factory=set)  # finished, then continued without the last token
    _status: dict[Key, str] = field(default_factory=dict)  # of received verdicts
    _prompts: dict[int, _Prompt] = field(default_factory=dict)
    _batches: dict[int, list[tuple[Key, TrainedSample]]] = field(default_factory=dict)  # by step
    _trained: dict[int, dict[Key, tuple[float, int]]] = field(default_factory=dict)  # step -> trained, masked tokens
    _term: int = 0

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        event = line["event"]
        if event in sampling_time.EVENTS:
            self.time.take(line)
        if event in ("request", "completion", "scored") and line.get("evaluation"):
            if event == "completion":
                self._evaluated[str(line["evaluation"]), *sample_key(line)] = int(line["n_tokens"])
        elif (handler := getattr(self, f"_on_{event}", None)) is not None:
            handler(line)

    # samples

    def _on_request(self, line: Line) -> None:
        if line.get("n_done"):
            self._continues[sample_key(line)] = int(line["n_done"])

    def _on_completion(self, line: Line) -> None:
        key = sample_key(line)
        n_done, before = self._continues.pop(key, 0), self._last.get(key[:2])
        if n_done and before is not None:  # tokens of a finished sample that lives on in this one
            self._made[before] -= min(n_done, self._made[before])
            self._live_on.add(before)
        self._made[key] = int(line["n_tokens"])
        self._last[key[:2]] = key
        if line.get("n_forgotten"):
            self._anew[key] = int(line["n_forgotten"])

    def _on_scored(self, line: Line) -> None:
        key = sample_key(line)
        self._made.setdefault(key, int(line["n_tokens"]))
        self._status[key] = line["status"]
        self._prompts[key[0]].kept[key[1]] = key

    # prompts

    def _on_admit(self, line: Line) -> None:
        self._prompts[line["uid"]] = _Prompt(str(line.get("source", "")), int(line["term"]))

    def _on_lease(self, line: Line) -> None:
        self._prompts[line["uid"]].attempt = line["attempt"]

    def _on_refund(self, line: Line) -> None:
        self._prompts[line["uid"]].reason = str(line["reason"])

    def _on_term(self, line: Line) -> None:
        version, self._term = int(line["version"]), int(line["term"])
        for step in [step for step in self._batches if step < version]:
            self._train(step, {})
        self._batches.clear()
        self._trained = {step: found for step, found in self._trained.items() if step < version}
        self._prompts = {uid: one for uid, one in self._prompts.items() if uid < line["next_uid"]}
        for uid, kept in zip(line["open"], line["kept"], strict=True):
            if (prompt := self._prompts.get(uid)) is not None:  # open again
                prompt.reason, prompt.kept = "", {n: key for n, key in prompt.kept.items() if n in kept}

    # batches

    def _on_trajectory(self, line: Line) -> None:
        self._made.setdefault(sample_key(line), int(line["n_tokens"]))
        self._batches.setdefault(int(line["step"]), []).append((sample_key(line), read(line)))

    def _on_step(self, line: Line) -> None:
        if line["term"] >= self._term:
            self._train(int(line["version"]) - 1, line)

    _on_update = _on_step

    def _train(self, step: int, figures: Mapping[str, float]) -> None:
        """The update of a batch: its figures say how many tokens entered the loss."""
        batch = self._batches.pop(step, [])
        tokens = trained_tokens([one for _, one in batch], figures, self.setup)
        if batch:
            self._trained[step] = {key: (n, one.n_masked) for (key, one), n in zip(batch, tokens, strict=True)}

    # the account

    def samples(self) -> list[SampleFate]:
        """Every sample with its fate. Tokens that an agent dropped are one more."""
        trained = {key: found for batch in self._trained.values() for key, found in batch.items()}
        in_training = {key for batch in self._batches.values() for key, _ in batch}
        taken = {key[0] for key in (*trained, *in_training)}
        seconds, rest = self.time.seconds()
        out = [SampleFate(EVALUATION, n, seconds.pop(sample, 0.0)) for sample, n in self._evaluated.items()]
        for key, n_tokens in self._made.items():
            term, prompt = key[2] // ATTEMPTS, self._prompts.get(key[0])
            if prompt is not None and term < prompt.term:
                prompt = None  # its uid was given again
            fate = _fate(key, prompt, self._status.get(key), is_taken=key[0] in taken)
            fate = TRAINED if key in trained else IN_FLIGHT if key in in_training else fate
            s, n_anew = seconds.pop(("", *key), 0.0), self._anew.get(key, 0)
            if n_anew:
                part = s * n_anew / (n_tokens + n_anew)
                out.append(SampleFate(ANEW, n_anew, part))
                s -= part
            group = (key[0], term if prompt is None else prompt.term)
            counts = fate not in OPEN_AT_END and key not in self._live_on
            source = "" if prompt is None else prompt.source
            of_batch = trained.get(key, (0.0, 0))
            out.append(SampleFate(fate, n_tokens, s, source, group if counts else None, *of_batch))
        out += [SampleFate(UNFINISHED, 0, s) for s in seconds.values()]
        return [*out, SampleFate(UNFINISHED, 0, rest)] if rest else out


def _fate(key: Key, prompt: _Prompt | None, status: str | None, *, is_taken: bool) -> str:
    """The fate of a sample outside of all batches. `is_taken`: a batch has other samples of its group."""
    if prompt is None or (status and prompt.kept.get(key[1]) != key):
        return UNDONE
    if not status and key[2] != prompt.attempt:
        return LOST
    if is_taken:
        return f"reward_{status}" if status in ("timeout", "error") else LOST
    return prompt.reason or IN_FLIGHT
