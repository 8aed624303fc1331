"""Reads the samples of one training step after the other from the growing RUN/samples/samples.jsonl.

A step's samples stand together. A step that was undone and trained again stands there twice: the later block counts.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.alarms.texts import repeated_share, template_of
from tools.run import Line, Run

KEPT = 128  # samples of a step that are looked at, drawn at random
REPEATS = 0.5  # a sample with a larger share of repeated n-grams repeats itself
LEAST_PROMPTS = 4  # in a step, before samples of different prompts are compared


@dataclass(slots=True)
class StepSamples:
    """Some samples of one step."""

    step: int
    kept: list[Line] = field(default_factory=list)
    n: int = 0

    def add(self, sample: Line) -> None:
        """Keep the sample, or not: each has the same chance."""
        self.n += 1
        if len(self.kept) < KEPT:
            self.kept.append(sample)
        elif (place := random.Random(f"{self.step}/{self.n}").randrange(self.n)) < KEPT:
            self.kept[place] = sample

    @property
    def repeated(self) -> float:
        """Share of samples that repeat themselves."""
        return sum(repeated_share(sample["completion"]) > REPEATS for sample in self.kept) / len(self.kept)

    def templates(self) -> dict[str, float]:
        """Template -> its share of the samples, where prompts count alike; {} for a few prompts."""
        sizes = Counter(sample["prompt"] for sample in self.kept)
        shares: defaultdict[str, float] = defaultdict(float)
        for sample in self.kept if len(sizes) >= LEAST_PROMPTS else ():
            shares[template_of(sample["prompt"], sample["completion"])] += 1 / sizes[sample["prompt"]] / len(sizes)
        return dict(shares)


class SampleReader:
    """Call `block` for steps in the order of training, and `go_back` when a term undoes some."""

    def __init__(self, where: Run) -> None:
        self._file = where.folder / "samples" / "samples.jsonl"
        self._offset = 0  # bytes read
        self._seeks = False  # blocks of later, undone steps may stand before the next one

    def go_back(self) -> None:
        self._seeks = True

    def block(self, step: int) -> StepSamples | None:
        """The samples of a step, all of which are written; None if the run keeps none."""
        found: StepSamples | None = None
        for begin, end, sample in self._rest():
            at = step if sample is None else sample["step"]
            if (found is not None and at != step) or (at > step and not self._seeks):
                self._offset = begin
                break
            self._offset = end
            if sample is not None and at == step:
                found = found or StepSamples(step)
                found.add(sample)
        self._seeks = False
        return found

    def _rest(self) -> Iterator[tuple[int, int, Line | None]]:
        """Begin, end and trained sample of each further line; None for other lines. A torn last line waits."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as file:
            end = file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                begin, end = end, end + len(raw)
                yield begin, end, _trained(raw)


def _trained(raw: bytes) -> Line | None:
    """The sample if it was trained; None for a broken line, too."""
    try:
        sample = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(sample, dict) or sample.get("evaluation"):
        return None
    has_texts = all(isinstance(sample.get(key), str) for key in ("prompt", "completion"))
    has_ids = all(type(sample.get(key)) is int for key in ("step", "uid", "sample"))
    return sample if has_texts and has_ids else None
