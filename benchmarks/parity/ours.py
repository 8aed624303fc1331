"""Our side of the bench `parity`: the rows of a task, its start model, and a job under mpirun."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.data.tasks import make_problems
from areal_bus.config.data import DataConfig
from areal_bus.errors import ConfigError
from benchmarks.jobs import demo
from benchmarks.jobs.real_job import KilledJob
from benchmarks.parity.setting import (
    ANSWERS,
    BETAS,
    CHARACTERS,
    CLIP_NORM,
    CLIP_RATIO,
    DECAY,
    EPS,
    SPELL,
    STD_EPS,
    SUMS,
    Row,
    Task,
)
from tools.run import Run

RANKS = 3  # one generator, one reward, one learner; the head is beside the first
PATIENCE_S = 900.0
MODEL = demo.ROOT / "models" / "SmolLM2-135M-Instruct"
PROBLEMS = {
    SUMS.name: DataConfig(task="sums", held_out=20),
    SPELL.name: DataConfig(
        task="reasoning-gym:spell_backward",
        task_options={"min_word_len": 3, "max_word_len": 8},
        size=2000,
        held_out=200,
    ),
}
OF_SPELL = (  # its model, warmed up by supervised steps
    f"model.scratch.characters={json.dumps(CHARACTERS)}",
    "model.scratch.hidden_size=64",
    "model.scratch.layers=2",
    "model.scratch.heads=4",
    "model.scratch.max_positions=96",
    "learner.warmup.steps=300",
    "learner.warmup.lr=3e-3",
)


def write_rows(task: Task, folder: Path, seeds: range) -> None:
    """held-out.jsonl, and for each seed train-SEED.jsonl: the same problems in an order of its own."""
    problems = make_problems(PROBLEMS[task.name], seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "held-out.jsonl", task, problems.held_out)
    for seed in seeds:
        rows = list(problems.train)
        random.Random(f"parity {seed}").shuffle(rows)
        write_lines(folder / f"train-{seed}.jsonl", task, rows)


def write_lines(path: Path, task: Task, rows: list[Row]) -> None:
    made = [json.dumps(row | {"text": task.template.format(**row)}) for row in rows]
    path.write_text("\n".join(made) + "\n", encoding="utf-8")


def start_model(task: Task, folder: Path, *, quiet: bool) -> Path:
    """The model that both sides start from. Raises ConfigError without SmolLM2."""
    if task.name == SUMS.name:
        if not MODEL.is_dir():
            raise ConfigError(f"missing model: {MODEL} is not there: run `make model`")
        return MODEL
    found = folder / "start-model"
    if not found.is_dir():
        settings = (*common(task, folder, seed=1, eta=0), *OF_SPELL, "run.total_train_steps=1", "actor.lr=1e-12")
        run = finished(folder / "runs" / "start", (*settings, "checkpoint.at_end=true"), quiet=quiet)
        newest = max((run.folder / "checkpoints").glob("*/model"), key=lambda path: path.parent.stat().st_mtime)
        newest.rename(found)
    return found


def common(task: Task, folder: Path, *, seed: int, eta: int) -> tuple[str, ...]:
    """The settings of a job without its model."""
    return (
        f"run.seed={seed}",
        f"run.total_train_steps={task.updates}",
        f'data.path="{folder}/train-{seed}.jsonl"',
        'data.prompt="{text}"',
        "data.chat_template=false",
        "data.shuffle=false",
        f"data.batch_size={task.groups}",
        f"gconfig.n_samples={task.samples}",
        f"gconfig.max_new_tokens={task.n_new}",
        f"rollout.max_head_offpolicyness={eta}",
        f"rollout.max_concurrent_rollouts={task.groups * task.samples}",
        f'reward.function="{task.ours}"',
        'actor.advantage="grpo"',
        f"actor.std_eps={STD_EPS}",
        f"actor.lr={task.lr}",
        f"actor.adam_beta1={BETAS[0]}",
        f"actor.adam_beta2={BETAS[1]}",
        f"actor.adam_eps={EPS}",
        f"actor.weight_decay={DECAY}",
        f"actor.max_grad_norm={CLIP_NORM}",
        f"actor.eps_clip={CLIP_RATIO}",
        "checkpoint.at_end=false",
        'launch.start="fork"',  # imports once a job
        'launch.bootstrap="env"',
    )


def train(task: Task, folder: Path, model: Path, *, seed: int, eta: int, quiet: bool) -> dict[str, Any]:
    """One job. Returns the lines of its updates and the held-out scores, before with seed 1 at eta 0 only."""
    settings = (
        *common(task, folder, seed=seed, eta=eta),
        f'model.path="{model}"',
        f'evaluate.path="{folder}/held-out.jsonl"',
        # at eta > 0 it would share the generator with training
        f"evaluate.before={'true' if seed == 1 and not eta else 'false'}",
        "evaluate.after=true",
        f"evaluate.n_samples={ANSWERS}",
        "evaluate.temperature=1.0",
    )
    run = finished(folder / "runs" / f"eta{eta}-{seed}", settings, quiet=quiet)
    scores = {line["name"]: line["accuracy"] for line in run.events("evaluation", role="head")}
    return {
        "updates": list(updates(run, task.batch)),
        "before": scores.get("before"),
        "after": scores["after"],
    }


def updates(run: Run, n_sequences: int) -> Iterator[dict[str, float]]:
    """Reward, length and seconds since the first lease of a training prompt, at the end of each update."""
    began = next(line["t"] for line in run.events("admit", role="head"))
    for line in run.events("step", role="learner"):
        yield {
            "reward": line["reward"],
            "length": line["n_tokens"] / n_sequences,
            "norm": line.get("grad_norm", 0.0),  # these are absent where all rewards of each group are equal
            "loss": line.get("loss", 0.0),
            "lag": line.get("lag_mean", 0.0),
            "s": line["t"] - began,
        }


def finished(folder: Path, settings: tuple[str, ...], *, quiet: bool) -> Run:
    """A run to its end. Raises ConfigError when it does not end well."""
    config = folder.parent.parent / "parity.toml"
    config.write_text("", encoding="utf-8")
    job = KilledJob(folder, config=str(config), changes=settings, ranks=RANKS, quiet=quiet)
    with job.started():
        job.ended(PATIENCE_S)
    return Run(folder)
