"""Shows logged samples: prompt, completion, reward, finish reason, version spans and masked tokens."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.run import Line, Run
from tools.surviving_history import undone_places
from tools.terminal import run_parser

EPILOG = """\
examples:
  python -m tools.samples                         a few samples of the latest step of the latest run
  python -m tools.samples --step 3 --worst        the lowest rewards of step 3
  python -m tools.samples runs/demo --uid 12      every sample of one prompt (all attempts and steps)
  python -m tools.samples --evaluation after      samples of the evaluation "after"

Samples of undone steps (a later term of the learner restarted from an earlier version) are marked; without --step and
--uid they are skipped. Samples are logged when journal.samples = true."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.samples", description="Show samples of a run.", epilog=EPILOG)
    p.add_argument("--step", type=int, metavar="N", help="samples trained in step N = 0, 1, 2, ... (the latest)")
    p.add_argument("--uid", type=int, metavar="U", help="samples of prompt U only, whatever the step")
    p.add_argument("--evaluation", metavar="NAME", help="samples of this evaluation instead of trained ones")
    p.add_argument("--worst", action="store_true", help="lowest reward first; samples without a reward before them")
    p.add_argument("--n", type=int, metavar="N", help="how many to show (5; with --uid all)")
    p.add_argument("--json", action="store_true", help="the samples as JSON lines, as they were kept")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.n is not None and args.n < 1:
        raise ConfigError(f"--n must be at least 1: {args.n}")
    if args.step is not None and args.evaluation is not None:
        raise ConfigError("give either --step (trained samples) or --evaluation (evaluation samples)")
    where = run.find(args.run)
    found, title = select(mark_undone(where), step=args.step, uid=args.uid, evaluation=args.evaluation)
    ordered = sorted(found, key=_reward) if args.worst else interleave_groups(found)
    ordered.sort(key=lambda sample: sample.get("undone", False))  # undone samples come last
    limit = args.n or (len(ordered) if args.uid is not None else 5)
    shown = ordered[:limit]
    if args.json:
        for sample in shown:
            print(terminal.json_line(sample))
        return 0
    order = ", lowest reward first" if args.worst else ""
    surviving = [sample for sample in found if not sample.get("undone")] or found
    n_undone = sum(sample.get("undone", False) for sample in found)
    what = f", {n_undone} of them undone" if n_undone else ""
    print(f"{where.folder} ({where.name}): {title}; {len(shown)} of {len(found)} samples{what}{order}")
    print(f"all {len(surviving)}{' surviving' if surviving is not found else ''}: {overview(surviving)}\n")
    width = terminal.width()
    print("\n\n".join(render(sample, width) for sample in shown))
    return 0


def mark_undone(where: Run) -> Iterator[Line]:
    """All logged samples; those whose training is undone get `undone`."""
    places = undone_places(where, where.samples())
    for place, sample in enumerate(where.samples()):
        yield sample | {"undone": True} if place in places else sample


def select(
    samples: Iterable[Line], *, step: int | None = None, uid: int | None = None, evaluation: str | None = None
) -> tuple[list[Line], str]:
    """The selected samples (default: latest step) and their title. One pass. Raises ConfigError for no match."""
    if step is None and uid is None and evaluation is None:
        chosen = latest_samples(samples)
        if not chosen:
            raise ConfigError(
                "this run has no logged sample: it has trained and evaluated nothing yet, or journal.samples = false"
            )
        return chosen, _title(chosen, step=None, uid=None)
    chosen = []
    steps: set[int] = set()
    evaluations: dict[str, None] = {}
    for sample in samples:
        name = sample["evaluation"]
        if name:
            evaluations[name] = None
        else:
            steps.add(sample["step"])
        fits = name == (evaluation or "") and (step is None or sample["step"] == step)
        if fits and (uid is None or sample["uid"] == uid):
            chosen.append(sample)
    if not chosen:
        asked = {"step": step, "uid": uid, "evaluation": evaluation}
        wanted = ", ".join(f"--{key} {value}" for key, value in asked.items() if value is not None)
        trained = f"trained samples of steps {min(steps)} to {max(steps)}" if steps else "no trained sample"
        raise ConfigError(f"no logged sample matches {wanted}; there are {trained}, evaluations {list(evaluations)}")
    return chosen, _title(chosen, step=step, uid=uid)


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


