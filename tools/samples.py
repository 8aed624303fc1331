"""Shows logged samples: prompt, completion, reward, finish reason, version spans and masked tokens."""

import argparse
import contextlib
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.episodes import facts_of, further_texts, heading_of, right_or_wrong, trajectories_of
from tools.run import Line, Run
from tools.surviving_history import undone_places
from tools.terminal import run_parser

EPILOG = """\
examples:
  python -m tools.samples                         a few samples of the latest step of the latest run
  python -m tools.samples --step 3 --worst        the lowest rewards of step 3
  python -m tools.samples runs/demo --uid 12      every sample of one prompt (all attempts and steps)
  python -m tools.samples --text "I give up" --reward 0.5: --html found.html    a page of all that match
  python -m tools.samples --evaluation after      samples of the evaluation "after"

LOW:HIGH is a range; either side may be empty; a negative LOW needs the form --reward=-1:0. Samples of undone steps (a
later term of the learner restarted from an earlier version) are marked; only --step and --uid show them. Samples are
logged when journal.samples = true."""

N_SHOWN, N_ON_PAGE = 5, 50
VERDICTS = ("right", "wrong", "none")
Range = tuple[float, float]


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.samples", __doc__, EPILOG)
    p.add_argument("--step", type=int, metavar="N", help="samples trained in step N = 0, 1, 2, ... (the latest)")
    p.add_argument("--uid", type=int, metavar="U", help="samples of prompt U only, whatever the step")
    p.add_argument("--sample", type=int, metavar="S", help="with --uid: one sample of its group")
    p.add_argument("--evaluation", metavar="NAME", help="samples of this evaluation instead of trained ones")
    p.add_argument("--text", default="", metavar="TEXT", help="that contain this text, in any turn; case is ignored")
    p.add_argument("--reward", type=range_of, metavar="LOW:HIGH", help="with a reward in this range")
    p.add_argument("--tokens", type=range_of, metavar="LOW:HIGH", help="with this number of sampled tokens")
    p.add_argument("--verdict", choices=VERDICTS, default="", help="right, wrong, or without a reward")
    p.add_argument("--worst", action="store_true", help="lowest reward first; samples without a reward before them")
    how_many = f"how many to show ({N_SHOWN}; {N_ON_PAGE} with --html; with --uid all)"
    p.add_argument("--n", type=int, metavar="N", help=how_many)
    p.add_argument("--json", action="store_true", help="the samples as JSON lines, as they were kept")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a page of them; with --uid also the prompt's life")
    return p


