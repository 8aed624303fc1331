"""The options of the update in small runs of 5 steps: a generator is killed, then the whole job, which is resumed."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.models.loading import load_model
from actors.models.scratch import character_tokenizer
from areal_bus.config.sections import ScratchConfig
from tests.actors.learner.model.test_remote_teacher import serving
from tests.faults.ring import History, Ring
from tests.test_tiny import teacher

STEPS = 5
LORA = (
    "actor.lora.rank=2",
    "actor.lora.variant=['rslora','dora']",
    "actor.lora.target_modules={q_proj=3,up_proj=[1,2]}",
)
OPTIONS = {
    "adapters": LORA,
    "remote": (
        "actor.lora.rank=2",
        "actor.lora.variant=['nf4','rslora']",
        "actor.advantage=distill",
        "actor.distill_beta=0",
        "actor.distill_top_k=3",
    ),
    "distill": (
        "actor.advantage=distill",
        "actor.distill_beta=0.5",
        "actor.distill_top_k=3",
        "actor.ppo_epochs=2",
        "actor.ppo_n_minibatches=2",
        "actor.optimizer=muon",
        "actor.adamw_lr=1e-4",
    ),
    "critic": (
        "actor.advantage=gae",
        "actor.truncated_samples=bootstrap",
        "critic.warmup_updates=2",
        "actor.reward_scaling=running",
    ),
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options_survive_a_kill_and_a_resume(tmp_path: Path, option: str, stack: ExitStack) -> None:
    (tmp_path / "verdicts.py").write_bytes(Path(__file__).with_name("verdicts.py").read_bytes())
    config = tmp_path / "ring.toml"
    config.write_text(f"extends = {json.dumps(str(Path(__file__).with_name('ring.toml')))}\n", encoding="utf-8")
    few = (f"run.total_train_steps={STEPS}", "checkpoint.every_steps=1")
    more = [teacher(tmp_path)] if option in ("distill", "remote") else []
    if option == "remote":
        url, served = stack.enter_context(serving("vllm"))
        served.model = load_model(str(tmp_path / "teacher"), "float32", "cpu")
        served.tokenizer = character_tokenizer(ScratchConfig())
        more = [f"teacher.path={url}"]
    ring = Ring(tmp_path, *few, *OPTIONS[option], *more, config=config)
    ring.hold_learner(3)
    with ring.started():
        ring.wait_for("publish", version=1)
        ring.kill("generator-0")
        ring.wait_for("publish", version=3)
        ring.kill_all()
        ring.hold_learner(None)
        ring.start("--resume", str(ring.run))
        ring.finish(timeout_s=300)
    assert {name: one.findings for name, one in ring.audited().items() if one.findings} == {}
    assert History.of(ring.run).twice == []
    updates = ring.lines("update", role="head")
    assert ring.version == STEPS
    assert sum(one["n_tokens_trained"] for one in updates) > 0
    assert {line["term"] for line in ring.lines("term", role="head")} == {0, 1}
    assert option not in ("distill", "remote") or all(one["kl_teacher"] > 0 for one in updates)
