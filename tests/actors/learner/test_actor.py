"""The learner actor as a real process, with a head that follows a script, over the real bus and a real push."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.learner.checkpoint import checkpoint
from actors.runtime import process as codes
from areal_bus import messages as m
from tests.support.learner_script import PATIENCE_S, Script, script


@pytest.mark.slow
def test_a_learner_lives_from_warm_up_to_its_exported_model(tmp_path: Path) -> None:
    data = {"task": "reverse", "prompt": "{question}>", "chat_template": False}
    sections: dict[str, Any] = {
        "data": data,
        "learner": {"warmup": {"steps": 3}},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "actor": {"lr": 1e-3},
    }
    with script(tmp_path, **sections) as head:
        begun = head.assemble()
        received, digest = head.push(0)
        assert begun == m.BeginTerm(0, digest)
        for step in range(3):
            head.serve(step)
            update = head.take(m.UpdateDone)
            assert update.version == step + 1
            assert update.stats["n_tokens_trained"] == 24
        assert head.push(3)[1] == update.digest != digest
        assert head.take(m.BatchRequest).step == 3
        head.tell(m.NoBatch(3, False))
        finished = head.take(m.Finished)
        final, _ = head.push(3)  # a late member, after the loop has ended
        assert head.end() == [0]
        assert [p.name for p in sorted((head.run_folder / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
        assert finished.checkpoint.endswith("step-000003")
        assert [head.take(m.Checkpointed).version for _ in range(2)] == [2, 3]
        exported = AutoModelForCausalLM.from_pretrained(finished.model)
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, final[name]), name
        assert any(not torch.equal(final[name], received[name]) for name in final)
        _check_journal(head)


def _check_journal(head: Script) -> None:
    assert [line["version"] for line in head.journal("step")] == [1, 2, 3]
    assert {"reward", "mismatch_kl", "entropy", "grad_norm", "ess", "lag_max"} <= set(head.journal("step")[0])
    assert len(head.journal("warmup")) == 3
    assert [line["step"] for line in head.journal("checkpoint")] == [2, 3]
    assert len(head.journal("export")) == 1
    assert [line["version"] for line in head.journal("pushed")] == [0, 3, 3]
    spent: dict[str, float] = {}
    for line in head.journal("spans"):
        for label, seconds in line.items():
            if label.startswith("s_"):
                spent[label] = spent.get(label, 0.0) + seconds
    labels = {"s_load", "s_warmup", "s_wait_batch", "s_backward", "s_optimizer", "s_snapshot", "s_checkpoint"}
    assert labels <= set(spent)
    assert sum(spent.values()) == pytest.approx(head.journal("end")[0]["wall_s"], rel=0.01)  # I12


@pytest.mark.slow
def test_a_push_goes_on_while_the_learner_waits_and_stop_ends_the_wait(tmp_path: Path) -> None:
    with script(tmp_path) as head:
        digest = head.assemble().digest
        head.take(m.BatchRequest)
        assert head.push(0)[1] == digest
        head.bus.send("learner-0.0", m.PushBegin(7, 5, 0, ["generator-0.0"], head.store, 5.0))
        assert head.take(m.PushBroken).error == "missing snapshot of version 5: learner 0 has [0]"
        assert head.end() == [0]
        assert not (head.run_folder / "checkpoints").exists()


@pytest.mark.slow
def test_a_drained_learner_leaves_a_checkpoint_and_no_export(tmp_path: Path) -> None:
    with script(tmp_path, checkpoint={"at_end": False}) as head:
        head.assemble()
        head.serve(0)
        assert head.take(m.BatchRequest).step == 1
        head.tell(m.NoBatch(1, True))
        folder = head.run_folder / "checkpoints" / "step-000001"
        assert head.take(m.Finished) == m.Finished(str(folder), "")
        assert head.take(m.Checkpointed) == m.Checkpointed(1, str(folder))
        checkpoint.verify(folder)
        assert head.end() == [0]
        assert not (head.run_folder / "model").exists()


@pytest.mark.slow
def test_two_learners_are_one(tmp_path: Path) -> None:
    with script(tmp_path, n_learners=2) as head:
        assert head.assemble().version == 0
        head.serve(0, last=True)
        update = head.take(m.UpdateDone)
        assert update.stats["n_tokens"] == 24
        received, digest = head.push(1)
        assert digest == update.digest
        finished = [head.take(m.Finished) for _ in range(2)]
        assert head.end() == [0, 0]
        assert finished[0] == finished[1]
        assert not any(isinstance(message, m.UpdateDone) for _, message in head.waiting)
        files = sorted(Path(finished[0].model).glob("model-*-of-00002.safetensors"))
        exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert exported.keys() == received.keys()
        assert all(torch.equal(exported[name], received[name]) for name in exported)
        assert len(head.journal("step", index=1)) == 0


OWN_LOOP = """
def train(rollout, actor):
    for batch in rollout:
        for item in batch.items:
            assert item.n_trained
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    open({path!r}, "w").write(str(actor.version))
"""


@pytest.mark.slow
def test_a_users_own_loop_is_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOOP.format(path=str(tmp_path / "seen")))
    with script(tmp_path, learner={"loop": "mine:train"}, checkpoint={"at_end": False}) as head:
        head.assemble()
        head.serve(0)
        head.serve(1, last=True)  # no further request follows
        assert head.take(m.Finished) == m.Finished(checkpoint="", model="")
        assert head.end() == [0]
    assert (tmp_path / "seen").read_text() == "2"


HIDING_LOOP = """
def train(rollout, actor):
    batch = rollout.prepare_batch()
    try:
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    except Exception:
        actor.version += 1
"""


@pytest.mark.slow
def test_half_an_update_is_never_kept_whatever_the_loop_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HIDING_LOOP)
    actor = {"ppo_n_minibatches": 2, "advantage": "rloo"}
    with script(tmp_path, learner={"loop": "mine:train"}, actor=actor) as head:
        head.assemble()
        head.serve(0, last=True, broken=1)
        assert head.take(m.Failure).error.startswith("incomplete update of version")
        assert head.processes[0].wait(PATIENCE_S) == codes.CRASHED
        assert not (head.run_folder / "checkpoints").exists()


@pytest.mark.slow
def test_a_loop_that_returns_early_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(rollout, actor): pass")
    said = (
        "learner.loop must take batches until there are none: 'mine:train' returned at version 0 while the run "
        "continues"
    )
    with script(tmp_path, learner={"loop": "mine:train"}) as head:
        head.assemble()
        assert head.take(m.Failure).error == said
        assert head.processes[0].wait(PATIENCE_S) == codes.BAD_INPUT
        stderr = head.processes[0].stderr
        assert f"rank 0 (learner-0): {said}" in stderr.read()
