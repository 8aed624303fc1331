"""A reward actor as a process under a head and generators: verdicts, its queue, hostile samples, its end."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import actors.rewards.actor
from actors.rewards.actor import RewardLoop, listen_endpoint, size_of
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.rewards.second_opinion import is_chosen
from actors.runtime.context import PROGRESS_FD, Context, HeartbeatState
from actors.runtime.head_session import ActorRuntime, HeadSession
from actors.runtime.process import OVER
from areal_bus import messages as m
from areal_bus.config.sections import Config
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus, Heartbeats
from areal_bus.wire import codec
from tests.support.polling import wait_until
from tests.support.strangers import OpenBus

JOB = "test-job"
USER_MODULE = """
import time
def score(prompt, completion, row):
    if completion == "slow":
        time.sleep(0.5)
    if completion == "hangs":
        time.sleep(3600)
    if completion == "raises":
        raise RuntimeError("no")
    return row["value"]

def ranks(completions, rewards):
    if completions[0] == "hangs":
        time.sleep(3600)
    if completions[0] == "raises":
        raise RuntimeError("no group")
    return [sum(len(other) < len(one) for other in completions) / (len(completions) - 1) for one in completions]
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ab") as name:  # short: the path of a socket has at most 107 characters
        (Path(name) / "own_actor_rewards.py").write_text(USER_MODULE)
        yield Path(name)


def context_of(folder: Path, **changes: object) -> Context:
    standard = Context(
        role="reward", index=0, incarnation=0, rank=1, job=JOB, head=f"ipc://{folder}/head", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=1, n_rewards=1, n_learners=1, run_folder=str(folder),
        config_folder=str(folder), model_folder="",
    )  # fmt: skip
    return replace(standard, **changes)


def trajectory(uid: int, text: str, *, attempt: int = 0) -> m.Trajectory:
    return m.Trajectory(
        uid=uid, sample=2, attempt=attempt, evaluation="", generator="generator-0.0", finish="stop",
        segments=[[2, 1]], spans=[[3, 1]], seconds=0.25, term=0, ids=b"\1\0\0\0\2\0\0\0\3\0\0\0", logps=b"\0\0\0\0",
        prompt_text="asked", text=text, row=json.dumps({"value": uid / 10}),
    )  # fmt: skip


