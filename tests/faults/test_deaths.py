"""One run in which each kind of actor is killed once, and the checks of its journal. Real processes."""

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.ring import SPAWN, Fault, Ring
from tools import run as runs
from tools.audit.audit import audit
from tools.breakdown.incarnations import read_all
from tools.report.facts.run_facts import read_facts
from tools.report.facts.token_account import fate_rows

pytestmark = pytest.mark.slow

HEARTBEAT_S = 0.5  # as in ring.toml
SLACK_S = 1.5  # that a loaded machine takes to see what is due
REISSUED_S = 5.0
PUSH_TIMEOUT_S = 60.0  # far above any wait that a test expects
AT_ONCE_S = 20.0  # a loaded machine takes its time
STEPS = 10
SETTINGS = (
    f"run.total_train_steps={STEPS}",
    f"weights.timeout_s={PUSH_TIMEOUT_S}",
    "weights.route=gloo",  # its members meet
)


@dataclass(frozen=True)
class Deaths:
    """The run, with victims and times."""

    ring: Ring
    sampling: Fault  # generator-0, in mid-rollout
    worker: Fault  # a worker process of the reward, in mid-score
    reward: Fault
    idle: Fault  # generator-1
    stopped: tuple[float, float]  # the learner stood still
    memory: tuple[int, int]  # bytes of head and reward at the beginning and end of that time
    assembling: Fault  # generator-0, which had come to a push whose members were still to connect
    learner: Fault
    head: Fault


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    ring = Ring(tmp_path_factory.mktemp("deaths"), *SETTINGS, *SPAWN)
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for_version(2, "generator-0.0", "generator-1.0")
        sampling = kill_in_mid_rollout(ring, "generator-0")
        ring.wait_for("lease", after=sampling.t, holder="generator-1.0")
        ring.throttle(None)
        worker, reward = kill_in_mid_score(ring)
        idle = kill_idle(ring, "generator-1")
        stopped, memory = stop_learner(ring, idle)
        ring.wait_for("member", name=idle.next, state="healthy")
        ring.set_failpoint("receive-ready", "kill", who="generator-0")
        ring.hold_learner(5)
        assembling = ring.wait_for_failpoint("receive-ready")
        ring.wait_for("member", name=assembling.next, state="healthy")
        ring.wait_for("update", version=5)
        ring.wait_for("checkpoint", role="learner", step=4)
        learner = ring.kill("learner-0")
        ring.hold_learner(7)
        ring.wait_for("update", version=7, after=learner.t)
        head = ring.kill("head-0")
        ring.hold_learner(None)
        ring.finish()
        ring.check_survived()
        yield Deaths(ring, sampling, worker, reward, idle, stopped, memory, assembling, learner, head)


def kill_in_mid_rollout(ring: Ring, who: str) -> Fault:
    """Kill it while it has unfinished samples."""
    ring.throttle(0.3)  # a step takes far longer than to see that it samples, and to kill it
    ring.hold_learner(3)
    ring.wait_until(lambda: n_under_way(ring, who) > 1, f"{who} samples")
    return ring.kill(who)


def n_under_way(ring: Ring, who: str) -> int:
    """Its unfinished samples."""
    begun, ended = (
        {(x.get("evaluation", ""), x["uid"], x["sample"], x["attempt"]) for x in lines}
        for lines in (ring.lines(event, role="generator", rank=int(who[-1])) for event in ("request", "completion"))
    )
    return len(begun - ended)


def kill_in_mid_score(ring: Ring) -> tuple[Fault, Fault]:
    """A worker process of the reward while it scores, then the reward while its next worker does."""
    ring.set_failpoint("score", "sleep")
    worker = ring.wait_for_failpoint("score")
    ring.set_failpoint("score", "sleep")
    ring.kill_process(worker.pid)
    ring.wait_for_failpoint("score", after=worker.t)
    return worker, ring.kill("reward-0")


def is_quiet(ring: Ring) -> bool:
    """All admitted prompts are scored, so no generator has work."""
    admitted = {line["uid"] for line in ring.lines("admit", role="head")}
    return admitted == {line["uid"] for line in ring.lines("ready", "refund", role="head")}


def kill_idle(ring: Ring, who: str) -> Fault:
    ring.wait_until(lambda: is_quiet(ring), "every prompt is scored while the learner is held")
    return ring.kill(who)


