"""The parts of the bench `gpu`. Each runs in a process of its own and yields figures as soon as it has them.

`python -m benchmarks.gpu.parts NAME DEVICE full|quick` prints one JSON object a line.
"""

import array
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Request
from actors.learner.batching import Batch, build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model
from actors.runtime.context import HeartbeatState
from areal_bus.config.sections import Config
from areal_bus.messages import Role, ShardItem
from areal_bus.storage.journal import Journal
from benchmarks.gpu.shapes import SHAPES, Card, card_of, config_json, decode_bound, training_flops
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import ROOT
from launch.memory.ranks import estimate
from launch.memory.shape import DecoderShape
from tools.follow import JournalFollower
from tools.run import Run
from tools.trackers.series import EVENTS, Row, SeriesReader

SAMPLES = 4  # of a prompt
GIVEN = 64  # tokens of a prompt


class Size:
    """What a part measures: small with --quick, which a CPU can do."""

    def __init__(self, device: str, *, is_quick: bool) -> None:
        self.device = device
        self.is_cuda = device == "cuda"
        self.dtype = "bfloat16" if self.is_cuda else "float32"
        self.shapes = ["tiny"] if is_quick else ["0.5b", "1.5b"]
        self.batch_tokens, self.length = (1024, 128) if is_quick else (16384, 1024)
        self.live = [1, 4] if is_quick else [1, 16, 64, 256]
        self.n_new = 16 if is_quick else 256
        self.repeats = 2 if is_quick else 3
        self.steps = 3 if is_quick else 40
        self.seeds = 1 if is_quick else 3
        self.compiles = [False, True] if self.is_cuda else [False]  # a minute on a CPU
        self.is_quick = is_quick


