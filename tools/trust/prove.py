"""`areal-bus prove CONFIG`: is the ring at eta = 0 the plain synchronous loop, for this config?

It runs the config twice, as one loop in one process and as a ring of real processes at eta = 0, and compares them step
by step. Then it runs as many steps at the eta of the config.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.config import loader
from areal_bus.config.algorithms import correction_of
from areal_bus.config.names.engines import kind_of
from areal_bus.config.names.packaged import find_and_announce
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT, find_mpirun
from areal_bus.process.isolation import CHILD
from tools import terminal
from tools.report.page.parts import Page, PageTable, Section, render
from tools.report.verdict.remarks import Grade, Remark
from tools.run import Run
from tools.trust.batches import (
    PARTS,
    Difference,
    Step,
    differences,
    max_logprob_difference,
    steps_of_loop,
    steps_of_run,
)
from tools.trust.child import run_to_end, say
from tools.trust.mismatch import ROUGH, TOLERANCES, Mismatch, gaps_of, shown

STEPS = 4
GROUPS, SAMPLES, WARMUP = 4, 4, 40  # at most, unless --set says otherwise
RANKS = 3  # head and learner, reward, generator
ASYNC_FIGURES = ("reward", "lag_mean", "lag_max", "masked_share", "grad_norm", "loss")
EPILOG = f"""\
The plain loop draws, samples, scores and trains in one process, without head, gate, ledger and bus. Both runs have one
learner, one reward actor and one generator, a small batch, no evaluation and no checkpoint; --set wins over the small
batch. With the builtin engine on a CPU every number must be the same, bit for bit. With a server the plain loop takes
the server's tokens, and its log-probs must be the learner's within a tolerance. docs/prove.md explains the page.

exit code: 0 the same, 1 a difference, 2 the config does not run here

