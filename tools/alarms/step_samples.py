"""Reads the samples of one training step after the other from the growing RUN/samples/samples.jsonl.

A step's samples stand together. A step that was undone and trained again stands there twice: the later block counts.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tools.run import Line, Run

KEPT = 128  # samples of a step that are looked at, drawn at random
REPEATS = 0.5  # a sample with a larger share of repeated n-grams repeats itself
LEAST_PROMPTS = 4  # in a step, before samples of different prompts are compared
TAIL = 512  # words or characters at the end of a text that are compared: a loop lasts until the limit
LEAST_WORDS = 8  # a shorter text, or one of a language without spaces, is compared by characters
WORDS_IN_GRAM, CHARACTERS_IN_GRAM = 4, 3
LEAST_GRAMS = 4
OPENING = 8  # words of a template
SHORT = 4  # a text of fewer words is its own template
_NUMBER = re.compile(r"\d+")


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


def repeated_share(text: str) -> float:
    """Share of the n-grams of the text's end that occurred in it before; 0 for a very short text."""
    words = text.split()
    if len(words) >= LEAST_WORDS:
        return _repeated(words[-TAIL:], WORDS_IN_GRAM)
    return _repeated("".join(words)[-TAIL:], CHARACTERS_IN_GRAM)


def _repeated(units: Sequence[str], n: int) -> float:
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= LEAST_GRAMS else 0.0


def template_of(prompt: str, completion: str) -> str:
    """The opening of a completion, with # for numbers and * for words of its prompt; a short one as it is."""
    words = completion.casefold().split()
    if len(words) < SHORT:
        return " ".join(words)
    given = set(prompt.casefold().split())
    return " ".join("*" if word in given else _NUMBER.sub("#", word) for word in words[:OPENING])
