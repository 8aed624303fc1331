"""Options of the update and of sources in runs of 5 steps: a generator is killed, then the job, which is resumed."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.models.loading import load_model
from actors.models.scratch import character_tokenizer
from areal_bus.config.sections import ScratchConfig
from tests.actors.learner.model.test_remote_teacher import serving
from tests.faults.ring import History, Line, Ring
from tests.test_tiny import teacher
from tools import run as runs
from tools.offline.recompute_logprobs import RecomputeOrder, recompute
from tools.report.__main__ import as_json

STEPS = 5
LORA = (
    "actor.lora.rank=2",
    "actor.lora.variant=['rslora','dora']",
    "actor.lora.target_modules={q_proj=3,up_proj=[1,2]}",
    *("actor.advantage=grpo_process", "workflow.function=own_turn:TwoTurns", "actor.length_penalty=0.1"),
    *("reward.check.function=reverse", "reward.check.share=1.0"),
)
OWN = {"hot": (2, 6, 1.0), "cold": (4, 12, 0.3)}  # samples of a group, tokens of a completion, temperature
MORE = {
    "hot": 'reward="verdicts:score", normalize_with="one", truncated_samples="mask"',
    "cold": 'reward="reverse", normalize_with="other", mask_repetition=0.9, workflow="own_turn:Turn"',
}
TABLES = ", ".join(
    f'{{name="{name}", task="reverse", weight=1, {MORE[name]}, gconfig={{n_samples={n}, max_new_tokens={most}, '
    f"temperature={heat}}}, evaluate={{n_samples=2, max_new_tokens=8, temperature=0.7}}}}"
    for name, (n, most, heat) in OWN.items()
)
TURN = """
from actors.workflows.protocol import Episode, at_turn_ends


class Turn:
    def __init__(self, config): ...

    async def episode(self, row, ask):
        ids = ask.tokenizer(row["question"] + ">")["input_ids"]
        turn = await ask(ids, max_new_tokens=ask.gconfig.max_new_tokens)
        return Episode(text=turn.text)


class TwoTurns(Turn):
    async def episode(self, row, ask):
        ids = ask.tokenizer(row["question"] + ">")["input_ids"]
        first = await ask(ids, max_new_tokens=8)
        second = await ask([*ids, *first.ids, 5], max_new_tokens=8)
        turns = [first.ids, second.ids]
        by_token = at_turn_ends([len(ids) for ids in turns], [len(set(ids)) / 8 for ids in turns])
        return Episode(first.text + second.text, fields={"token_reward": by_token})
"""
SOURCES = (
    *("actor.normalize_batch=true", "actor.mask_repetition=0.5", 'data.task=""', f"data.source=[{TABLES}]"),
    *("data.held_out=4", "evaluate.after=true", "journal.tokens=true", "checkpoint.keep=20"),
)
OPTIONS = {
    "sources": SOURCES,
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
        'actor.group=[{match="norm|bias",weight_decay=0.0,lr_scale=0.5}]',
        *("actor.weight_decay=0.1", "checkpoint.keep_every=2"),
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
    (tmp_path / "own_turn.py").write_text(TURN, encoding="utf-8")
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
    if option == "sources":
        check_sources(ring, updates)


def check_sources(ring: Ring, updates: list[Line]) -> None:
    """Each source keeps its settings: the figures of updates, the tokens at their versions, groups and evaluations."""
    assert all("repeated_share" in one for one in updates)
    assert {name for one in updates for name in one if name.startswith("reward/")} == {"reward/hot", "reward/cold"}
    found = recompute(RecomputeOrder(str(ring.run), tolerance=1e-3))
    assert sum(one.n_tokens for one in found.versions.values()) > 100
    assert found.off == []
    own = {one["source"]: one for one in as_json(runs.find(str(ring.run)))["sources"]}
    assert own.keys() == OWN.keys()
    assert own["cold"]["entropy"] < own["hot"]["entropy"]
    assert all(own[name]["mean_tokens"] <= most for name, (_, most, _) in OWN.items())
    source = {line["uid"]: line["source"] for line in ring.lines("admit", role="head")}
    groups = defaultdict(set)
    for line in ring.lines("trajectory", role="head"):
        assert line["n_tokens"] <= OWN[source[line["uid"]]][1]
        groups[line["step"], line["uid"]].add(line["sample"])
    assert {(source[uid], len(samples)) for (_, uid), samples in groups.items()} == {("hot", 2), ("cold", 4)}
    evaluated = [line for line in ring.lines("scored", role="head") if line.get("evaluation")]
    assert {line["evaluation"] for line in evaluated} == {"after:hot", "after:cold"}
    assert max(line["n_tokens"] for line in evaluated) <= 8
    assert {line["sample"] for line in evaluated} == {0, 1}
