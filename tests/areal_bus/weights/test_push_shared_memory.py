"""Pushes that are copied out of the root's memory, over real processes: on CPU, by the code that a GPU runs, too."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from loguru import logger

from actors.learner.actor import Learner
from actors.learner.model.policy import Policy
from actors.runtime.context import Context
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import shared_memory
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.protocol import Announcement, PushGo, arrivals
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.route import Route
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.shared_memory import Handle, open_memory, refusal
from areal_bus.weights.snapshot import Snapshot, digest_of, take_snapshot
from tests.areal_bus.weights.member_process import shut
from tests.areal_bus.weights.peer_process import Peer
from tests.areal_bus.weights.test_push import Ring, holds, weights
from tests.support.listening import listeners
from tests.support.polling import wait_until

CPU = torch.device("cpu")
BUCKET = 1 << 16


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    torch.set_num_threads(1)
    ring = Ring()
    ring.root = WeightSender(ring.store, interface="lo", address="127.0.0.1", route="shared")
    yield ring
    ring.root.close()
    ends = {name: peer.end() for name, peer in ring.peers.items()}
    whole = [(code, said.splitlines()) for code, said in ends.values() if code != -signal.SIGKILL]
    assert {code for code, _ in whole} <= {0}
    other = [line for _, said in whole for line in said if "weights come over gloo" not in line]
    assert not other, "members end without a word"


def snapshot(version: int, *, previous: Snapshot | None = None, shared_on: torch.device | None = CPU) -> Snapshot:
    taken = take_snapshot(version, weights(version), bucket_bytes=BUCKET, previous=previous, shared_on=shared_on)
    assert taken is not None
    return taken


def copied(ring: Ring) -> bool:
    """Whether the root said so in the last push."""
    return PushGo.decode(ring.store.get(f"push/{ring.n_pushes}/go").decode()).copies


def handle(ring: Ring) -> Handle:
    """Of the memory that the root offered in the last push."""
    offer = Announcement.decode(ring.store.get(f"push/{ring.n_pushes}/announce").decode()).offer
    assert offer is not None
    return offer.handle


def maps_weights(peer: Peer) -> bool:
    return "memfd:areal-bus-weights" in Path(f"/proc/{peer.process.pid}/maps").read_text(encoding="utf-8")


def wait_until_stopped(peer: Peer) -> None:
    stat = Path(f"/proc/{peer.process.pid}/stat")
    wait_until(lambda: stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T")


@pytest.fixture
def auto(ring: Ring) -> Iterator[WeightSender]:
    root = WeightSender(ring.store, interface="lo", address="127.0.0.1", route="auto")
    yield root
    root.close()


@pytest.mark.slow
def test_members_hold_the_roots_bits_and_the_next_push_reuses_their_memory(ring: Ring) -> None:
    peers = ring.members("generator-0.0", "generator-1.0")
    sent, handles = None, []
    for version in (1, 2, 3):
        sent = snapshot(version, previous=sent)
        for answer in ring.push(sent, *peers, view=100, reuse=version == 3):
            assert holds(answer, sent)
            assert answer["reused"] == (version == 3)
        assert copied(ring)
        handles.append(handle(ring))
    assert ring.store.add("groups", 0) == 0, "nobody met in a group"
    assert "device" not in vars(ring.root._listener), "and gloo listens nowhere"
    assert not listeners(peer.process.pid for peer in peers)
    gone = [f"push/{ring.n_pushes - 1}/{name}" for name in ("announce", "go", "end", "ready", "report", "report/all")]
    assert not any(ring.store.check([key]) for key in gone), "words of the push before are forgotten"
    assert handles[1:] == handles[:1] * 2, "one memory, shared once"


def test_auto_sends_where_a_member_finds_the_memory_shut(ring: Ring, auto: WeightSender) -> None:
    """As where /proc is hidden: pushes with that member go by gloo and arrive, those without are copied."""
    peers = ring.members("generator-0.0", "generator-1.0")
    for version, is_shut in ((21, True), (22, True), (23, False)):
        sent = snapshot(version)
        assert {answer["held"] for answer in ring.push(sent, *peers, root=auto, shut=is_shut)} == {sent.digest}
        assert copied(ring) != is_shut


def test_a_view_whose_pushes_go_one_way_and_the_other_keeps_its_group(ring: Ring, auto: WeightSender) -> None:
    (peer,), n_before = ring.members("generator-0.0"), ring.store.add("groups", 0)
    for version, shared_on in ((31, None), (32, CPU), (33, None), (34, CPU)):
        sent = snapshot(version, shared_on=shared_on)
        assert ring.push(sent, peer, root=auto, view=400)[0]["held"] == sent.digest
        assert copied(ring) == (shared_on is CPU)
    assert ring.store.add("groups", 0) == n_before + 1


def test_a_push_that_is_given_up_while_the_last_bytes_are_copied_is_not_reported(ring: Ring) -> None:
    """Its member looks once more before it says that it is done."""
    (peer,) = ring.members("generator-1.0")
    sent = large(35)
    order = ring.begin(sent, peer.name)
    peer.order(order, signal_at=[15, signal.SIGSTOP])
    thread, outcome = ring.push_in_thread(sent, order)
    wait_until_stopped(peer)
    ring.root.cancel(order.push)
    thread.join(30)
    assert "was cancelled here" in outcome[0]
    peer.process.send_signal(signal.SIGCONT)
    assert "version 35 was aborted" in peer.answer()["error"]
    assert arrivals(ring.store, order, "report") == []


def test_where_it_must_be_shared_a_member_that_finds_it_shut_is_named(ring: Ring) -> None:
    (peer,) = ring.members("generator-0.0")
    sent = snapshot(24)
    order = ring.begin(sent, peer.name)
    peer.order(order, shut=True)
    with pytest.raises(
        PushFailed, match=r"and generator-0.0 \(cpu of .*cannot open the shared memory of learner 0.*elsewhere"
    ):
        ring.root.push(sent, order)
    assert "elsewhere" in peer.answer()["error"]


def test_a_member_that_cannot_open_shared_memory_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, endpoint = serve_store("127.0.0.1")
    root = WeightSender(store, interface="lo", address="127.0.0.1", route="auto")
    one, said = WeightReceiver("generator-0.0", interface="lo", address="127.0.0.1"), list[str]()
    monkeypatch.setattr(shared_memory, "_open_host", shut)
    sink = logger.add(lambda line: said.append(str(line)), level="WARNING", format="{message}")
    for number in (1, 2):
        order, sent = PushBegin(number, number, 0, [one.name], endpoint, 120.0), snapshot(number)
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(one.receive, order)
            root.push(sent, order)
            assert received.result(60)[1] == sent.digest
    logger.remove(sink)
    assert len(said) == 1
    assert "generator-0.0: cannot use shared memory, so weights come over gloo: cannot open" in said[0]
    root.close()
    one.close()


def test_a_system_that_refuses_such_memory_is_asked_before_the_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(1 << 40) == "", "it takes no room"
    assert learner_of("auto")._shared_on() == CPU
    assert learner_of("gloo")._shared_on() is None
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "Operation not permitted" in refusal(5)
    assert learner_of("auto")._shared_on() is None, "it is sent"
    with pytest.raises(ConfigError, match=r'"shared" needs memory that others can open: .*not permitted; set "gloo"'):
        learner_of("shared")._shared_on()


def learner_of(route: Route) -> Learner:
    """As much of one as settles where its snapshots lie."""
    learner, policy = Learner.__new__(Learner), Policy.__new__(Policy)
    sections = {"model": {"scratch": {}}, "data": {"task": "sums"}, "weights": {"route": route}}
    learner.config, learner.is_root, learner.policy = Config.model_validate(sections), True, policy
    learner.context = Context("learner", 0, 0, 0, "j", "", "127.0.0.1", "lo", "cpu", 1, 1, 1, "", "", "")
    policy.model, policy.device, policy.dtype = torch.nn.Linear(2, 2), CPU, torch.bfloat16
    policy._parameters = dict(policy.model.named_parameters())
    policy._base, policy.adapters = {}, None
    return learner


def refuse(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def large(version: int, previous: Snapshot | None = None) -> Snapshot:
    """16 buckets of one tensor."""
    values = torch.full((4 << 20,), float(version))
    taken = take_snapshot(version, {"w": values}, bucket_bytes=1 << 20, previous=previous, shared_on=CPU)
    assert taken is not None
    return taken


def test_a_member_killed_while_it_copies_fails_the_push_at_once_and_a_new_view_of_the_others_works(ring: Ring) -> None:
    (survivor,) = ring.members("generator-0.0")
    (dying,) = ring.members("generator-3.0")
    sent = large(7)
    order = ring.begin(sent, survivor.name, dying.name, timeout_s=120)
    survivor.order(order)
    dying.order(order, signal_at=[3, signal.SIGKILL])
    began = time.monotonic()
    with pytest.raises(PushFailed, match=r"version 7 must be reported by each member: generator-3.0 ended before"):
        ring.root.push(sent, order)
    answer = survivor.answer()
    assert answer.get("held") == sent.digest or "version 7" in answer["error"], "done before, or told to end"
    assert time.monotonic() - began < 60, "long before the deadline"
    assert dying.process.wait(10) == -signal.SIGKILL

    assert ring.push(sent, survivor)[0]["held"] == sent.digest


def test_a_late_member_of_memory_that_holds_another_version_finds_wrong_checksums(ring: Ring) -> None:
    """It has heard nothing: its half-way copy of two versions is told by its bytes alone."""
    (late,) = ring.members("generator-1.0")
    sent = large(8)
    order = ring.begin(sent, late.name)
    late.order(order, signal_at=[5, signal.SIGSTOP])
    thread, outcome = ring.push_in_thread(sent, order)
    wait_until_stopped(late)
    sent.data.view(torch.float32).fill_(9.0)
    late.process.send_signal(signal.SIGCONT)
    thread.join(30)
    assert outcome == [""], "as with bytes that arrive wrong: the others' push is complete"
    assert "checksum mismatch in 1 of 1 tensors" in late.answer()["error"]


@pytest.mark.slow
def test_a_member_that_stands_still_costs_a_push_and_the_memory_serves_the_next_meanwhile(ring: Ring) -> None:
    """A push under way keeps its snapshot; one that is given up does not, whoever still copies."""
    (peer,) = ring.members("generator-0.0")
    (still,) = ring.members("generator-1.0")
    sent = large(10)
    order = ring.begin(sent, still.name, timeout_s=3.0)
    still.order(order, signal_at=[5, signal.SIGSTOP])
    thread, outcome = ring.push_in_thread(sent, order)
    wait_until_stopped(still)
    thread.join(30)
    assert "is not complete after 3 s; it waits for the members' reports: generator-1.0" in outcome[0]

    where = sent.data.data_ptr()
    following = large(11, previous=sent)
    assert following.data.data_ptr() == where
    assert ring.push(following, peer)[0]["held"] == following.digest

    still.process.send_signal(signal.SIGCONT)
    assert "version 10" in still.answer()["error"], "it keeps nothing of the mixture"
    assert ring.push(following, still)[0]["held"] == following.digest


def test_a_member_lets_go_of_the_memory_when_the_push_is_over(ring: Ring) -> None:
    (peer,) = ring.members("generator-0.0")
    sent = large(12)
    ring.push(sent, peer)
    assert not maps_weights(peer)
    opens = handle(ring)
    assert opens["pid"] == os.getpid()
    assert torch.equal(open_memory(opens, sent.n_bytes, CPU).data, sent.data)


@pytest.mark.gpu
def test_a_push_within_one_gpu(ring: Ring, auto: WeightSender) -> None:
    device = torch.device("cuda", 0)
    peers = [
        Peer(f"generator-{n}.0", "tests.areal_bus.weights.member_process", f"generator-{n}.0", "cuda:0") for n in (6, 7)
    ]
    for peer in peers:
        peer.answer()
    previous = None
    for version in (1, 2, 3):
        parameters = {name: tensor.to(device) for name, tensor in weights(version).items()}
        parameters["lm_head"] = parameters["embedding"]  # tied there, too
        sent = take_snapshot(version, parameters, bucket_bytes=BUCKET, previous=previous, shared_on=device)
        assert sent is not None
        assert sent.digest == digest_of(weights(version)), "the checksum of the device is that of the host"
        answers = ring.push(sent, *peers, root=auto, view=200, reuse=True)
        assert {answer["held"] for answer in answers} == {sent.digest}
        assert copied(ring)
        previous = sent
    for peer in peers:
        assert peer.end()[0] == 0
