"""A learner calls helpers where its layers have something for them to do, says why where not, and tells their share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from actors.cpu import build, fused_mlp_qkv, helpers
from actors.cpu.helpers import Crew, Helped
from actors.learner import cpu_helpers
from actors.learner.cpu_helpers import call
from actors.learner.policy import Policy
from actors.learner.ppo import PPOActor
from actors.learner.rendezvous import LearnerRanks
from areal_bus import messages as m
from tests.actors.learner.test_ppo import batch_of
from tests.support.learner_script import script
from tests.support.learner_setup import random_shard, tiny_actor, tiny_model

pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine"),
    pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle policy on this system"),
]


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line).strip()), level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


def policy_of(dtype: str = "float32") -> Policy:
    return Policy(tiny_model(), ranks=LearnerRanks(), device="cpu", temperature=1.0, dtype=dtype)


def test_helpers_come_and_nothing_is_said(said: list[str]) -> None:
    called = call(2, policy_of())
    assert called is not None
    assert Helped.now().n_helpers == 2
    called.close()
    assert not said


def test_a_policy_of_the_models_own_layers_has_nothing_for_helpers(said: list[str]) -> None:
    assert call(2, policy_of("bfloat16")) is None
    assert said == [
        "learner.helpers = 2 have nothing to do, and there are none: the policy's layers are the model's own, which go "
        "by torch"
    ]


def test_with_threads_of_torch_there_are_no_helpers(said: list[str]) -> None:
    policy = policy_of()
    torch.set_num_threads(2)
    assert call(1, policy) is None
    assert len(said) == 1
    assert "torch itself has 2 threads" in said[0]


def test_on_one_core_there_are_no_helpers(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_helpers.os, "sched_getaffinity", lambda _pid: {3})
    assert call(1, policy_of()) is None
    assert len(said) == 1
    assert "on one core only" in said[0]


def test_without_a_library_a_warning_says_so(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    monkeypatch.setattr(cpu_helpers.build, "library", lambda: None)
    assert call(1, policy) is None
    assert len(said) == 1
    assert "the C kernels were not compiled" in said[0]


def test_where_the_system_refuses_a_warning_says_so(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.function

    def function(name: str, *kinds: type) -> Any:
        return (lambda found: None) if name == "helper" else made(name, *kinds)

    monkeypatch.setattr(helpers.build, "function", function)
    assert call(1, policy_of()) is None
    assert len(said) == 1
    assert "SCHED_IDLE" in said[0]
    assert Helped.now().n_helpers == 0


def test_large_weights_leave_little_to_do(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, largest = policy_of(), 4 * 2 * 64 * 32  # gate and up
    for most, warned in ((largest, []), (largest - 1, ["learner.helpers = 1 have little to do: weights over"])):
        monkeypatch.setattr(fused_mlp_qkv, "MOST", most)
        called = call(1, policy)
        assert called is not None
        called.close()
        assert [line[: len(warned[0])] for line in said] == warned if warned else not said


def test_an_update_tells_what_helpers_had_of_it(tmp_path: Path) -> None:
    helped, alone = (with_helpers(tmp_path / name, actor) for name, actor in (("a", True), ("b", False)))
    assert 0.0 <= helped["helped_share"] <= 1.0
    assert "helped_share" not in alone
    assert helped["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert helped["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def with_helpers(folder: Path, has_helpers: bool) -> dict[str, float]:
    folder.mkdir()
    tiny = tiny_actor(folder)
    actor = PPOActor(
        tiny.policy, tiny._config, journal=tiny._journal, pulse=tiny._pulse, folder=folder, has_helpers=has_helpers
    )
    called = Crew(1) if has_helpers else None
    try:
        return actor.ppo_update(actor.compute_advantages_and_returns(batch_of(random_shard(1))))
    finally:
        if called is not None:
            called.close()


def test_a_learner_with_helpers_journals_their_share_and_ends(tmp_path: Path) -> None:
    with script(tmp_path, learner={"helpers": 1}) as head:
        head.assemble()
        for step in range(2):
            head.serve(step, last=step == 1)
            assert 0.0 <= head.take(m.UpdateDone).stats["helped_share"] <= 1.0
        head.take(m.Finished)
        assert head.end() == [0]
        assert [0.0 <= line["helped_share"] <= 1.0 for line in head.journal("step")] == [True, True]