def range_of(text: str) -> Range:
    """ "LOW:HIGH" as two numbers; an empty side has no limit. One number is both."""
    low, colon, high = text.partition(":")
    with contextlib.suppress(ValueError):
        found = float(low or "-inf"), float(high or "inf") if colon else float(low)
        if found[0] <= found[1]:
            return found
    raise argparse.ArgumentTypeError(f"invalid range {text!r}: two numbers LOW:HIGH are needed, the smaller one first")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which samples. Without any field: those of the latest step."""

    step: int | None = None
    uid: int | None = None
    sample: int | None = None
    evaluation: str | None = None
    text: str = ""
    reward: Range | None = None
    tokens: Range | None = None
    verdict: str = ""

    def fits(self, sample: Line) -> bool:
        """Whether the sample passes every filter. An undone one passes only where its step or prompt is named."""
        is_named = self.step is not None or self.uid is not None
        named = ("step", self.step), ("uid", self.uid), ("sample", self.sample)
        return (
            sample.get("evaluation", "") == (self.evaluation or "")
            and all(value is None or sample.get(key) == value for key, value in named)
            and (is_named or not sample.get("undone"))
            and within(sample.get("reward"), self.reward)
            and within(sample.get("n_tokens"), self.tokens)
            and self.verdict in ("", "none" if sample.get("reward") is None else right_or_wrong(sample))
            and (not self.text or self.text.casefold() in all_text(sample))
        )

    def __str__(self) -> str:
        told = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) not in (None, "")}
        texts = {key: ":".join(map(str, one)) if isinstance(one, tuple) else one for key, one in told.items()}
        return ", ".join(f"--{key} {text}" for key, text in texts.items())


def within(value: float | None, limits: Range | None) -> bool:
    return limits is None or (value is not None and limits[0] <= value <= limits[1])


def all_text(sample: Line) -> str:
    turns = (text for turn in sample.get("turns", ()) for text in turn)
    return "\n".join((sample.get("prompt", ""), sample.get("completion", ""), *turns)).casefold()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.n is not None and args.n < 1:
        raise ConfigError(f"--n must be at least 1: {args.n}")
    if args.step is not None and args.evaluation is not None:
        raise ConfigError("give either --step (trained samples) or --evaluation (evaluation samples)")
    where = run.find(args.run)
    wanted = Wanted(**{field.name: getattr(args, field.name) for field in fields(Wanted)})
    found, title = select(mark_undone(where), wanted)
    ordered = sorted(found, key=_reward) if args.worst else interleave_groups(found)
    ordered.sort(key=lambda sample: sample.get("undone", False))  # undone samples come last
    shown = ordered[: args.n or (None if args.uid is not None else N_ON_PAGE if args.html else N_SHOWN)]
    if args.json:
        for sample in shown:
            print(terminal.json_line(sample))
        return 0
    heading = f"{title}; {summary(found, len(shown))}{', lowest reward first' if args.worst else ''}"
    if args.html:
        episodes_page = importlib.import_module("tools.report.page.episodes_page")  # with jinja2, for a page only
        return int(episodes_page.write_page(where, heading, shown, args.uid, args.html))
    print(f"{where.folder} ({where.name}): {heading}\n")
    width = terminal.width()
    print("\n\n".join(render(sample, width) for sample in shown))
    return 0


def summary(found: list[Line], n_shown: int) -> str:
    """How many are shown, how many of them are undone, and an overview of those that survive."""
    surviving = [sample for sample in found if not sample.get("undone")] or found
    n_undone = sum(sample.get("undone", False) for sample in found)
    what = f", {n_undone} of them undone" if n_undone else ""
    of = f"all {len(surviving)}{' surviving' if len(surviving) < len(found) else ''}: {overview(surviving)}"
    return f"{n_shown} of {len(found)} samples{what}\n{of}"


def mark_undone(where: Run) -> Iterator[Line]:
    """All logged samples; those whose training is undone get `undone`."""
    places = undone_places(where, where.samples())
    for place, sample in enumerate(where.samples()):
        yield sample | {"undone": True} if place in places else sample


def select(samples: Iterable[Line], wanted: Wanted) -> tuple[list[Line], str]:
    """The selected samples (default: latest step) and their title. One pass. Raises ConfigError for no match."""
    if wanted == Wanted():
        chosen = latest_samples(samples)
        if not chosen:
            why = "it has trained and evaluated nothing yet, or journal.samples = false"
            raise ConfigError(f"this run has no logged sample: {why}")
        return chosen, _title(chosen, Wanted(step=chosen[0]["step"]))
    chosen = []
    steps: set[int] = set()
    evaluations: dict[str, None] = {}
    for sample in samples:
        if name := sample["evaluation"]:
            evaluations[name] = None
        else:
            steps.add(sample["step"])
        if wanted.fits(sample):
            chosen.append(sample)
    if not chosen:
        trained = f"trained samples of steps {min(steps)} to {max(steps)}" if steps else "no trained sample"
        raise ConfigError(f"no logged sample matches {wanted}; there are {trained}, evaluations {list(evaluations)}")
    return chosen, _title(chosen, wanted)


def latest_samples(samples: Iterable[Line]) -> list[Line]:
    """The samples of the last trained step that is not undone; if there is none, of the last evaluation."""
    trained: list[Line] = []
    evaluated: list[Line] = []
    for sample in samples:
        if sample.get("undone"):
            continue
        kept = evaluated if sample["evaluation"] else trained
        if kept and any(kept[0][key] != sample[key] for key in ("evaluation", "step", "version")):
            kept.clear()
        kept.append(sample)
    return trained or evaluated


def _title(chosen: list[Line], wanted: Wanted) -> str:
    first = chosen[0]
    title = "trained" if wanted.step is None else f"step {first['step']}, trained at version {first['version']}"
    if first["evaluation"]:
        title = f'evaluation "{first["evaluation"]}" of version {first["version"]}'
    return title if wanted.uid is None else f"prompt {wanted.uid}, {title}"


def interleave_groups(samples: list[Line]) -> list[Line]:
    """The first sample of each group, then the second of each, and so on, so that a few samples show many prompts."""
    seen: Counter[object] = Counter()
    ranked = []
    for place, sample in enumerate(samples):
        group = (sample["step"], sample["uid"])
        ranked.append((seen[group], place, sample))
        seen[group] += 1
    return [sample for *_, sample in sorted(ranked, key=lambda entry: entry[:2])]


def _reward(sample: Line) -> float:
    """Sort key of --worst. A timeout or an error has no reward (I10) and comes first."""
    return float("-inf") if sample.get("reward") is None else float(sample["reward"])


def overview(samples: list[Line]) -> str:
    """One line about samples: mean reward, number of correct ones, finish reasons."""
    scored = [sample for sample in samples if sample.get("reward") is not None]
    judged = [sample["correct"] for sample in scored if sample.get("correct") is not None]
    parts = []
    if scored:
        parts.append(f"mean reward {sum(s['reward'] for s in scored) / len(scored):.3f}")
    if judged:
        parts.append(f"{sum(judged)} of {len(judged)} right")
    parts += [f"{n} {finish}" for finish, n in Counter(str(s.get("finish", "unknown")) for s in samples).most_common()]
    if unscored := len(samples) - len(scored):
        parts.append(f"{unscored} without a reward")
    return ", ".join(parts)


def render(sample: Line, width: int) -> str:
    """One sample as a block of text, at most `width` columns wide: trajectories, their turns, then facts."""
    head = f"-- {heading_of(sample)} "
    body = [head + "-" * max(width - len(head), 2)]
    found = trajectories_of(sample)
    n_turns = sum(len(one.turns) for one in found)
    for one in found:
        if is_tree := len(found) > 1 or bool(one.role):
            body.append(one.title)
        indent = "  " * is_tree
        for turn in one.turns:
            which = f"turn {turn.number} of {n_turns}: " if n_turns > 1 else ""
            for title, text, mark in ((turn.given_title, turn.given, "|"), (turn.sampled_title, turn.sampled, ">")):
                body += [f"{indent}{terminal.printable(which + title)}",
                         terminal.quote(text, indent=f"{indent}  {mark} ", width=width)]  # fmt: skip
    for title, text in further_texts(sample):
        body += [title, terminal.quote(text, indent="  > ", width=width)]
    return "\n".join([*body, terminal.quote("   ".join(facts_of(sample)), indent="", width=width)])


if __name__ == "__main__":
    terminal.end(main)