def stop_learner(ring: Ring, idle: Fault) -> tuple[tuple[float, float], tuple[int, int]]:
    """Stop it until a restarted generator has waited for its weights for a second."""
    began = ring.kill("learner-0", signal.SIGSTOP)
    before = ring.memory("head-0") + ring.memory("reward-0")
    stale = ring.wait_for("member", name=idle.next, state="stale")["t"]
    ring.wait_for("spans", role="head", after=stale + 1.0)
    after = ring.memory("head-0") + ring.memory("reward-0")
    return (began.t, ring.kill("learner-0", signal.SIGCONT).t), (before, after)


def lives(ring: Ring, role: str) -> list[str]:
    return [path.stem for path in runs.Run(ring.run).journals(role)]


def test_row_01_kill_generator_idle(deaths: Deaths) -> None:
    """Detected within three heartbeats. It holds no prompt, so none is leased again, and the ring continues."""
    ring, fault = deaths.ring, deaths.idle
    dead = ring.lines("member", "joined", role="head", after=fault.t)[0]
    assert (dead["name"], dead.get("state")) == (fault.name, "dead")
    assert dead["t"] - fault.t <= 3 * HEARTBEAT_S + SLACK_S
    assert not [line for line in ring.lines("lease", after=fault.t) if line["holder"] == fault.name]
    mine = {line["uid"] for line in ring.lines("lease", holder=fault.name)}
    again = [x for x in ring.lines("lease", after=fault.t) if x["uid"] in mine and x["t"] < deaths.learner.t]
    assert again == []
    assert ring.lines("update", after=fault.t)


def test_row_02_kill_generator_in_mid_rollout(deaths: Deaths) -> None:
    """Its prompts are leased to the other generator within 5 s as the next attempt; groups are whole (I8)."""
    ring, fault = deaths.ring, deaths.sampling
    begun = {(x["uid"], x["sample"]) for x in own(ring, fault, "request")}
    ended = {(x["uid"], x["sample"]) for x in own(ring, fault, "completion")}
    assert begun - ended
    leases = ring.lines("lease", role="head", after=fault.t)
    for uid in {uid for uid, _ in begun - ended}:
        (first,) = ring.lines("lease", uid=uid, holder=fault.name)
        second = next(x for x in leases if x["uid"] == uid)
        assert (second["holder"], second["attempt"]) == ("generator-1.0", first["attempt"] + 1)
        assert second["t"] - fault.t < REISSUED_S
    (dead,) = ring.lines("member", name=fault.name, state="dead")
    assert dead["t"] - fault.t <= 3 * HEARTBEAT_S + SLACK_S


def own(ring: Ring, fault: Fault, event: str) -> list[runs.Line]:
    return list(runs.lines(ring.run / "journal" / f"{fault.name}.jsonl", event))


def test_row_03_a_push_whose_member_dies_while_it_assembles_waits_for_no_deadline(deaths: Deaths) -> None:
    ring, fault = deaths.ring, deaths.assembling
    began = [line for line in ring.lines("push", role="head") if line["t"] < fault.t][-1]
    gave_up = next(x for x in ring.lines("push_broken", role="head") if x["name"] == "learner-0.0" and x["t"] > fault.t)
    assert gave_up["push"] == began["push"]
    assert gave_up["t"] - fault.t < AT_ONCE_S < PUSH_TIMEOUT_S
    assert re.search("cancelled here|reset by peer", gave_up["error"]), "by whichever it notices first"
    published = next(x for x in ring.lines("publish", role="head") if x["t"] > fault.t)
    assert published["t"] - fault.t < AT_ONCE_S
    other = ring.lines("member", role="head", name=deaths.idle.next, state="healthy", after=gave_up["t"])
    assert other[0]["t"] - fault.t < AT_ONCE_S, "the other one is caught up at once"


def test_row_05_kill_reward_worker_in_mid_score(deaths: Deaths) -> None:
    """Another worker scores it: all verdicts are values, and none is 0."""
    ring = deaths.ring
    assert deaths.worker.pid != deaths.reward.pid
    assert lives(ring, "reward") == ["reward-0.0", "reward-0.1"]
    assert {line["status"] for line in ring.lines("scored")} == {"value"}
    assert min(line["reward"] for line in ring.lines("scored")) > 0
    assert ring.lines("score", role="reward", inc=1)
    assert not [line for line in ring.lines("refund") if line["reason"].startswith("reward")]


