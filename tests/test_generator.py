"""The generator actor over a real bus and real pushes: the test speaks for the head, a reward and the learner."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors import generator
from actors.context import Context
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.bus import Bus
from areal_bus.config import Config, ScratchConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import (
    Ack,
    Cancel,
    Directory,
    Failure,
    Heartbeat,
    Join,
    Message,
    Prompt,
    PushBegin,
    PushBroken,
    PushDone,
    Ready,
    Sampled,
    Stop,
    Trajectory,
    Unsampled,
)
from areal_bus.weights import Root, serve_store, take_snapshot

NAME = "generator-0.0"
JOB = "job"
WAIT_S = 30.0


class Ring:
    """Everything around one generator."""

    def __init__(self, folder: Path, context: Context) -> None:
        self.folder, self.context = folder, context
        self.head = Bus("head", job=JOB, listen=context.head)
        self.reward = Bus("reward-0.0", job=JOB, listen=f"ipc://{folder}/reward")
        store, self.store = serve_store("127.0.0.1")
        self.root = Root(store, interface="lo", address="127.0.0.1")
        self.failed: list[Exception] = []
        self.n_pushes = 0
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            generator.run(self.context)
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.failed.append(error)

    def heard(self, kind: type[Message], bus: Bus | None = None) -> Any:
        """The next message, which is of that kind; heartbeats do not count."""
        while True:
            received = (bus or self.head).receive(WAIT_S)
            assert received is not None, f"no {kind.__name__} came"
            if isinstance(received[1], Heartbeat):
                continue
            assert isinstance(received[1], kind), received[1]
            return received[1]

    def beat_until(self, satisfied: Callable[[Heartbeat], bool]) -> None:
        """Wait for such a heartbeat; nothing else may come."""
        while not satisfied(self.next_beat()):
            pass

    def next_beat(self) -> Heartbeat:
        received = self.head.receive(WAIT_S)
        assert received is not None
        assert isinstance(received[1], Heartbeat), received[1]
        return received[1]

    def tell(self, message: Message) -> None:
        self.head.send(NAME, message)

    def join(self, *, with_reward: bool = True) -> None:
        assert self.heard(Join).name == NAME
        assert self.heard(Ready).capacity == 4
        if with_reward:
            self.list_reward()

    def list_reward(self) -> None:
        self.tell(Directory([self.reward.name], [self.reward.endpoint]))

    def begin(self, version: int) -> PushBegin:
        begin = PushBegin(self.n_pushes, version, 0, [NAME], self.store, 10.0)
        self.n_pushes += 1
        self.tell(begin)
        return begin

    def push(self, version: int) -> PushDone:
        """Weights of `version` (random by it), from announcement to the generator's answer."""
        snapshot = take_snapshot(version, dict(self.model(version).named_parameters()), bucket_bytes=1 << 14)
        assert snapshot is not None
        done = self.root.push(snapshot, self.begin(version))
        answer: PushDone = self.heard(PushDone)
        assert answer.digest == done.digest == snapshot.digest
        return answer

    def model(self, version: int) -> Any:
        return load_model(str(self.folder / "model"), "float32", "cpu", random_seed=version)

    def journal(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "journal" / "generator-0.0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        self.tell(Stop("enough"))
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def ring(folder: Path, **sections: dict[str, Any]) -> Iterator[Ring]:
    write_scratch_folder(folder / "model", ScratchConfig(hidden_size=32, layers=2, heads=4, max_positions=4096))
    standard: dict[str, dict[str, Any]] = {
        "data": {"task": "reverse", "chat_template": False, "max_prompt_tokens": 12},
        "rollout": {"max_concurrent_rollouts": 4},
        "gconfig": {"n_samples": 2, "max_new_tokens": 10},
        "bus": {"heartbeat_s": 0.05},
    }
    config = Config.model_validate(
        {key: {**standard.get(key, {}), **sections.get(key, {})} for key in standard | sections}
    )
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(config.model_dump_json())
    context = Context(
        role="generator",
        index=0,
        incarnation=0,
        rank=1,
        job=JOB,
        head=f"ipc://{folder}/head",
        address="127.0.0.1",
        interface="lo",
        device="cpu",
        n_generators=1,
        n_rewards=1,
        n_learners=1,
        run_folder=str(folder / "run"),
        config_folder=str(folder),
        model_folder=str(folder / "model"),
    )
    running = Ring(folder, context)
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
        running.root.close()
        running.head.close(0.1)
        running.reward.close(0.1)


def prompt(uid: int, question: str = "abc", *, samples: tuple[int, ...] = (0, 1), evaluation: str = "") -> Prompt:
    row = json.dumps({"question": question, "answer": question[::-1]})
    return Prompt(uid, 0, 0, list(samples), evaluation, row)


def test_prompts_become_trajectories_whose_log_probs_a_fresh_forward_confirms(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.tell(prompt(0))  # before any weights: it waits for them
        around.push(1)
        around.tell(prompt(1, "zyx w"))
        for _ in range(4):
            t: Trajectory = around.heard(Trajectory, around.reward)
            sampled: Sampled = around.heard(Sampled)
            assert (sampled.uid, sampled.sample) == (t.uid, t.sample)
            ids, logps = np.frombuffer(t.ids, "<i4").tolist(), torch.from_numpy(np.frombuffer(t.logps, "<f4").copy())
            ((n_given, n_sampled),) = t.segments
            assert (len(ids), len(logps), sampled.n_tokens) == (n_given + n_sampled, n_sampled, n_sampled)
            assert t.spans == [[1, n_sampled]]
            with torch.no_grad():
                all_logp = torch.log_softmax(around.model(1)(torch.tensor([ids])).logits[0], -1)
            expected = all_logp[n_given - 1 : -1].gather(-1, torch.tensor(ids[n_given:])[:, None])[:, 0]
            torch.testing.assert_close(logps, expected, atol=1e-5, rtol=0)
            tokenizer = load_tokenizer(str(tmp_path / "model"))
            assert t.text == tokenizer.decode(ids[n_given:], skip_special_tokens=True)
            assert t.prompt_text == json.loads(t.row)["question"]
            around.tell(Ack(t.uid, t.sample, t.attempt, t.evaluation))
        around.beat_until(lambda beat: beat.version == 1)
        around.stop()
        assert not around.failed


ENDLESS = """
from pathlib import Path
from actors.workflows.protocol import Episode

class Flow:
    def __init__(self, config): ...

    async def episode(self, row, ask):
        ids = ask.tokenizer(row["question"])["input_ids"]
        while True:
            turn = await ask(ids, max_new_tokens=1)
            ids = ids + turn.ids
            if Path(row["answer"]).exists():
                return Episode(text="")
"""


def test_an_update_in_mid_generation_is_stamped_and_journalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_flow.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with ring(tmp_path, workflow={"function": "endless_flow:Flow"}) as around:
        around.join()
        around.push(0)
        row = json.dumps({"question": "abc", "answer": str(tmp_path / "enough")})
        around.tell(replace(prompt(0, samples=(0,)), row=row))
        around.beat_until(lambda beat: beat.progress > 0)
        done = around.push(1)
        (tmp_path / "enough").touch()
        t: Trajectory = around.heard(Trajectory, around.reward)
        assert [version for version, _ in t.spans] == [0, 1]
        assert all(pair[1] == 1 for pair in t.segments)
        around.heard(Sampled)
        around.stop()
        lines = around.journal()
        pushed = [line for line in lines if line["event"] == "pushed"]
        assert [line["version"] for line in pushed] == [0, 1]
        assert pushed[1]["stall_s"] == round(done.stall_s, 6)
        assert lines[-1]["event"] == "end"
        labelled = sum(v for line in lines for k, v in line.items() if k.startswith("s_"))
        assert abs(labelled - lines[-1]["wall_s"]) <= 0.01 * lines[-1]["wall_s"] + 0.01  # I12


def test_trajectories_are_held_without_a_reward_and_sent_again_without_an_ack(tmp_path: Path) -> None:
    with ring(tmp_path, bus={"resend_s": 0.2}) as around:
        around.join(with_reward=False)
        around.push(0)
        around.tell(prompt(0, samples=(0,)))
        around.list_reward()
        first = around.heard(Trajectory, around.reward)
        again = around.heard(Trajectory, around.reward)
        assert first == again
        around.heard(Sampled)  # once
        around.tell(Ack(0, 0, 0, ""))
        around.tell(prompt(1, samples=(1,)))
        while around.heard(Trajectory, around.reward).uid == 0:
            pass
        assert around.heard(Sampled).uid == 1


def test_a_group_that_cannot_be_sampled_is_reported_once_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "fussy_flow.py").write_text(
        "from actors.workflows.protocol import Episode\n"
        "class Flow:\n"
        "    def __init__(self, config): self.n = 0\n"
        "    async def episode(self, row, ask):\n"
        "        turn = await ask(ask.tokenizer(row['question'])['input_ids'])\n"
        "        self.n += 1\n"
        "        if row['question'] == 'bad' and self.n == 2: raise KeyError('lost')\n"
        "        return Episode(text=turn.text, row={'n': self.n})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with ring(tmp_path, workflow={"function": "fussy_flow:Flow"}) as around:
            around.join(with_reward=False)
            around.push(0)
            around.tell(prompt(0, "bad", samples=(0, 1, 2, 3)))
            failed: Unsampled = around.heard(Unsampled)
            assert (failed.uid, failed.reason, failed.error) == (0, "sampling_error", "KeyError: 'lost'")
            around.list_reward()
            around.tell(prompt(1, "good", samples=(0,)))
            assert around.heard(Trajectory, around.reward).uid == 1  # nothing of the failed group is sent
            assert around.heard(Sampled).uid == 1


def test_a_prompt_over_the_limit_is_refused(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.push(0)
        around.tell(prompt(5, "a" * 13, evaluation="before"))
        failed: Unsampled = around.heard(Unsampled)
        assert (failed.uid, failed.evaluation, failed.reason) == (5, "before", "prompt_too_long")
        assert "13" in failed.error


def test_an_evaluation_with_a_training_uid_draws_its_own_samples(tmp_path: Path) -> None:
    with ring(tmp_path, evaluate={"temperature": 2.0}) as around:
        around.join()
        around.push(0)
        for evaluation in ("", "before", "after"):
            around.tell(prompt(0, samples=(0,), evaluation=evaluation))
        made = [around.heard(Trajectory, around.reward) for _ in range(3)]
        assert {t.evaluation for t in made} == {"", "before", "after"}
        assert len({t.ids for t in made}) == 3


def test_a_cancelled_group_is_sent_no_more(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.tell(prompt(0))  # no weights yet, so it lives
        around.tell(Cancel(0, 0))
        around.push(0)
        around.tell(prompt(1, samples=(0,)))
        assert around.heard(Trajectory, around.reward).uid == 1
        assert around.heard(Sampled).uid == 1


def test_a_push_of_another_model_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        other = take_snapshot(7, {"weight": torch.zeros(3)}, bucket_bytes=1 << 14)
        assert other is not None
        begin = around.begin(7)
        with pytest.raises(Exception, match="must bring the model"):
            around.root.push(other, begin)
        broken: PushBroken = around.heard(PushBroken)
        assert (broken.push, broken.version) == (begin.push, 7)
        assert around.push(8).version == 8


def test_a_workflow_that_does_not_import_ends_the_actor_with_a_config_error(tmp_path: Path) -> None:
    with ring(tmp_path, workflow={"function": "no_such_flow:Flow"}) as around:
        around.heard(Join)
        assert "no_such_flow" in around.heard(Failure).error
        around.thread.join(WAIT_S)
        assert isinstance(around.failed[0], ConfigError)


def test_the_same_prompts_give_the_same_samples_in_another_life(tmp_path: Path) -> None:
    lives = []
    for life in range(2):
        (tmp_path / str(life)).mkdir()
        with ring(tmp_path / str(life)) as around:
            around.join()
            around.push(3)
            for uid in range(3):
                around.tell(replace(prompt(uid, "abcd"[: uid + 1]), attempt=life))
            made = [around.heard(Trajectory, around.reward) for _ in range(6)]
            lives.append({(t.uid, t.sample): t.ids for t in made})
    assert lives[0] == lives[1]
