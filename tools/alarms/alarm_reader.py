"""Applies the rules to each update of a run, and keeps what was raised with samples to read (the latest block)."""

import random
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

from pydantic import ValidationError

from areal_bus.config.removed import left_out
from areal_bus.config.sections import WatchConfig
from areal_bus.errors import ConfigError
from tools.alarms.history import REPEATED, History, Waiting
from tools.alarms.rules import RULES, WINDOW, Reading, Rule
from tools.follow import HOLD_S, JournalFollower
from tools.run import Line, Run, parse
from tools.trackers.series import EVENTS, UPDATE, Row, SeriesReader, Undone

MOST_SAMPLES = 10
MOST_TEMPLATES = 20  # of a step; others are rare


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
        sample = parse(raw)
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One alarm that was raised. Fields are plain JSON values."""

    name: str
    rule: str  # in one line
    since: int  # version at which it was raised first
    last: int  # newest version at which the rule holds
    is_active: bool  # the rule holds at the newest version
    value: float  # when it was raised
    limit: float
    seen: str  # what was seen then
    advice: str
    samples: list[Line] = field(default_factory=list)  # to read, as in samples.jsonl; of the updates before `since`


class AlarmReader:
    """Give it the `spans` lines and the rows of a SeriesReader, in their order."""

    def __init__(self, where: Run) -> None:
        """Raises ConfigError when [watch] of the run is invalid."""
        off = settings_of(where).off
        self._rules = [rule for rule in RULES if rule.name not in off]
        self._history = History()
        self._waiting: Waiting | None = None  # since the newest update; None before the first
        self._samples = SampleReader(where)
        self._recent: deque[StepSamples] = deque(maxlen=WINDOW)
        self._raised: dict[str, Finding] = {}

    @property
    def version(self) -> int:
        return self._history.version

    def count(self, line: Line) -> None:
        """Take a `spans` line. Those before the first update are of loading."""
        if self._waiting is not None:
            self._waiting.add(line)

    def take(self, item: Row | Undone) -> list[Finding]:
        """Take a row; returns the alarms that are raised for the first time."""
        if isinstance(item, Undone):
            self._go_back(item.version)
            return []
        if item.key != UPDATE:
            self._history.evaluate(item)
        else:
            self._update(item)
        return self._check()

    def findings(self) -> list[Finding]:
        """All alarms of the surviving history, in the order in which they were raised."""
        return sorted(self._raised.values(), key=lambda finding: finding.since)

    def unseen(self) -> dict[str, str]:
        """Rule -> what the journal does not have, of rules that could not be checked."""
        return {rule.name: rule.needs for rule in self._rules if not rule.is_seen(self._history)}

    def _update(self, row: Row) -> None:
        history = self._history
        history.add(row)
        if self._waiting is not None:
            history.waits.append((row.step, self._waiting))
        self._waiting = Waiting()
        block = self._samples.block(row.step - 1)
        if block is None:
            return
        self._recent.append(block)
        history.add_value(REPEATED, block.repeated)
        if templates := block.templates():
            most = nlargest(MOST_TEMPLATES, templates.items(), key=lambda one: one[1])
            history.templates.append((row.step, dict(most)))

    def _check(self) -> list[Finding]:
        version, new = self._history.version, []
        for rule in self._rules:
            reading, known = rule.check(self._history), self._raised.get(rule.name)
            if reading is None:
                if known is not None:
                    self._raised[rule.name] = replace(known, is_active=False)
            elif known is None:
                new.append(self._finding(rule, reading))
                self._raised[rule.name] = new[-1]
            else:
                self._raised[rule.name] = replace(known, last=version, is_active=True)
        return new

    def _finding(self, rule: Rule, reading: Reading) -> Finding:
        version = self._history.version
        return Finding(
            name=rule.name,
            rule=rule.sentence,
            since=version,
            last=version,
            is_active=True,
            value=reading.value,
            limit=reading.limit,
            seen=reading.seen,
            advice=rule.advice,
            samples=chosen((sample for block in reversed(self._recent) for sample in block.kept), rule.rank),
        )

    def _go_back(self, version: int) -> None:
        self._history.go_back(version)
        self._samples.go_back()
        self._waiting = None
        kept = [block for block in self._recent if block.step < version]
        self._recent = deque(kept, maxlen=WINDOW)
        left = {name: finding for name, finding in self._raised.items() if finding.since <= version}
        self._raised = {name: replace(finding, last=min(finding.last, version)) for name, finding in left.items()}


def chosen(samples: Iterable[Line], rank: Callable[[Line], float]) -> list[Line]:
    """The samples to read: the highest ranks, of as many prompts as there are."""
    ordered = sorted(samples, key=rank, reverse=True)
    firsts: dict[object, Line] = {}
    for sample in ordered:
        firsts.setdefault(sample["uid"], sample)
    first = list(firsts.values())[:MOST_SAMPLES]
    others = [sample for sample in ordered if not any(sample is one for one in first)]
    return [*first, *others[: MOST_SAMPLES - len(first)]]


def settings_of(where: Run) -> WatchConfig:
    """[watch] of a run; the defaults for a run of an older version."""
    given = left_out(where.config()).get("watch", {})
    try:
        return WatchConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("watch", *first["loc"])))
        raise ConfigError(f"config.json of {where.folder} must hold valid settings: {key}: {first['msg']}") from None


def read(where: Run) -> AlarmReader:
    reader, series = AlarmReader(where), SeriesReader()
    for line in JournalFollower(where, EVENTS).read():
        if line["event"] == "spans":
            reader.count(line)
        for item in series.take(line):
            reader.take(item)
    return reader


def findings(where: Run) -> list[Finding]:
    return read(where).findings()


@dataclass(slots=True)
class LiveAlarms:
    """The alarms of a growing journal. Each `advance` reads its new lines."""

    where: Run
    reader: AlarmReader = field(init=False)
    _journal: JournalFollower = field(init=False)
    _series: SeriesReader = field(default_factory=SeriesReader)

    def __post_init__(self) -> None:
        self.reader = AlarmReader(self.where)
        self._journal = JournalFollower(self.where, EVENTS)

    def advance(self, until: float | None = None) -> list[Finding]:
        """Alarms raised since the last call, by lines up to wall time `until`; those of undone versions count anew."""
        new = []
        for line in self._journal.read(time.time() - HOLD_S if until is None else until):
            if line["event"] == "spans":
                self.reader.count(line)
            for item in self._series.take(line):
                new += self.reader.take(item)
        return new