def test_row_09_kill_learner_after_a_checkpoint(deaths: Deaths) -> None:
    """A new term continues from the checkpoint, and later work is trained again, once."""
    ring, fault = deaths.ring, deaths.learner
    term = next(line for line in ring.lines("term") if line["t"] > fault.t)
    assert (term["term"], term["version"]) == (1, 4)
    again = [line["version"] for line in ring.lines("update", after=fault.t)]
    assert again[:3] == [5, 6, 7]


def test_row_12_kill_head(deaths: Deaths) -> None:
    """The next head continues at the learner's version; the other actors join it unchanged, unnoticed by mpirun."""
    ring, fault = deaths.ring, deaths.head
    assert lives(ring, "head") == ["head-0.0", "head-0.1"]
    joined = {line["name"] for line in ring.lines("joined", role="head", inc=1)}
    assert {"generator-0.2", "generator-1.1", "reward-0.1", "learner-0.1"} <= joined
    term = ring.lines("term", role="head", inc=1)[0]
    assert (term["version"], term["lives_on"]) == (7, True)
    assert term["term"] > max(line["term"] for line in ring.lines("term", inc=0))
    assert json.loads((ring.run / "summary.json").read_text())["code"] == 0
    assert ring.codes == [0]
    assert ring.lines("update", after=fault.t)[-1]["version"] == STEPS


def test_row_23_a_generator_that_comes_back_is_stale_until_a_push(deaths: Deaths) -> None:
    """It loads, joins and sends heartbeats, and gets no work before it holds the published version."""
    ring, name = deaths.ring, deaths.idle.next
    states = [(line["state"], line["t"]) for line in ring.lines("member", name=name)]
    assert [state for state, _ in states[:2]] == ["stale", "healthy"]
    (_, stale), (_, healthy) = states[:2]
    assert healthy - stale >= 1.0
    assert healthy > deaths.stopped[1]
    assert ring.lines("lease", holder=name)[0]["t"] > healthy


def test_row_41_stop_learner_for_a_while(deaths: Deaths) -> None:
    """It is not considered dead, nothing is admitted beyond the credits, and it continues by itself."""
    ring, (began, ended) = deaths.ring, deaths.stopped
    assert ended - began > 3 * HEARTBEAT_S
    silent = [x for x in ring.lines("member", state="dead") if x["name"].startswith("learner") and x["t"] <= ended]
    assert not silent
    meanwhile = [line for line in ring.lines("update") if began < line["t"] < ended]
    assert not meanwhile
    assert deaths.memory[1] - deaths.memory[0] < 8 << 20
    assert ring.lines("update", after=ended)


def test_every_token_and_second_of_sampling_has_one_fate_after_all_these_deaths(deaths: Deaths) -> None:
    """I12: the table of the report adds up to the completions and the labels of all generators, and is the audit's."""
    where = runs.Run(deaths.ring.run)
    rows = {row.fate: row for row in fate_rows(read_facts(where).samples)}
    finished, continued, n_tokens = dict[tuple[int, int], int](), dict[tuple[int, int, int], int](), 0
    for line in where.events("request", "completion", role="generator"):
        if line.get("evaluation"):
            n_tokens += line.get("n_tokens", 0)
        elif line["event"] == "request":
            continued[line["uid"], line["sample"], line["attempt"]] = line.get("n_done", 0)
        else:
            sample = line["uid"], line["sample"]
            n_tokens += line["n_tokens"] - min(continued[*sample, line["attempt"]], finished.get(sample, 0))
            finished[sample] = line["n_tokens"]
    assert sum(row.n_tokens for row in rows.values()) == n_tokens
    labelled_s = sum(actor.spans.get("generate", 0.0) for actor in read_all(where) if actor.role == "generator")
    assert sum(row.seconds for row in rows.values()) == pytest.approx(labelled_s)
    head = audit(where).head
    assert head is not None
    in_batches = (head.batches.n_trained, head.batches.n_masked, head.batches.n_skipped)
    assert tuple(rows[fate].n_tokens for fate in ("trained", "masked", "without signal")) == in_batches
    assert rows["never finished"].n_samples > 0
    assert rows["undone"].n_tokens > 0