class Ring:
    """A head and a generator for one real reward actor."""

    def __init__(self, folder: Path, context: Context, head: Bus, generator: Bus, process: subprocess.Popen) -> None:
        self.folder, self.context, self.head, self.generator, self.process = folder, context, head, generator, process

    def next(self, kind: type[m.Message]) -> m.Message:
        """The head's next message of that kind."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            received = self.head.receive(1.0)
            if received and isinstance(received[1], kind):
                assert received[0] == self.context.name
                return received[1]
        raise AssertionError(f"no {kind.__name__} came")

    def up(self) -> None:
        """Wait until it is ready, and connect the generator to it."""
        self.join = self.next(m.Join)
        self.next(m.Ready)
        self.generator.connect(self.join.name, self.join.endpoint)

    def score(self, *trajectories: m.Trajectory) -> None:
        for one in trajectories:
            self.generator.send(self.context.name, one)

    def stop(self) -> int:
        self.head.send(self.context.name, m.Stop(reason="the test is over"))
        return self.process.wait(10)

    def journal(self) -> list[dict]:
        lines = (self.folder / "journal" / "reward-0.0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextmanager
def ring_of(
    folder: Path,
    *,
    function: str = "own_actor_rewards:score",
    timeout_s: float = 1.0,
    starts: bool = True,
    **others: object,
) -> Iterator[Ring]:
    reward = {"function": function, "timeout_s": timeout_s, **others}
    config = Config.model_validate({"reward": reward, "bus": {"silent_s": 0.3}})
    (folder / "config.json").write_text(config.model_dump_json())
    beats = Heartbeats(lambda: m.HeadHeartbeat(term=0, version=0), every_s=0.1)
    head = Bus("head", job=JOB, listen=f"ipc://{folder}/head", heartbeats=beats)
    generator = Bus("generator-0.0", job=JOB)
    context = context_of(folder, head=head.endpoint)
    process = subprocess.Popen(
        [sys.executable, "-m", "actors.runtime.start"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        process.stdin.write(context.to_json().encode() + b"\n")
        process.stdin.flush()
        ring = Ring(folder, context, head, generator, process)
        if starts:
            ring.up()
        yield ring
    finally:
        process.kill()
        process.communicate()
        generator.close()
        head.close()


GUEST = "generator-66.0"


@contextmanager
def guest_of(ring: Ring, name: str = GUEST) -> Iterator[Bus]:
    guest = Bus(name, job=JOB)
    guest.connect(ring.context.name, ring.join.endpoint)
    try:
        yield guest
    finally:
        guest.close(0)


def test_trajectories_come_back_scored_whole_and_without_their_row(folder):
    with ring_of(folder) as ring:
        join = ring.join
        assert (join.role, join.index, join.pid) == ("reward", 0, ring.process.pid)
        sent = trajectory(7, "fine", attempt=1)
        ring.score(sent)
        scored = ring.next(m.Scored)
        assert (scored.status, scored.reward, scored.correct, scored.error) == ("value", 0.7, None, "")
        for field in set(m.Trajectory.__dataclass_fields__) - {"row"}:
            assert getattr(scored, field) == getattr(sent, field), field


def group(uid: int, *completions: str) -> m.Group:
    samples = [{"sample": i, "completion": x, "reward": 0.5, "correct": None} for i, x in enumerate(completions)]
    return m.Group(uid, 0, "asked", "{}", json.dumps(samples))


def test_hangs_and_crashes_of_samples_and_groups_are_journalled_by_status_and_every_second_has_one_label(folder):
    statuses = {1: "timeout", 2: "error", 3: "value"}
    with ring_of(folder, group="own_actor_rewards:ranks") as ring:
        ring.score(trajectory(1, "hangs"), trajectory(2, "raises"), trajectory(3, "slow"))
        verdicts = {scored.uid: scored for scored in (ring.next(m.Scored) for _ in statuses)}
        assert {uid: scored.status for uid, scored in verdicts.items()} == statuses
        assert "RuntimeError: no" in verdicts[2].error
        assert ring.next(m.Heartbeat).version is None
        while ring.next(m.Heartbeat).progress < 3:
            pass
        for one in (group(1, "hangs", ""), group(2, "raises", ""), group(3, "aa", "a", "aaaa", "aaa")):
            ring.head.send(ring.join.name, one)
        compared = {one.uid: one for one in (ring.next(m.GroupScored) for _ in statuses)}
        assert {uid: one.status for uid, one in compared.items()} == statuses
        assert (compared[1].rewards, compared[3].rewards) == ([], [1 / 3, 0, 1, 2 / 3])
        assert "RuntimeError: no group" in compared[2].error
        assert ring.stop() == 0
        lines = ring.journal()
    for event, value in (("score", "reward"), ("group_score", "rewards")):
        scores = {line["uid"]: line for line in lines if line["event"] == event}
        assert {uid: line["status"] for uid, line in scores.items()} == statuses
        assert [uid for uid, line in scores.items() if value in line] == [3]
        assert scores[1]["score_s"] >= 1.0
    spans = [line for line in lines if line["event"] == "spans"]
    seconds = {key: sum(line.get(key, 0.0) for line in spans) for key in ("s_start", "s_idle", "s_score", "s_bus")}
    assert seconds["s_score"] >= 1.0
    assert sum(seconds.values()) == pytest.approx(lines[-1]["wall_s"], rel=0.01)  # I12


PLANTED = """
def score(completion):
    return completion != "100"  # one of a hundred is graded wrong

def other(completion):
    if completion == "50":
        raise RuntimeError("cannot say")
    return True