examples:
  {SCRIPT} prove configs/tiny.toml
  {SCRIPT} prove my.toml --steps 8 --set data.batch_size=8 --output proof"""


@dataclass(frozen=True, slots=True)
class Proof:
    """The comparison of both runs, and the figures of the asynchronous one."""

    n_steps: int
    found: Sequence[Mapping[str, Difference]]  # of each step
    max_logprob_difference: float | None
    eta: int
    plain: Sequence[Step]
    asynchronous: Sequence[Step]
    mismatch: Mismatch | None = None  # of a server

    @property
    def is_good(self) -> bool:
        return self.first is None and (self.mismatch is None or self.mismatch.fault is None)

    @property
    def first(self) -> Difference | None:
        return next((difference for step in self.found for difference in step.values()), None)

    def as_json(self) -> dict[str, Any]:
        figures = [{key: step.figures.get(key) for key in ASYNC_FIGURES} for step in self.asynchronous]
        return {
            "bit_equal": self.first is None,
            "steps": self.n_steps,
            "first_difference": None if self.first is None else self.first.sentence,
            "max_logprob_difference": self.max_logprob_difference,
            "asynchronous": {"eta": self.eta, "steps": figures},
            **({} if self.mismatch is None else {"server": self.mismatch.as_json()}),
        }


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser(f"{SCRIPT} prove", __doc__, EPILOG)
    p.add_argument("config", metavar="CONFIG", help="a TOML file")
    p.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"updates of each run ({STEPS})")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    p.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder (runs/prove-NAME-TIME)")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1: it is {args.steps}")
    path = find_and_announce(args.config)
    config = loader.load(path, args.set)
    check(config)
    folder = args.output or Path("runs") / f"prove-{config.run.name or path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise ConfigError(f"--output must be a new folder: {folder} exists")
    proof = prove(path, config, changes(config, args.steps, args.set), folder)
    (folder / "prove.html").write_bytes(render(page_of(proof, str(path), args.set)))
    print(sentence(proof))
    print(f"{folder / 'prove.html'}: open it in a browser")
    if args.json:
        print(terminal.json_line(proof.as_json()))
    return int(not proof.is_good)


def check(config: Config) -> None:
    """Raises ConfigError for a config whose tokens no loop can repeat or check."""
    if kind_of(config.rollout.engine).makes_up_tokens:
        raise ConfigError(
            f"unsupported engine for a proof: rollout.engine = {config.rollout.engine!r}: its tokens follow the clock; "
            "compare with --set rollout.engine=builtin"
        )


def changes(config: Config, n_steps: int, given: Sequence[str]) -> list[str]:
    """Settings over the config: a small batch, what --set gives, then what both runs need."""
    n_groups = max(GROUPS, config.actor.ppo_n_minibatches)
    small = [
        f"data.batch_size={min(n_groups, config.data.batch_size)}",
        f"gconfig.n_samples={min(SAMPLES, config.gconfig.n_samples)}",
        f"learner.warmup.steps={min(WARMUP, config.learner.warmup.steps)}",
    ]
    if config.workflow.uses_endpoint:  # conversations one after the other: their order decides how requests are batched
        small.append("workflow.agent.workers=1")
    needed = [
        f"run.total_train_steps={n_steps}",
        *(f"topology.{key}=1" for key in ("learners", "replicas", "rewards", "generators", "tensor_parallel")),
        f"topology.ranks={RANKS}",
        'topology.reward="rank"',
        "topology.adapt.schedule=[]",
        "topology.adapt.every_steps=0",
        *(f"evaluate.{key}=false" for key in ("before", "after")),
        *(f"evaluate.{key}=0" for key in ("every_steps", "early_stop_patience")),
        *(f"checkpoint.{key}=0" for key in ("every_s", "every_steps", "keep_best")),
        "checkpoint.at_end=false",
        "journal.replay=true",
        'journal.dir=""',
        "journal.tracker=[]",
        *(["data.max_refill=0"] if is_foreign(config) else []),  # batches hold the tokens of trained groups only
    ]
    return [*small, *given, *needed]


def prove(path: Path, config: Config, settings: Sequence[str], folder: Path) -> Proof:
    """Run the plain loop, the ring at eta = 0 and the ring at an eta. Raises ConfigError when one does not end well."""
    folder.mkdir(parents=True)
    plain, ring = run_both(path, settings, folder, takes_tokens=is_foreign(config))
    eta = max(1, config.rollout.max_head_offpolicyness)
    mismatch = mismatch_of(config, plain, folder) if is_foreign(config) else None
    say(f"the ring at eta = {eta}")
    loose = launch(path, [*settings, f"rollout.max_head_offpolicyness={eta}"], folder, "asynchronous")
    return compare(plain, ring, loose, eta=eta, mismatch=mismatch)


def is_foreign(config: Config) -> bool:
    """Whether the plain loop takes the tokens of the ring: its engine is a server, whose batching depends on time."""
    return config.rollout.engine != "builtin"


def run_both(
    path: Path, settings: Sequence[str], folder: Path, *, takes_tokens: bool = False
) -> tuple[list[Step], list[Step]]:
    """The steps of the plain loop and of the ring at eta = 0."""
    synchronous = [*settings, "rollout.max_head_offpolicyness=0"]
    ring = ring_at_0(path, synchronous, folder) if takes_tokens else []
    say(f"the plain loop, in {folder / 'plain'}")
    loop = [*CHILD, "tools.offline.synchronous_reference", str(path), "--out", str(folder / "plain")]
    given = ["--recorded", str(folder / "ring")] if takes_tokens else []
    run_to_end([*loop, *given, *_words(*synchronous)], folder / "plain.txt")
    return steps_of_loop(folder / "plain"), ring if takes_tokens else ring_at_0(path, synchronous, folder)


def ring_at_0(path: Path, synchronous: Sequence[str], folder: Path) -> list[Step]:
    say("the ring at eta = 0")
    return launch(path, synchronous, folder, "ring")


ON = ["actor.correction=decoupled", "actor.use_decoupled_loss=true", "actor.recompute_logprobs=true"]


def mismatch_of(config: Config, plain: Sequence[Step], folder: Path) -> Mismatch:
    """The gaps of log-probs, and the recorded batches trained with the correction off (on, where it is off)."""
    own = correction_of(config.actor)
    other, settings = ("decoupled", ON) if own == "none" else ("none", ["actor.correction=none"])
    out = folder / f"correction-{other}"
    say(f"the same batches with actor.correction = {other}")
    replay = [*CHILD, "tools.offline.replay", str(folder / "ring"), "--from", "1", "--out", str(out)]
    try:
        run_to_end([*replay, *_words(*settings)], out.with_suffix(".txt"))
        switched = steps_of_loop(out)
    except ConfigError as error:
        say(f"not compared: {error}")
        switched = []
    tolerance = TOLERANCES.get(config.model.dtype, ROUGH)
    return Mismatch(config.rollout.engine, tolerance, gaps_of(plain), own, other, switched)


def compare(
    plain: Sequence[Step],
    ring: Sequence[Step],
    loose: Sequence[Step],
    *,
    eta: int,
    mismatch: Mismatch | None = None,
) -> Proof:
    """Raises ConfigError for a step without its batch: nothing would be compared."""
    if bare := [step.version for step in (*plain, *ring) if not step.samples]:
        raise ConfigError(f"missing batch of step {bare[0]}: journal.replay writes it below the run's folder")
    found = [differences(one, other) for one, other in zip(plain, ring, strict=False)]
    if len(plain) != len(ring):
        step = min(len(plain), len(ring)) + 1
        found.append({PARTS[0]: Difference(step, PARTS[0], "number of steps", str(len(plain)), str(len(ring)))})
    largest = max_logprob_difference(plain, ring) if mismatch is None else mismatch.largest
    return Proof(len(found), found, largest, eta, plain, loose, mismatch)


def _words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def launch(path: Path, settings: Sequence[str], folder: Path, name: str) -> list[Step]:
    """One job of this machine."""
    place = [f"run.folder={json.dumps(str(folder.resolve()))}", f"run.name={json.dumps(name)}"]
    job = [*CHILD, "areal_bus.launch", str(path), *_words(*settings, *place)]
    run_to_end([find_mpirun(), "-np", str(RANKS), *job], folder / f"{name}.txt")
    return steps_of_run(Run(folder / name))


# the answer


def sentence(proof: Proof) -> str:
    if proof.mismatch is not None and proof.first is None:
        same = f"The same, bit for bit, from the same tokens: {proof.n_steps} steps of the ring and of the plain loop."
        return proof.mismatch.sentence if proof.mismatch.fault else f"{same} {proof.mismatch.sentence}"
    if proof.first is None:
        return f"The same, bit for bit: {proof.n_steps} steps of the ring at eta = 0 and of the plain loop."
    return f"Different: the first difference between the plain loop and the ring is in {proof.first.sentence}."


def page_of(proof: Proof, config: str, given: Sequence[str]) -> Page:
    grade = Grade.GOOD if proof.is_good else Grade.BAD
    answers = [("Is eta = 0 the synchronous loop?", Remark(grade, sentence(proof)))]
    command = f"{SCRIPT} prove {config} --steps {proof.n_steps}{''.join(f' --set {one}' for one in given)}"
    gap = proof.max_logprob_difference
    figures = [("steps", str(proof.n_steps)), ("largest log-prob difference", "none" if gap is None else f"{gap:.3g}")]
    sections = [equality_section(proof), loose_section(proof)]
    if proof.mismatch is not None:
        sections.insert(1, proof.mismatch.section(proof.plain))
    return Page(f"Proof of {config}", command, answers, (), figures, sections)


def equality_section(proof: Proof) -> Section:
    """One row a step and one column a part."""
    rows = [
        [str(step), *("different" if part in found else "same" for part in PARTS)]
        for step, found in enumerate(proof.found, start=1)
    ]
    places = [[d.part, str(d.step), d.place, d.first, d.second] for found in proof.found for d in found.values()]
    tables = [PageTable(("step", *PARTS), rows)]
    if places:
        columns = ("part", "step", "place", "plain loop", "ring")
        tables.append(PageTable(columns, places, "The first difference of each part and step"))
    return Section("equality", "The plain loop and the ring at eta = 0", tables=tables)


def loose_section(proof: Proof) -> Section:
    """The first figures of the asynchronous run beside those of the plain loop."""
    rows = []
    for plain, loose in zip(proof.plain, proof.asynchronous, strict=False):
        pairs = [(shown(plain.figures.get(key)), shown(loose.figures.get(key))) for key in ASYNC_FIGURES]
        rows.append([str(loose.version), *(f"{one} | {other}" for one, other in pairs)])
    title = f"As many steps at eta = {proof.eta}"
    note = "Each cell: plain loop | asynchronous run. They may differ: the ring samples while it trains."
    return Section("asynchronous", title, note, tables=[PageTable(("step", *ASYNC_FIGURES), rows)])


if __name__ == "__main__":
    terminal.end(main)
