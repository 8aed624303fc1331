"""Bench `push`: the weight push of SmolLM2-135M during training; its cost for learner steps and for decoding.

A learner and a generator, one thread each, and the production push between them: a snapshot on the step's thread, then
shared memory that the generator copies, or gloo over loopback in a side thread. A step is a batch of the demo, or a
quarter of it with longer completions; the generator decodes throughout.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from areal_bus.errors import ConfigError
from areal_bus.weights.route import Route
from benchmarks.harness import pace, worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import Measure, Rounds, interleave, sure
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import ROOT

CONFIG, MODEL = ROOT / "configs" / "demo.toml", ROOT / "models" / "SmolLM2-135M-Instruct"
MEMBER = "generator-0.0"
WITH, WITHOUT, ALONE, MEMCPY = "with", "without", "alone", "memcpy"
APART = 7  # rounds of measurements without a step


@dataclass(frozen=True, slots=True)
class PushWay:
    """One setting of the bench: type and route of the push, and the steps beside it."""

    wire: str = "bfloat16"  # as published, 269 MB
    route: Route = "auto"
    n_prompts: int = 8  # prompts a step; 8 samples each
    longest: int = 8  # tokens of the longest completion; the shortest has 2
    rounds: int = 15


WAYS: Mapping[str, PushWay] = {  # suffix of the figures' names -> setting
    "": PushWay(rounds=61),  # on a shared machine the noise of a step exceeds the cost of a push
    "_long": PushWay(n_prompts=2, longest=126, rounds=9),
    "_float32": PushWay(wire="float32"),
    "_gloo": PushWay(route="gloo"),
}


@dataclass(slots=True)
class PushObservations:
    """Further measurements of both sides, for every round tried."""

    learner: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    generator: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def note(self, name: str, learner: dict[str, float], generator: dict[str, float]) -> None:
        self.learner.setdefault(name, []).append(learner)
        self.generator.setdefault(name, []).append(generator)

    def of_learner(self, name: str, what: str) -> float:
        return median(one[what] for one in self.learner[name])

    def of_generator(self, name: str, what: str) -> float:
        return median(one[what] for one in self.generator[name])


class PushBench:
    about = "a push of SmolLM2-135M beside training: what steps lose, the stall at the swap, bytes/s over memcpy"

    def measure(self, *, quiet: bool) -> Figures:
        """Needs no peer. Raises ConfigError without the model."""
        if not (MODEL / "config.json").is_file():
            raise ConfigError(f"this bench pushes SmolLM2-135M, which is not at {MODEL}: run `make model`")
        found: Figures = {"bench": "push"}
        ways = pace.of(list(WAYS.items()), list(WAYS.items())[:1])
        for number, (suffix, way) in enumerate(ways, start=1):
            pace.say(number, len(ways), f"{way}:")
            steps, apart, seen = processes(way)
            found |= {f"{name}{suffix}": value for name, value in figures(steps, apart, seen).items()}
            found |= {} if suffix else steps.figures()
        return found


class Half(Protocol):
    """A side that can be asked, and asked for later."""

    def ask(self, do: str, **arguments: Any) -> Any: ...
    def begin(self, do: str, **arguments: Any) -> None: ...
    def answer(self) -> Any: ...


def processes(way: PushWay) -> tuple[Rounds, Rounds, PushObservations]:
    """`compare` for one setting, each half in its own process."""
    with ExitStack() as stack:
        learner, generator = (
            stack.enter_context(worker_process.ours(name)) for name in ("push.learner", "push.generator")
        )
        control = stack.enter_context(on_both_cores())
        return compare(learner, generator, control, way, CONFIG, MODEL)


def compare(
    learner: Half,
    generator: Half,
    control: Measure,
    way: PushWay,
    config: Path,
    model: Path,
) -> tuple[Rounds, Rounds, PushObservations]:
    """Rounds of steps with and without a push, by themselves; rounds of pushes alone and of memcpy."""
    seen = PushObservations()
    opened = learner.ask("open", config=str(config), model=str(model), member=MEMBER, **beside(way))
    generator.ask("open", model=str(model), dtype=way.wire, name=MEMBER, **opened)
    pair = Pair(learner, generator, seen)
    pair.push()  # first push: creates the group and touches its memory
    pair.step(with_push=True)
    seen.learner.clear()
    seen.generator.clear()
    steps: dict[str, Measure] = {
        WITHOUT: lambda: pair.step(with_push=False),
        WITH: lambda: pair.step(with_push=True),
    }
    apart: dict[str, Measure] = {ALONE: pair.push, MEMCPY: lambda: float(learner.ask("memcpy"))}
    return interleave(steps, control, rounds=way.rounds, quick=7), interleave(apart, control, rounds=APART), seen


def beside(way: PushWay) -> dict[str, Any]:
    """The learner's arguments."""
    return {"wire": way.wire, "route": way.route, "n_prompts": way.n_prompts, "longest": way.longest}


