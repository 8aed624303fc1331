"""`areal-bus replay RUN --from K`: the learner of a run trains again from a checkpoint with the recorded batches.

Without --set the weights must be the recorded ones, bit for bit. With another loss, learning rate or correction, the
same data trains another learner, and one page compares both.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT
from areal_bus.process.isolation import CHILD
from tools import run, terminal
from tools.report.page.parts import Page, PageTable, Section, render
from tools.report.verdict.remarks import Grade, Remark
from tools.trust.batches import Difference, Step, differences, steps_of_loop, steps_of_run
from tools.trust.child import run_to_end, say
from tools.trust.mismatch import shown

FIGURES = ("loss", "grad_norm", "lr", "entropy", "clip_share", "mismatch_kl", "ess", "kl_ref", "value_loss")
EPILOG = f"""\
Version K and the ones after it are trained again, from the newest checkpoint below K (version 0 needs none). The run
needs journal.replay = true, which keeps its batches. --set takes settings of the learner: [actor], [critic],
[reference], [teacher], [learner]. No generator, no reward and no server takes part. docs/replay.md explains the page.

exit code: 0 the same (or --set was given), 1 a difference, 2 it cannot be replayed

examples:
  {SCRIPT} replay runs/latest --from 1
  {SCRIPT} replay runs/latest --from 20 --steps 10 --set actor.lr=3e-5"""


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser(f"{SCRIPT} replay", __doc__, EPILOG)
    p.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    p.add_argument("--from", type=int, required=True, dest="first", metavar="K", help="the first version to compare")
    p.add_argument("--steps", type=int, metavar="N", help="updates from K on (to the last recorded batch)")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="another learner")
    p.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder (RUN/replays/from-K-TIME)")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    recorded = chosen(steps_of_run(where), args.first, args.steps)
    name = f"from-{args.first}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = args.output or where.folder.resolve() / "replays" / name
    if out.exists():
        raise ConfigError(f"--output must be a new folder: {out} exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    last = recorded[-1].version
    say(f"replays versions {args.first} to {last} of {where.folder}")
    words = ["--from", str(args.first), "--to", str(last), "--out", str(out)]
    changes = [word for setting in args.set for word in ("--set", setting)]
    run_to_end([*CHILD, "tools.offline.replay", str(where.folder), *words, *changes], out.with_suffix(".txt"))
    replayed = [step for step in steps_of_loop(out) if step.version >= args.first]
    found = [differences(one, other) for one, other in zip(recorded, replayed, strict=True)]
    first = next((difference for step in found for difference in step.values()), None)
    (out / "replay.html").write_bytes(render(page_of(where, args.set, recorded, replayed, first)))
    print(sentence(first, len(recorded), has_changes=bool(args.set)))
    print(f"{out / 'replay.html'}: open it in a browser")
    if args.json:
        print(terminal.json_line(as_json(recorded, replayed, first)))
    return int(first is not None and not args.set)


def chosen(steps: Sequence[Step], first: int, n_steps: int | None) -> list[Step]:
    """The recorded updates to replay. Raises ConfigError where there are none, or where a batch is missing."""
    if first < 1 or (n_steps is not None and n_steps < 1):
        raise ConfigError(f"--from and --steps must be at least 1: got {first} and {n_steps}")
    found = [step for step in steps if step.version >= first][:n_steps]
    if not found:
        last = steps[-1].version if steps else 0
        raise ConfigError(f"missing version {first}: the last update of this run is version {last}")
    if bare := [step.version for step in steps if step.version <= found[-1].version and not step.samples]:
        remedy = "a run keeps its batches with journal.replay = true, from its start on"
        raise ConfigError(f"missing batch of version {bare[0]}: {remedy}")
    return found


def sentence(first: Difference | None, n_steps: int, *, has_changes: bool) -> str:
    if first is None:
        return f"The same, bit for bit: {n_steps} updates and their weights."
    verb = "Another learner on the same data" if has_changes else "Different"
    return f"{verb}: the first difference between the run and its replay is in {first.sentence}."


def as_json(recorded: Sequence[Step], replayed: Sequence[Step], first: Difference | None) -> dict[str, Any]:
    figures = [{key: step.figures.get(key) for key in (*FIGURES, "digest")} for step in replayed]
    which = {"bit_equal": first is None, "from": recorded[0].version, "steps": len(replayed)}
    return which | {"first_difference": None if first is None else first.sentence, "figures": figures}


def page_of(
    where: run.Run, given: Sequence[str], recorded: Sequence[Step], replayed: Sequence[Step], first: Difference | None
) -> Page:
    grade = Grade.GOOD if first is None else Grade.NOTE if given else Grade.BAD
    answer = Remark(grade, sentence(first, len(recorded), has_changes=bool(given)))
    keys = [key for key in FIGURES if any(key in step.figures for step in (*recorded, *replayed))]
    rows = []
    for one, other in zip(recorded, replayed, strict=True):
        pairs = [f"{shown(one.figures.get(key))} | {shown(other.figures.get(key))}" for key in keys]
        same = "same" if one.figures["digest"] == other.figures["digest"] else "different"
        rows.append([str(one.version), *pairs, same])
    table = PageTable(("version", *keys, "weights"), rows)
    note = "Each cell: the run | its replay."
    section = Section("updates", "The run and its replay", note, tables=[table])
    command = f"{SCRIPT} replay {where.folder} --from {recorded[0].version}{''.join(f' --set {one}' for one in given)}"
    return Page(f"Replay of {where.name}", command, [("Are they the same?", answer)], (), (), [section])


if __name__ == "__main__":
    terminal.end(main)