def _title(chosen: list[Line], *, step: int | None, uid: int | None) -> str:
    first = chosen[0]
    if first["evaluation"]:
        title = f'evaluation "{first["evaluation"]}" of version {first["version"]}'
    elif uid is not None and step is None:
        title = "trained"
    else:
        title = f"step {first['step']}, trained at version {first['version']}"
    return title if uid is None else f"prompt {uid}, {title}"


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
    return float("-inf") if sample["reward"] is None else float(sample["reward"])


def overview(samples: list[Line]) -> str:
    """One line about samples: mean reward, number of correct ones, finish reasons."""
    scored = [sample for sample in samples if sample["reward"] is not None]
    judged = [sample["correct"] for sample in scored if sample["correct"] is not None]
    parts = []
    if scored:
        parts.append(f"mean reward {sum(s['reward'] for s in scored) / len(scored):.3f}")
    if judged:
        parts.append(f"{sum(judged)} of {len(judged)} right")
    parts += [f"{n} {finish}" for finish, n in Counter(str(s["finish"]) for s in samples).most_common()]
    if unscored := len(samples) - len(scored):
        parts.append(f"{unscored} without a reward")
    return ", ".join(parts)


def render(sample: Line, width: int) -> str:
    """One sample as a block of text, at most `width` columns wide."""
    head = f"-- uid {sample['uid']} sample {sample['sample']} attempt {sample['attempt']}"
    if sample["evaluation"]:
        head += f", evaluation {sample['evaluation']}"
    else:
        head += f", step {sample['step']}{' (undone)' if sample.get('undone') else ''}"
    head += f", {sample['generator']} "
    verdict = "none" if sample["reward"] is None else f"{sample['reward']:.3f}"
    verdict += "" if sample["status"] == "value" else f" ({sample['status']})"
    right = {True: " (right)", False: " (wrong)"}.get(sample["correct"], "") if sample["status"] == "value" else ""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.get("parts", {}).items())
    facts = [
        f"reward {verdict}{right}{f' ({parts})' if parts else ''}",
        f"finish {sample['finish']}",
        f"{sample['n_tokens']} tokens, {sample['n_masked']} masked",
        "versions " + spans(sample),
    ]
    body = [head + "-" * max(width - len(head), 2)]
    for title, text, mark in texts(sample):
        body += [title, terminal.quote(text, indent=f"  {mark} ", width=width)]
    return "\n".join([*body, terminal.quote("   ".join(facts), indent="", width=width)])


def texts(sample: Line) -> Iterator[tuple[str, str, str]]:
    """(title, text, mark) of prompts ("|") and completions (">") by turn, then the reward's text if another."""
    turns, roles = sample.get("turns") or [[sample["prompt"], sample["completion"]]], sample.get("roles", "").split()
    for n, (given, sampled) in enumerate(turns, start=1):
        which = f"turn {n} of {len(turns)}: " if len(turns) > 1 else ""
        if numbers := sample.get("trajectories"):
            role = f" ({roles[numbers[n - 1]]})" if roles else ""
            which = f"trajectory {numbers[n - 1]}{role}, {which}"
        yield f"{which}prompt", given, "|"
        yield f"{which}completion", sampled, ">"
    if sample["completion"] != turns[-1][1]:
        yield "text for the reward", sample["completion"], ">"


def spans(sample: Line) -> str:
    """Version spans as text: "3 x12, 4 x7 (lag 0 to 1)"."""
    pairs = sample["versions"]
    text = ", ".join(f"{version} x{n}" for version, n in pairs) or "none"
    if sample["evaluation"] or not pairs:
        return text
    lags = [sample["version"] - version for version, _ in pairs]
    lag = str(lags[0]) if min(lags) == max(lags) else f"{min(lags)} to {max(lags)}"
    return f"{text} (lag {lag})"


if __name__ == "__main__":
    terminal.end(main)