class Pair:
    """Learner and generator. They number their common operations; a push uses the number as its version."""

    def __init__(self, learner: Half, generator: Half, seen: PushObservations) -> None:
        self._learner, self._generator, self._seen = learner, generator, seen
        self._numbers = count()

    def step(self, *, with_push: bool) -> float:
        """Wall seconds of a step, the generator decoding; the push of the weights before it begins with it."""
        number = next(self._numbers)
        self._generator.begin("decode", number=number, version=number if with_push else None)
        found = self._learner.ask("step", number=number, with_push=with_push)
        self._seen.note(WITH if with_push else WITHOUT, found, self._generator.answer())
        return float(found["seconds"])

    def push(self) -> float:
        """Wall seconds of a transfer, nothing else going on."""
        number = next(self._numbers)
        self._generator.begin("receive", number=number, version=number)
        found = self._learner.ask("push", number=number)
        self._seen.note(ALONE, found, {"swap_s": self._generator.answer()})
        return float(found["seconds"])


def increase(name: str, ratios: Sequence[float]) -> Figures:
    """By how much steps with a push exceed those beside them: the median over rounds, and where it surely lies."""
    low, high = sure(ratios)
    found = {name: median(ratios), f"{name}_sure_low": low, f"{name}_sure_high": high}
    return {key: round(ratio - 1, 4) for key, ratio in found.items()}


def figures(steps: Rounds, apart: Rounds, seen: PushObservations) -> Figures:
    """Of one way. Shares of a step are of one without a push."""
    memcpy = apart.ratio(MEMCPY, ALONE)
    step_s, n_bytes = steps.cost(WITHOUT), seen.of_learner(ALONE, "bytes")
    stall_s = seen.of_generator(WITH, "swap_s")
    recompute_s = median(one["after_s"] - one["step_s"] for one in seen.generator[WITH])
    cpu = [a["cpu_s"] / b["cpu_s"] for a, b in zip(seen.learner[WITH], seen.learner[WITHOUT], strict=True)]
    push_cpu_s = seen.of_learner(ALONE, "cpu_s")
    return {
        **increase("step_increase_share", steps.ratios(WITH, WITHOUT)),
        **increase("step_increase_cpu_share", cpu),
        "push_cpu_ms": round(1e3 * push_cpu_s, 1),
        "push_cpu_share": round(push_cpu_s / seen.of_learner(WITHOUT, "cpu_s"), 4),
        "step_s": round(step_s, 3),
        "rounds": len(steps.costs),
        "refused": steps.refused,
        "overlaps": all(one["push_s"] < one["seconds"] for one in seen.learner[WITH]),  # each push ends within its step
        "snapshot_ms": round(1e3 * seen.of_learner(ALONE, "snapshot_s"), 1),
        "stall_ms": round(1e3 * stall_s, 3),
        "stall_share": round(stall_s / step_s, 6),
        "recompute_ms": round(1e3 * recompute_s, 1),
        "stall_and_recompute_share": round((stall_s + recompute_s) / step_s, 4),
        "decode_share": round(seen.of_generator(WITH, "tokens_per_s") / seen.of_generator(WITHOUT, "tokens_per_s"), 3),
        "mb": round(n_bytes / 1e6),
        "bytes_per_s": round(n_bytes / apart.cost(ALONE)),
        "bytes_per_s_beside_a_step": round(n_bytes / seen.of_learner(WITH, "push_s")),
        "share_of_memcpy": round(memcpy.median, 3),
        "share_of_memcpy_low": round(memcpy.low, 3),
        "share_of_memcpy_high": round(memcpy.high, 3),
    }
