"""Our side of the end-to-end benches: the whole system under mpirun, paused between measurements.

One generator, one reward, the head and one learner. All processes are paused by SIGSTOP, so nothing is sampled while
the other side is measured. A measurement runs from one journalled step to another.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from benchmarks.e2e import setting
from benchmarks.jobs.real_job import KilledJob
from tools.run import Line

RANKS = 3
ETA = 1
ON_UPDATE = "keep"  # running samples keep their KV cache: nothing is recomputed
PATIENCE_S = 600.0  # deadline of the start and of each measurement, also on a loaded machine
WARM = 8  # steps before the first measurement
SETTLE = 4  # steps after a pause that are not counted
LOOK_S = 0.05  # polling more often would take CPU from the job
TICKS = os.sysconf("SC_CLK_TCK")
FOREVER = 86_400  # seconds: deadlines that a pause must not reach
ROWS: Mapping[str, tuple[str, ...]] = {  # settings of each loss
    "": ("actor.use_decoupled_loss=false", "actor.recompute_logprobs=false"),
    "decoupled": ("actor.use_decoupled_loss=true", "actor.recompute_logprobs=true"),
}


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of a number of steps."""

    wall_s: float
    cpu_s: float  # of all processes of the side
    n_tokens: int  # tokens that entered a backward pass
    reward: float  # of the last step, for people


def changes(folder: Path, row: str) -> tuple[str, ...]:
    """The settings of the job; `folder` has the model and the questions."""
    beta1, beta2 = setting.BETAS
    return (
        "run.total_train_steps=1000000",
        f"run.seed={setting.SEED}",
        f'model.path="{folder}/model"',
        f'data.path="{folder}/questions.jsonl"',
        "data.chat_template=false",
        f"data.batch_size={setting.GROUPS}",
        f"gconfig.n_samples={setting.SAMPLES}",
        f"gconfig.max_new_tokens={setting.N_NEW}",
        f"rollout.max_head_offpolicyness={ETA}",
        f'rollout.on_update="{ON_UPDATE}"',
        f"rollout.max_concurrent_rollouts={(ETA + 1) * setting.GROUPS * setting.SAMPLES}",
        'reward.function="benchmarks.e2e.setting:score"',
        *ROWS[row],
        'actor.advantage="grpo"',
        f"actor.lr={setting.LR}",
        f"actor.adam_beta1={beta1}",
        f"actor.adam_beta2={beta2}",
        f"actor.adam_eps={setting.EPS}",
        f"actor.weight_decay={setting.DECAY}",
        f"actor.max_grad_norm={setting.CLIP_NORM}",
        f"actor.eps_clip={setting.CLIP_RATIO}",
        "learner.max_tokens_per_mb=8192",
        "checkpoint.at_end=false",
        *(f"{key}={FOREVER}" for key in ("bus.silent_s", "weights.timeout_s", "reward.timeout_s")),
        *(f"watchdog.{key}={FOREVER}" for key in ("stall_s", "progress_s", "act_s")),
    )


class E2eJob:
    """A running job."""

    def __init__(self, folder: Path, row: str, *, quiet: bool) -> None:
        """`folder` has the model; the questions are written there."""
        rows = [json.dumps({"question": question, "answer": "any"}) for question in setting.questions()]
        (folder / "questions.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        config = folder / "e2e.toml"
        config.write_text("", encoding="utf-8")
        self._job = KilledJob(
            folder / f"ring-{row or 'plain'}",
            config=str(config),
            changes=changes(folder, row),
            ranks=RANKS,
            quiet=quiet,
        )
        self._steps = Lines(self._job.run / "journal" / "learner-0.0.jsonl")
        self._pushes = Lines(self._job.run / "journal" / "generator-0.0.jsonl")

    @contextmanager
    def started(self) -> "Iterator[E2eJob]":
        """Start the job, warm it up and pause it; end it on exit in any case."""
        with self._job.started():
            try:
                self._until(WARM)
                self._signal(signal.SIGSTOP)
                yield self
            finally:
                self._signal(signal.SIGCONT)

    def measure(self, n_steps: int) -> Spent:
        """Measure the next steps after some settling steps. Raises ConfigError for a step of other work."""
        self._signal(signal.SIGCONT)
        try:
            first = self._until(len(self._steps.of("step")) + SETTLE)
            began = self._cpu_s()
            last = self._until(len(self._steps.of("step")) + n_steps)
            took = self._cpu_s() - began
        finally:
            self._signal(signal.SIGSTOP)
        lines = [line for line in self._steps.of("step") if first["version"] < line["version"] <= last["version"]]
        self._check(lines)
        n_tokens = sum(int(line["n_tokens_trained"]) for line in lines)
        return Spent(last["t"] - first["t"], took, n_tokens, float(last["reward"]))

    def _check(self, lines: list[Line]) -> None:
        """Raises ConfigError unless each step trained the whole batch and each version but the newest was pushed."""
        expected = {"n_tokens": setting.TOKENS, "n_tokens_trained": setting.TOKENS, "zero_advantage_share": 0.0}
        expected |= {"truncated_share": 1.0, "n_optimizer_steps": 1.0, "lr": setting.LR}
        odd = {line["version"]: line for line in lines if any(line[key] != value for key, value in expected.items())}
        self._pushes.look()
        pushed = {line["version"] for line in self._pushes.of("pushed")}
        missing = {line["version"] for line in lines[:-2]} - pushed
        if odd or missing or any(line["lag_max"] > ETA for line in lines):
            raise ConfigError(
                f"every step trains {setting.TOKENS} tokens of groups with advantage, at most {ETA} version old, and "
                f"is pushed: odd {odd}, not pushed {sorted(missing)} ({self._job.run})"
            )

    def _until(self, n: int) -> Line:
        """The newest step, once there are this many."""

        process, deadline = self._job.process, time.monotonic() + PATIENCE_S
        while len(self._steps.of("step")) < n:
            code = process.poll() if process is not None else None
            if code is not None or time.monotonic() > deadline:
                why = f"the job ended with {code}" if code is not None else f"not within {PATIENCE_S:g} s"
                raise ConfigError(f"the job must make {n} training steps to be measured: {why} ({self._job.run})")
            time.sleep(LOOK_S)
            self._steps.look()
        return self._steps.of("step")[-1]

    def processes(self) -> list[int]:
        """Ids of all processes of the job, mpirun first."""
        return family(self._job.process.pid) if self._job.process is not None else []

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.processes())

    def _signal(self, number: int) -> None:
        """To all processes but mpirun, which does nothing meanwhile and would take it for their end."""
        for pid in self.processes()[1:]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


class Lines:
    """A journal file that grows; keeps the events that are asked for."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._kept: dict[str, list[Line]] = {"step": [], "pushed": []}

    def of(self, event: str) -> list[Line]:
        return self._kept[event]

    def look(self) -> None:
        """Read on."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for raw in whole.split(b"\n"):
            line: dict[str, Any] = json.loads(raw)
            if line["event"] in self._kept:
                self._kept[line["event"]].append(line)


def family(pid: int) -> list[int]:
    """This process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and (fields := stat(int(place.name))):
            children.setdefault(int(fields[1]), []).append(int(place.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, []))
    return found


def cpu_s(pid: int) -> float:
    """User and system time of a process so far; 0 when it is gone."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