def settings(size: Size, *, checkpointing: bool = False, n_minibatches: int = 1) -> Config:
    return Config.model_validate(
        {
            "model": {"scratch": {}, "dtype": size.dtype},  # not built: the model is given
            "data": {"task": "sums", "batch_size": size.batch_tokens // size.length // SAMPLES},
            "gconfig": {"n_samples": SAMPLES, "max_new_tokens": size.length - GIVEN},
            "learner": {"max_tokens_per_mb": size.batch_tokens, "gradient_checkpointing": checkpointing},
            "actor": {"ppo_n_minibatches": n_minibatches},
            "rollout": {"max_concurrent_rollouts": size.live[-1]},
        }
    )


def folder_of(name: str, size: Size) -> str:
    """A folder with the config of a shape; weights are drawn."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-bench-"))
    (folder / "config.json").write_text(json.dumps(config_json(SHAPES[name], 2 * size.length)), encoding="utf-8")
    return str(folder)


def model_of(name: str, size: Size, dtype: str, *, seed: int = 1) -> Any:
    """A model of a shape on the device. The same seed gives the same weights, rounded to `dtype`."""
    with torch.device(size.device):  # billions of numbers, drawn one after the other on a CPU
        model = load_model(folder_of(name, size), "float32", size.device, random_seed=seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def learner(name: str, size: Size, *, checkpointing: bool, compiles: bool = False, n_minibatches: int = 1) -> PPOActor:
    """With several minibatches an update computes proximal log-probs in a pass of its own."""
    config = settings(size, checkpointing=checkpointing, n_minibatches=n_minibatches)
    policy = Policy(
        model_of(name, size, "float32"), ranks=LearnerRanks(), device=size.device,
        temperature=1.0, dtype=size.dtype, gradient_checkpointing=checkpointing, compile=compiles,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="gpu-bench-"))
    journal = Journal(folder / "journal", role="learner", index=0, incarnation=0)
    return PPOActor(policy, config, UpdateContext(journal, HeartbeatState(), folder))


def engine(model: Any, n_live: int) -> BuiltinEngine:
    """As a generator has it."""
    return BuiltinEngine(model, EngineOptions(n_slots=n_live, ahead_s=AHEAD_S), stop_ids=frozenset(), version=0)


def batch_of(name: str, size: Size, clock: int) -> Batch:
    """Random tokens and rewards in groups of SAMPLES, all of one length."""
    draw, n_groups = random.Random(clock), size.batch_tokens // size.length // SAMPLES
    n, top = size.length - GIVEN, SHAPES[name].vocabulary
    items = [
        ShardItem(
            step=clock, clock=clock, group=i // SAMPLES, n_groups=n_groups, uid=i // SAMPLES, sample=i % SAMPLES,
            reward=draw.random(), correct=None, finish="stop", segments=[[GIVEN, n]], spans=[[clock, n]],
            ids=array.array("i", [draw.randrange(top) for _ in range(GIVEN + n)]).tobytes(),
            logps=array.array("f", [-10.0] * n).tobytes(), text="",
        )
        for i in range(n_groups * SAMPLES)
    ]  # fmt: skip
    return build(items, step=clock, clock=clock, n_groups=n_groups, eta=1, n_samples=SAMPLES)


def wait(size: Size) -> float:
    """Now, when the device has done its work."""
    if size.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(size: Size, work: Callable[[], object]) -> float:
    """Seconds: the least of some repeats, after one that does not count."""
    work()
    found = []
    for _ in range(size.repeats):
        began = wait(size)
        work()
        found.append(wait(size) - began)
    return min(found)


def rates(size: Size) -> Card:
    """The card; its rates are measured by a product of matrices and a copy where no data sheet is known."""
    n = 8192 if size.is_cuda else 512
    a = torch.randn(n, n, device=size.device).to(getattr(torch, size.dtype))
    out = torch.empty_like(a)
    flops = 2 * n**3 / timed(size, lambda: torch.mm(a, a, out=out))
    bandwidth = 2 * a.nbytes / timed(size, lambda: out.copy_(a))
    return card_of(torch.cuda.get_device_name(0) if size.is_cuda else "CPU core", (flops, bandwidth))


def update(actor: PPOActor, name: str, size: Size) -> None:
    actor.ppo_update(actor.compute_advantages_and_returns(batch_of(name, size, actor.version)))


# the parts


def memory(size: Size) -> Iterator[Figures]:
    """(a) The peak of a learner's update and of an engine at work, compared with the plan of --dry-run."""
    for name in size.shapes:
        config = settings(size, checkpointing=True)
        for role in (Role.LEARNER, Role.GENERATOR):
            plan = estimate(config, SHAPES[name], role, 0, n_prompt=GIVEN).device
            if role is Role.LEARNER:
                actor = learner(name, size, checkpointing=True)
                begin_peak(size)
                update(actor, name, size)
                del actor
            else:
                model = model_of(name, size, size.dtype)
                begin_peak(size)
                decode(engine(model, size.live[-1]), SHAPES[name], size, size.live[-1])
                del model
            peak = torch.cuda.max_memory_allocated() if size.is_cuda else None
            yield {"shape": name, "role": str(role), "plan_gib": gib(plan), "peak_gib": peak and gib(peak)}


def begin_peak(size: Size) -> None:
    """The peak from here on: the drawing of a model in float32 is not counted."""
    if size.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gib(n_bytes: float) -> float:
    return round(n_bytes / (1 << 30), 3)


def train(size: Size) -> Iterator[Figures]:
    """(b) Tokens a second and MFU of an update of one minibatch: forward, backward, optimizer."""
    card = rates(size)
    for name in size.shapes:
        for compiles, checkpointing in product(size.compiles, (False, True)):
            actor = learner(name, size, checkpointing=checkpointing, compiles=compiles)
            seconds = timed(size, lambda actor=actor, name=name: update(actor, name, size))  # type: ignore[misc]
            speed = size.batch_tokens / seconds
            mfu = speed * training_flops(SHAPES[name], size.length) / card.flops
            yield {
                "shape": name, "compile": compiles, "checkpointing": checkpointing,
                "tokens_per_s": round(speed), "mfu": round(mfu, 4), "rate": card.source, "card": card.name,
            }  # fmt: skip
            del actor


def decode(engine: BuiltinEngine, shape: DecoderShape, size: Size, n_live: int) -> list[Completion]:
    submit(engine, shape, size, n_live)
    done: list[Completion] = []
    while engine.n_live:
        done += engine.step()
    return done


def prompts_of(shape: DecoderShape, n: int) -> list[list[int]]:
    draw = random.Random(n)
    return [[draw.randrange(shape.vocabulary) for _ in range(GIVEN)] for _ in range(n)]


def submit(engine: BuiltinEngine, shape: DecoderShape, size: Size, n_live: int) -> None:
    for i, ids in enumerate(prompts_of(shape, n_live)):
        engine.submit(Request(("", i, 0, 0, 0), ids, (1, i), size.n_new, 1.0, 1.0))


def generate(size: Size) -> Iterator[Figures]:
    """(c) Tokens a second at n live samples, prefill included, and the share of what the memory's bandwidth allows."""
    card = rates(size)
    for name in size.shapes:
        shape, model = SHAPES[name], model_of(name, size, size.dtype)
        for n_live in size.live:
            running = engine(model, n_live)
            seconds = timed(size, lambda e=running, n=n_live, s=shape: decode(e, s, size, n))  # type: ignore[misc]
            speed = n_live * size.n_new / seconds
            bound = decode_bound(shape, card, n_live, GIVEN + size.n_new / 2, 2 if size.is_cuda else 4)
            yield {
                "shape": name, "live": n_live, "tokens_per_s": round(speed, 1), "of_bound": round(speed / bound, 4),
                "rate": card.source, "card": card.name,
            }  # fmt: skip
            del running


def kernels(size: Size) -> Iterator[Figures]:
    """What takes the time of an update and of decoding: the operations of the device that take longest."""
    name, n_live = size.shapes[-1], size.live[-2]
    yield from longest("update", size, updater(name, size))
    running = engine(model_of(name, size, size.dtype), n_live)
    decode(running, SHAPES[name], size, n_live)
    yield from longest("decode", size, lambda: decode(running, SHAPES[name], size, n_live))


def updater(name: str, size: Size) -> Callable[[], None]:
    """An update of a learner that has made one."""
    actor = learner(name, size, checkpointing=False)
    update(actor, name, size)
    return lambda: update(actor, name, size)


def longest(work: str, size: Size, run: Callable[[], object], *, n: int = 12) -> Iterator[Figures]:
    """The n operations of the device that take longest, and their sum beside the wall time."""
    kind = ProfilerActivity.CUDA if size.is_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as found:
        began = wait(size)
        run()
        wall_s = wait(size) - began
    rows = [
        (row.self_device_time_total if size.is_cuda else row.self_cpu_time_total, row) for row in found.key_averages()
    ]
    rows.sort(key=lambda pair: -pair[0])
    yield {"work": work, "operation": "all", "ms": sum(us for us, _ in rows) / 1000, "wall_ms": 1000 * wall_s}
    for us, row in rows[:n]:
        yield {"work": work, "operation": row.key[:80], "ms": us / 1000, "calls": row.count}


def swap(size: Size) -> Iterator[Figures]:
    """(d) The pause of an engine for new weights on its device: a swap by pointer, and the KV cache recomputed."""
    for name in size.shapes:
        n_live = size.live[-1]
        running = engine(model_of(name, size, size.dtype), n_live)
        other = model_of(name, size, size.dtype, seed=2)
        spare: Mapping[str, torch.Tensor] = {key: value.data for key, value in other.named_parameters()}
        submit(running, SHAPES[name], size, n_live)
        pauses, prefills = [], []
        for version in range(1, 6):
            running.step()
            began = wait(size)
            spare = running.update(version, spare)
            middle = wait(size)
            running.step()
            pauses.append(middle - began)
            prefills.append(wait(size) - middle)
        yield {
            "shape": name, "live": n_live, "pause_ms": round(1000 * median(pauses), 2),
            "first_step_ms": round(1000 * median(prefills), 2),
        }  # fmt: skip


def share(size: Size) -> Iterator[Figures]:
    """(e) Learner and engine on one device at once, compared with each alone."""
    name = size.shapes[0]
    words = [sys.executable, "-m", "benchmarks.gpu.parts", "decoder", size.device, "quick" if size.is_quick else "full"]

    def updates(seconds: float) -> float:
        """Tokens a second of the learner for so long."""
        began, n = wait(size), 0
        while wait(size) - began < seconds or n < 2:
            update(actor, name, size)
            n += 1
        return n * size.batch_tokens / (wait(size) - began)

    def idle() -> float:
        time.sleep(seconds)
        return 0.0

    def beside_decoder(work: Callable[[], float]) -> tuple[float, float]:
        """The result of `work`, and the tokens a second of a process that decodes meanwhile."""
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as other:
            assert other.stdout is not None
            other.stdout.readline()  # it is ready
            done = work()
            other.terminate()
            speeds = [json.loads(line)["tokens_per_s"] for line in other.stdout if line.startswith("{")]
        return done, fmean(speeds) if speeds else 0.0

    seconds = 3.0 if size.is_quick else 15.0
    actor = learner(name, size, checkpointing=True)
    updates(0.0)
    train_alone = updates(seconds)
    _, decode_alone = beside_decoder(idle)
    train_beside, decode_beside = beside_decoder(lambda: updates(seconds))
    yield {
        "shape": name, "train_alone": round(train_alone), "train_beside": round(train_beside),
        "decode_alone": round(decode_alone, 1), "decode_beside": round(decode_beside, 1),
        "sum_of_shares": round(train_beside / train_alone + decode_beside / max(decode_alone, 1e-9), 3),
    }  # fmt: skip


def decoder(size: Size) -> Iterator[Figures]:
    """Of part (e): decodes until it is ended."""
    name, n_live = size.shapes[0], size.live[-1]
    running = engine(model_of(name, size, size.dtype), n_live)
    decode(running, SHAPES[name], size, n_live)
    yield {}
    while True:
        began = wait(size)
        decode(running, SHAPES[name], size, n_live)
        yield {"tokens_per_s": n_live * size.n_new / (wait(size) - began)}


def mismatch(size: Size) -> Iterator[Figures]:
    """(f) Log-probs of the engine and of the learner for the same tokens and weights, by position."""
    for name in size.shapes:
        n_live = max(size.live[-2], 4)
        running = engine(model_of(name, size, size.dtype), n_live)
        done = sorted(decode(running, SHAPES[name], size, n_live), key=lambda one: one.key)
        del running
        actor, prompts = learner(name, size, checkpointing=False, n_minibatches=2), prompts_of(SHAPES[name], n_live)
        items = [
            ShardItem(
                step=0, clock=0, group=i // 2, n_groups=n_live // 2, uid=i // 2, sample=i % 2, reward=float(i % 2),
                correct=None, finish="stop", segments=[[GIVEN, len(one.ids)]], spans=[[0, len(one.ids)]],
                ids=array.array("i", [*prompts[i], *one.ids]).tobytes(),
                logps=array.array("f", one.logps).tobytes(), text="",
            )
            for i, one in enumerate(done)
        ]  # fmt: skip
        batch = build(items, step=0, clock=0, n_groups=n_live // 2, eta=1, n_samples=2)
        prox = actor.compute_advantages_and_returns(batch).streams["prox"]
        gaps = [[abs(a - b) for a, b in zip(prox[i].tolist(), done[i].logps, strict=True)] for i in prox]
        quarter = max(size.n_new // 4, 1)
        for begin in range(0, size.n_new, quarter):
            part = [gap for row in gaps for gap in row[begin : begin + quarter]]
            if part:
                yield {
                    "shape": name, "positions": f"{begin}-{begin + quarter - 1}", "mean": fmean(part), "max": max(part)
                }  # fmt: skip


def ring(size: Size) -> Iterator[Figures]:
    """(d) Pushes of a whole ring on the device: from the begin of a push to its version, and the pause of decoding."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run.folder={folder}", f"run.total_train_steps={size.steps}", "learner.warmup.steps=5",
            f"model.dtype={size.dtype}", *on_device(size),
        ]  # fmt: skip
        overrides = [word for one in words for word in ("--set", one)]
        areal_bus("run", str(ROOT / "configs" / "tiny.toml"), "-np", "3" if not size.is_cuda else "2", *overrides)
        reader, rows = SeriesReader(), []
        for line in JournalFollower(Run(Path(folder) / "latest"), EVENTS).read():
            rows += [item.values for item in reader.take(line) if isinstance(item, Row)]
        pushes = [row for row in rows if "perf/push_s" in row]
        yield {
            "config": "tiny", "push_ms": round(1000 * median(row["perf/push_s"] for row in pushes), 1),
            "pause_ms": round(1000 * median(row.get("perf/push_stall_s", 0.0) for row in pushes), 1),
            "pushes": len(pushes),
        }  # fmt: skip


def on_device(size: Size) -> list[str]:
    return ["topology.gpus_per_host=1", "topology.ranks_per_gpu=2"] if size.is_cuda else []


def areal_bus(*words: str) -> str:
    """The output of a command. Raises CalledProcessError."""
    line = [sys.executable, "-m", "benchmarks.gpu.console", *words]
    return subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def learn(size: Size) -> Iterator[Figures]:
    """(g) Score and seconds of a small model at eta 0, 1 and 4."""
    for eta in (0, 1, 4):
        for seed in range(1, size.seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                words = [
                    f"run.folder={folder}", f"run.total_train_steps={size.steps}", f"run.seed={seed}",
                    f"rollout.max_head_offpolicyness={eta}", "evaluate.after=true", *on_device(size),
                ]  # fmt: skip
                words += ["learner.warmup.steps=5", "data.held_out=16"] if size.is_quick else ["data.held_out=200"]
                overrides = [word for one in words for word in ("--set", one)]
                began = time.monotonic()
                areal_bus("run", str(ROOT / "configs" / "tiny.toml"), "-np", "2" if size.is_cuda else "3", *overrides)
                scores = Run(Path(folder) / "latest").events("evaluation", role="head")
                yield {
                    "config": "tiny", "eta": eta, "seed": seed, "score": next(iter(scores))["avg_at_k"],
                    "seconds": round(time.monotonic() - began, 1),
                }  # fmt: skip


def prove(size: Size) -> Iterator[Figures]:
    """(h) The ring at eta = 0 compared with the plain synchronous loop: `areal-bus prove` (docs/prove.md)."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word for one in on_device(size) for word in ("--set", one)]
        config, steps = str(ROOT / "configs" / "tiny.toml"), "1" if size.is_quick else "4"
        output = areal_bus("prove", config, "--steps", steps, "--output", f"{folder}/prove", "--json", *words)
        found = json.loads(output.strip().splitlines()[-1])
        yield {key: value for key, value in found.items() if isinstance(value, str | int | float | bool)}


PARTS: Mapping[
    str, tuple[Callable[[Size], Iterator[Figures]], float]
] = {  # function, budget in seconds; most value first
    "train": (train, 120.0),
    "generate": (generate, 120.0),
    "kernels": (kernels, 40.0),
    "swap": (swap, 40.0),
    "memory": (memory, 60.0),
    "share": (share, 60.0),
    "mismatch": (mismatch, 40.0),
    "ring": (ring, 60.0),
    "learn": (learn, 240.0),
    "prove": (prove, 120.0),
}


def main(words: list[str]) -> None:
    name, device, pace = words
    if device == "cpu":
        torch.set_num_threads(1)
    made: Any = decoder if name == "decoder" else PARTS[name][0]
    for figures in made(Size(device, is_quick=pace == "quick")):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
