"""Compares two trainings step by step, in the order in which a step is made: first difference, weights last."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tools.run import Line, Run

FIGURES = "other figures"
PARTS = ("prompts", "tokens", "log-probs", "rewards", "advantages", "gradient norm", FIGURES, "weights")
NOT_COMPARED = {"update_s", "version", "digest", "grad_norm", "samples"}  # seconds, and what has a part of its own
Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained sample of a recorded batch."""

    uid: int
    sample: int
    prompt: Sequence[int]  # the tokens before the first sampled one
    ids: Sequence[int]  # of the whole trajectory
    logps: Numbers  # (n_sampled,) float32, by the engine
    reward: float
    advantages: Numbers  # (n_trained,) or (1,) float32
    own: Numbers | None = None  # (n_sampled,) float32, by the learner, of a loop with recorded tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One update: what it trained, and the figures and the digest of its line."""

    version: int
    samples: Sequence[Sample]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two trainings differ."""

    step: int
    part: str  # of PARTS
    place: str  # the sample and token, or the figure
    first: str
    second: str

    @property
    def sentence(self) -> str:
        return f"{self.part} of step {self.step}, {self.place}: {self.first} and {self.second}"


def steps_of_run(run: Run) -> list[Step]:
    """Those of the ring's last term, which stay: a later update of a version replaces an earlier one."""
    return _steps(run.folder, run.events("update", role="head"))


def steps_of_loop(folder: Path) -> list[Step]:
    """Those of `tools.offline.synchronous_reference` or `tools.offline.replay`; the first line is their start."""
    with (folder / "reference.jsonl").open(encoding="utf-8") as file:
        return _steps(folder, list(map(json.loads, file))[1:])


def _steps(folder: Path, updates: Iterable[Line]) -> list[Step]:
    newest = {line["version"]: line for line in updates}
    return [Step(v, list(read_samples(folder, v - 1)), newest[v]) for v in sorted(newest)]


def read_samples(folder: Path, step: int) -> Iterator[Sample]:
    """The samples of all ranks' shares of a batch, in order of (group, sample)."""
    found = []
    for share in (folder / "batches" / f"step-{step:06d}").glob("rank-*"):
        items = json.loads((share / "batch.json").read_text(encoding="utf-8"))["items"]
        tensors = load_file(share / "batch.safetensors")
        found += [(item["group"], item["sample"], _sample(index, item, tensors)) for index, item in enumerate(items)]
    yield from (sample for *_, sample in sorted(found, key=lambda one: one[:2]))


def _sample(index: int, item: Line, tensors: Mapping[str, Numbers]) -> Sample:
    ids, places = tensors[f"{index}/ids_T"], tensors[f"{index}/places_K"]
    by_token = tensors.get(f"{index}/token_advantages")
    return Sample(
        uid=item["uid"],
        sample=item["sample"],
        prompt=ids[: places[0]].tolist() if len(places) else ids.tolist(),
        ids=ids.tolist(),
        logps=tensors[f"{index}/behav_K"],
        reward=item["reward"],
        advantages=tensors["advantages"][index : index + 1] if by_token is None else by_token,
        own=tensors.get(f"{index}/own/logps"),
    )


def differences(first: Step, second: Step) -> dict[str, Difference]:
    """The first difference of each part that differs, in the order of PARTS."""
    found = {}
    for part in PARTS:
        place = _places(part, first, second)
        if (difference := next(place, None)) is not None:
            found[part] = Difference(first.version, part, *difference)
    return found


Place = tuple[str, str, str]


def _places(part: str, first: Step, second: Step) -> Iterator[Place]:
    if part in ("gradient norm", FIGURES, "weights"):
        keys = {"gradient norm": ["grad_norm"], "weights": ["digest"]}.get(part) or sorted(
            (first.figures.keys() & second.figures.keys()) - NOT_COMPARED - HEADER
        )
        for key in keys:
            one, other = first.figures.get(key), second.figures.get(key)
            if one != other and not (one != one and other != other):  # both may be NaN
                yield key, str(one), str(other)
        return
    if part == "prompts":
        ours, theirs = ([(s.uid, s.sample) for s in step.samples] for step in (first, second))
        if ours != theirs:
            yield "uids and samples", *_first_of(ours, theirs)
    for one, other in zip(first.samples, second.samples, strict=False):
        yield from _of_sample(part, one, other)


HEADER = {"t", "wall", "term", "role", "rank", "inc", "seq", "event", "chain", "u"}


def _first_of(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[str, str]:
    n = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if n is None:
        return f"{len(ours)} of them", f"{len(theirs)} of them"
    return str(ours[n]), str(theirs[n])


def _of_sample(part: str, one: Sample, other: Sample) -> Iterator[Place]:
    name = f"uid {one.uid} sample {one.sample}"
    if part == "rewards":
        if one.reward != other.reward:
            yield name, repr(one.reward), repr(other.reward)
        return
    kinds = {"prompts": "prompt", "tokens": "ids", "log-probs": "logps", "advantages": "advantages"}
    ours, theirs = (np.asarray(getattr(sample, kinds[part])) for sample in (one, other))
    if ours.tobytes() == theirs.tobytes():
        return
    n = min(len(ours), len(theirs))
    unequal = np.flatnonzero(_bits(ours[:n]) != _bits(theirs[:n]))
    at = int(unequal[0]) if len(unequal) else n
    values = [f"{values[at]:.9g}" if at < len(values) else "none" for values in (ours, theirs)]
    yield f"{name}, token {at}", values[0], values[1]


def _bits(numbers: Numbers) -> Numbers:
    return numbers.view(f"u{numbers.itemsize}")  # 0.0 and -0.0 differ


def max_logprob_difference(first: Sequence[Step], second: Sequence[Step]) -> float | None:
    """The largest difference of a log-prob between samples with the same tokens; None where no sample has those."""
    gaps = [
        float(np.abs(one.logps - other.logps).max(initial=0.0))
        for a, b in zip(first, second, strict=False)
        for one, other in zip(a.samples, b.samples, strict=False)
        if one.ids == other.ids and one.logps.shape == other.logps.shape
    ]
    return max(gaps, default=None)
