"""Proofs: equal runs are equal, a planted difference is named at its first place, shipped configs are proved."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from tests.tools.trust.plain import ROOT, TINY, train_plain
from tools.report.page.parts import render
from tools.run import Run
from tools.trust import prove
from tools.trust.batches import PARTS, Sample, Step, differences, steps_of_loop

BY_CALLS = """
import itertools
calls = itertools.count()
def score(prompt, completion):
    return float(next(calls))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return steps_of_loop(train_plain(tmp_path_factory.mktemp("plain") / "loop"))


@pytest.mark.parametrize(
    ("change", "part", "step"),
    [
        ({}, None, 0),
        ({"actor__lr": 1e-3}, "other figures", 1),
        ({"gconfig__temperature": 0.9}, "log-probs", 1),
        ({"gconfig__max_new_tokens": 3}, "tokens", 1),
        ({"actor__advantage": '"grpo"'}, "advantages", 1),
        ({"actor__adam_beta2": 0.9}, "weights", 1),
        ({"data__largest": 5}, "prompts", 1),
        ({"run__seed": 2}, "prompts", 1),
    ],
)
def test_a_planted_difference_is_named_at_its_first_place(
    plain: list[Step], tmp_path: Path, change: dict[str, Any], part: str | None, step: int
) -> None:
    other = steps_of_loop(train_plain(tmp_path / "other", **change))
    first = prove.compare(plain, other, other, eta=1).first
    assert (first and (first.part, first.step)) == (part and (part, step))


def test_a_reward_of_two_processes_that_depends_on_its_calls_is_named(plain: list[Step], tmp_path: Path) -> None:
    (tmp_path / "by_calls.py").write_text(BY_CALLS)
    other = steps_of_loop(train_plain(tmp_path / "other", modules=tmp_path, reward__function='"by_calls:score"'))
    found = prove.compare(plain, other, other, eta=1)
    first = found.first
    assert first is not None
    assert (first.part, first.step) == ("rewards", 1)
    assert "rewards of step 1" in render(prove.page_of(found, "by_calls.toml", [])).decode()
    assert (found.as_json()["bit_equal"], found.as_json()["first_difference"]) == (False, first.sentence)


def planted(step: Step, part: str) -> Step:
    """The step with one change in this part of its last sample."""
    sample: Sample = step.samples[-1]
    numbers = {"log-probs": "logps", "advantages": "advantages"}
    if part in numbers:
        values = np.array(getattr(sample, numbers[part]))
        values[-1] = np.nextafter(values[-1], np.float32(9.0))
        sample = replace(sample, **{numbers[part]: values})
    elif part == "rewards":
        sample = replace(sample, reward=math.nextafter(sample.reward, 9.0))
    elif part in ("prompts", "tokens"):
        kind = {"prompts": "prompt", "tokens": "ids"}[part]
        sample = replace(sample, **{kind: [*getattr(sample, kind)[:-1], 99]})
    key = {"gradient norm": "grad_norm", "other figures": "loss", "weights": "digest"}.get(part)
    figures = dict(step.figures) | ({key: "planted"} if key else {})
    return replace(step, samples=[*step.samples[:-1], sample], figures=figures)


@pytest.mark.parametrize("part", PARTS)
def test_the_last_bit_of_each_part_is_compared(plain: list[Step], part: str) -> None:
    assert list(differences(plain[1], planted(plain[1], part))) == [part]


def test_a_missing_step_and_a_missing_batch_are_differences(plain: list[Step]) -> None:
    first = prove.compare(plain, plain[:2], plain, eta=1).first
    assert first is not None
    assert (first.step, first.place, first.first, first.second) == (3, "number of steps", "3", "2")
    with pytest.raises(ConfigError, match="missing batch of step 1"):
        prove.compare([replace(plain[0], samples=[])], plain[:1], plain, eta=1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["configs/simulated.toml"], "unsupported engine for a proof: rollout.engine = 'simulated'"),
        (["configs/tiny.toml", "--steps", "0"], "--steps must be at least 1: it is 0"),
        (["configs/tiny.toml", "--output", "."], "--output must be a new folder"),
    ],
)
def test_a_proof_that_cannot_run_is_refused_with_the_reason(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=sentence):
        prove.main(words)


FEW = ["learner.warmup.steps=1", "model.scratch.hidden_size=32", "model.scratch.layers=1"]
CONFIGS: dict[str, tuple[str, list[str]]] = {
    "multi-turn": ("multi-turn", []),
    "lora": ("tiny", ["actor.lora.rank=4", "actor.lora.dropout=0.1"]),
    "critic": ("tiny", ["actor.algorithm=ppo"]),
    "two sources": ("mix", []),
    "kl and minibatches": ("tiny", ["actor.algorithm=grpo-kl", "actor.ppo_n_minibatches=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "multi-turn" else pytest.mark.soak) for name in CONFIGS]
)
def test_a_shipped_config_gives_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    file, more = CONFIGS[name]
    path = ROOT / "configs" / f"{file}.toml"
    given = [*FEW, *more]
    both = prove.run_both(path, prove.changes(load(path, given), 2, given), tmp_path)
    assert prove.compare(*both, both[0], eta=1).first is None
    assert len(both[1]) == 2


@pytest.mark.slow
def test_the_roles_of_self_play_have_the_advantages_of_the_plain_loop(tmp_path: Path) -> None:
    path = ROOT / "examples" / "self_play" / "nim.toml"
    rows = path.with_name("piles.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "self.jsonl").write_text("\n".join(row for row in rows if '"self"' in row), encoding="utf-8")
    given = [f"data.path='{tmp_path / 'self.jsonl'}'", "data.batch_size=4", "gconfig.n_samples=4", *FEW[1:],
             "evaluate.before=false", "evaluate.after=false"]  # fmt: skip
    both = prove.run_both(path, prove.changes(load(path, given), 2, given), tmp_path)
    assert prove.compare(*both, both[0], eta=1).first is None
    assert len(both[1]) == 2


FLAKY = """
import zlib

def score(prompt, completion, row):
    if zlib.crc32(completion.encode()) % 8 == 0:
        raise ValueError(f"cannot read {completion!r}")
    return float(completion[:1] == row["answer"][:1])
"""
BESIDE = ["reward.partial_groups=true", "data.max_refill=5", "actor.advantage=gae", "actor.kl_ctl=0.04"]


@pytest.mark.soak
def test_short_and_replaced_groups_with_critic_and_reference_model_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    (tmp_path / "flaky.toml").write_text(f'extends = "{TINY}"\n[reward]\nfunction = "flaky:score"\n')
    given = [*FEW, *BESIDE]
    path = tmp_path / "flaky.toml"
    both = prove.run_both(path, prove.changes(load(path, given), 3, given), tmp_path)
    assert prove.compare(*both, both[0], eta=1).first is None
    lines = list(Run(tmp_path / "ring").events("batch", "refund", role="head"))
    assert any(line.get("missing") for line in lines)
    assert "no_signal" in {line.get("reason") for line in lines}