"""


def test_a_second_grader_finds_one_wrong_grade_in_a_hundred_and_changes_no_reward(folder):
    (folder / "own_planted.py").write_text(PLANTED)
    check = {"function": "own_planted:other", "share": 1}
    with ring_of(folder, function="own_planted:score", check=check, timeout_s=60) as ring:
        ring.score(*(trajectory(uid, str(uid)) for uid in range(1, 101)))
        rewards = {one.uid: one.reward for one in (ring.next(m.Scored) for _ in range(100))}
        assert rewards == {uid: float(uid != 100) for uid in range(1, 101)}
        wait_until(lambda: sum(line["event"] == "check" for line in ring.journal()) == 100, "all are checked")
        assert ring.stop() == 0
        lines = {line["uid"]: line for line in ring.journal() if line["event"] == "check"}
    assert [uid for uid, line in lines.items() if line.get("agrees") is False] == [100]
    planted = lines[100]
    assert (planted["correct"], planted["check_correct"], planted["completion"]) == (False, True, "100")
    assert "cannot say" in lines[50]["error"]
    assert "completion" not in lines[1]


def test_samples_are_chosen_by_their_ids_and_as_often_as_the_share_says():
    samples = [replace(trajectory(uid, ""), sample=sample) for uid in range(500) for sample in range(4)]
    chosen = [one for one in samples if is_chosen(one, 0.1)]
    assert 140 < len(chosen) < 260
    assert chosen == [one for one in samples if is_chosen(one, 0.1)]
    assert not any(is_chosen(replace(one, evaluation="after"), 1.0) for one in samples)


class Watched(OpenBus):
    """Notes, as each verdict is sent, which ones the journal has and whether progress was reported."""

    def __init__(self, name: str, journal: Journal, reported: Callable[[], bool]) -> None:
        super().__init__(name, job=JOB)
        self.journal, self.reported = journal, reported
        self.seen: list[tuple[int, list[int], bool]] = []

    def send(self, to: str, message: m.Message) -> None:
        if isinstance(message, m.Scored):
            lines = [json.loads(line) for line in self.journal.path.read_text().splitlines()]
            scores = [line["uid"] for line in lines if line["event"] == "score"]
            self.seen.append((message.uid, scores, self.reported()))
        super().send(to, message)

    def send_all(self, letters: Iterable[tuple[str, m.Message]]) -> None:
        for letter in letters:
            self.send(*letter)


@contextmanager
def loop_of(folder: Path, bus: Bus, journal: Journal, *, timeout_s: float) -> Iterator[RewardLoop]:
    """The loop of an actor, turned by the test."""
    order = WorkerOrder("own_actor_rewards:score", str(folder))
    with WorkerPool(order, n_workers=1, timeout_s=timeout_s) as pool:
        runtime = ActorRuntime(bus, HeadSession(bus, silent_s=60.0), journal, HeartbeatState())
        yield RewardLoop(runtime, pool, capacity=1, n_generators=1)


def test_a_verdict_is_in_the_journal_before_it_is_sent_and_progress_is_reported_after_it(folder, monkeypatch):
    """So that a reward that dies between the two leaves no verdict at the head that it never wrote down (I10)."""
    read, write = os.pipe()
    monkeypatch.setenv(PROGRESS_FD, str(write))
    journal = Journal(folder / "journal", role="reward", index=0, incarnation=0)
    bus = Watched("reward-0.0", journal, lambda: bool(select.select([read], [], [], 0)[0]))
    head = Bus("head", job=JOB, listen=f"ipc://{folder}/head")
    try:
        bus.connect("head", head.endpoint)
        with loop_of(folder, bus, journal, timeout_s=1.0) as loop:
            deadline = time.monotonic() + 60
            while len(bus.seen) < 2 and time.monotonic() < deadline:
                loop.turn()
                received = head.receive(0)
                if received and isinstance(received[1], m.Ready):  # so the head knows where it is
                    for uid, text in enumerate(("fine", "raises")):
                        head.send("reward-0.0", trajectory(uid, text))
        assert bus.reported()
    finally:
        bus.close()
        head.close()
        os.close(read)
    assert [uid for uid, _, _ in bus.seen] == [0, 1]
    assert all(uid in written for uid, written, _ in bus.seen)
    assert not bus.seen[0][2]


@pytest.mark.slow
def test_a_copy_is_scored_once_at_a_time_and_garbage_takes_the_place_of_no_honest_sample(folder):
    """The honest one was taken for a second copy and dropped; it was sent again after 120 s."""
    with ring_of(folder, timeout_s=60.0) as ring, guest_of(ring) as guest:
        ring.score(*(trajectory(1, "slow", attempt=n) for n in (0, 0, 1)), trajectory(2, "fine"))
        assert [(one.uid, one.attempt) for one in (ring.next(m.Scored) for _ in range(3))] == [(1, 0), (1, 1), (2, 0)]
        for uid in range(4):
            guest.send(ring.context.name, replace(trajectory(uid, "slow"), generator=GUEST, lease="forged"))
        while ring.next(m.Heartbeat).note != "scores 4":
            pass
        ring.score(*(replace(trajectory(uid, "fine"), lease="right") for uid in range(4)))
        found = [ring.next(m.Scored) for _ in range(8)]
        assert sorted((one.uid, one.generator, one.lease) for one in found) == sorted(
            (uid, name, lease) for uid in range(4) for name, lease in (("generator-0.0", "right"), (GUEST, "forged"))
        )


@pytest.mark.slow
def test_a_flood_of_samples_that_hang_leaves_the_workers_to_others_in_turn(folder):
    """All of them were scored before the first honest one."""
    with ring_of(folder, timeout_s=0.5) as ring, guest_of(ring) as guest:
        for uid in range(20):
            guest.send(ring.context.name, replace(trajectory(uid, "hangs"), generator=GUEST))
        while not ring.next(m.Heartbeat).note.startswith("scores"):
            pass
        ring.score(*(trajectory(uid, "fine") for uid in range(3)))
        assert sum(ring.next(m.Scored).generator != GUEST for _ in range(8)) == 3


def test_a_backlog_of_one_generator_fills_its_share_and_another_ones_is_taken(folder, monkeypatch):
    monkeypatch.setattr(actors.rewards.actor, "BACKLOG_BYTES", 40_000)
    journal = Journal(folder / "journal", role="reward", index=0, incarnation=0)
    bus = OpenBus("reward-0.0", job=JOB, listen=f"ipc://{folder}/reward")
    honest, guest = Bus("generator-0.0", job=JOB), Bus(GUEST, job=JOB)
    with loop_of(folder, bus, journal, timeout_s=60.0) as loop:
        for one in (honest, guest):
            one.connect("reward-0.0", bus.endpoint)
        for uid in range(100):
            guest.send("reward-0.0", replace(trajectory(uid, "hangs" * 200), generator=GUEST))
        wait_until(lambda: (loop.turn(), loop._has_its_share(GUEST))[1], "its share is full")
        honest.send("reward-0.0", trajectory(1, "hangs"))
        wait_until(lambda: (loop.turn(), loop._n_bytes["generator-0.0"])[1], "the other one's is taken")
        assert loop._n_bytes[GUEST] < 44_000
        for one in (bus, honest, guest):
            one.close(0)


def test_a_backlog_counts_the_objects_of_small_trajectories():
    """64 MiB of their bytes took 5 GiB of memory."""
    frames = codec.encode(trajectory(1, ""), job=JOB)
    tracemalloc.start()
    try:
        many = [codec.decode(frames, job=JOB) for _ in range(1000)]
        assert sum(map(size_of, many)) > tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_queued_trajectories_of_a_refunded_group_are_not_scored(folder):
    with ring_of(folder) as ring:
        ring.score(trajectory(1, "hangs"), *(replace(trajectory(1, "hangs"), sample=i) for i in range(3, 60)))
        assert ring.next(m.Scored).status == "timeout"
        ring.head.send(ring.context.name, m.Cancel(uid=1, attempt=0))
        ring.score(trajectory(2, "fine"))
        first = ring.next(m.Scored)
        last = ring.next(m.Scored) if first.uid == 1 else first  # one more may have been under way when the news came
        assert (last.uid, last.status) == (2, "value")


@pytest.mark.slow
def test_a_reward_drops_its_queue_and_rejoins_for_a_new_head(folder):
    with ring_of(folder, timeout_s=60.0) as ring:
        first = ring.join
        ring.score(trajectory(1, "fine"))
        ring.next(m.Scored)
        ring.score(*(replace(trajectory(1, "hangs"), sample=i) for i in range(3, 9)))
        while ring.next(m.Heartbeat).note != "scores 6":
            pass
        ring.head.send(ring.context.name, m.Rejoin("a new head"))
        assert ring.next(m.Join) == replace(first, again=1)
        ring.next(m.Ready)
        ring.score(trajectory(1, "fine", attempt=1000))
        scored = ring.next(m.Scored)
        assert (scored.uid, scored.attempt, scored.status) == (1, 1000, "value")
        while ring.next(m.Heartbeat).note != "waits for a trajectory":
            pass


def test_a_function_that_does_not_load_ends_the_actor_with_a_sentence_and_code_2(folder):
    with ring_of(folder, function="own_actor_rewards:missing", starts=False) as ring:
        assert "no such name" in ring.next(m.Failure).error
        assert ring.process.wait(20) == 2
        assert b"reward-0" in ring.process.stderr.read()


def test_every_incarnation_listens_at_a_path_of_its_own_or_on_the_named_interface(folder):
    assert listen_endpoint(context_of(folder, head="tcp://127.0.0.1:9")) == "tcp://127.0.0.1:0"
    endpoints = {listen_endpoint(context_of(folder, incarnation=n)) for n in range(3)}
    assert endpoints == {f"ipc://{folder}/reward-0.{n}" for n in range(3)}


def test_the_first_failure_is_logged_with_its_place_and_eight_before_any_score_end_the_actor(folder):
    """A row that cannot be scored, in the first two prompts, ends nothing; a typo ends the job within four prompts."""
    with ring_of(folder) as ring:
        for uid in (1, 2, 3):
            samples = [replace(trajectory(uid, "raises"), sample=n) for n in range(4)]
            ring.score(*samples)
            assert {ring.next(m.Scored).uid for _ in samples} == {
                uid
            }  # 12 samples of 3 prompts: the rows may be at fault
        ring.score(trajectory(4, "raises"))
        sentence = ring.next(m.Failure).error
        assert ring.process.wait(10) == OVER
        said = ring.process.stderr.read().decode()
    place = f"{folder}/own_actor_rewards.py:9"
    kept = folder / "logs" / "reward-0.0.failures.txt"
    assert "failed for 13 samples of 4 prompts or more at the same place and has never succeeded" in sentence
    assert f"never succeeded: RuntimeError: no ({place})" in sentence
    assert said.count(f"failed: RuntimeError: no ({place}); full traceback: {kept}") == 1
    assert kept.read_text().count("Traceback (most recent call last)") == 1


def test_failures_of_a_guest_or_after_a_score_do_not_end_the_actor_and_the_output_file_is_named(folder):
    """A guest sent rows of its own, before any sample of the job was scored."""
    (folder / "own_actor_rewards.py").write_text(USER_MODULE.replace("return row", "print(completion)\n    return row"))
    with ring_of(folder) as ring, guest_of(ring) as guest:
        for uid in range(12):
            guest.send("reward-0.0", replace(trajectory(uid, "odd"), generator=GUEST, row="{}"))
        assert [ring.next(m.Scored).status for _ in range(12)] == ["error"] * 12
        ring.score(trajectory(1, "fine"), *(trajectory(uid, "raises") for uid in range(2, 12)))
        assert [ring.next(m.Scored).status for _ in range(11)] == ["value"] + ["error"] * 10
        assert ring.stop() == 0
        said = ring.process.stderr.read().decode()
    prints = folder / "logs" / "reward-0.0.out.txt"
    assert f"goes to {prints}" in said
    assert prints.read_text().splitlines() == ["odd"] * 12 + ["fine"]
