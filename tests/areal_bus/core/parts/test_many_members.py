"""A ring of 4,096 generators: the core decides, and the encoder takes every message that it sends."""

import time
from collections.abc import Iterable

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect, Send
from areal_bus.core.head import Head
from areal_bus.core.state import HeadState
from areal_bus.wire import codec
from areal_lab.staleness.simulator.scenario import Numbers
from tests.areal_bus.core.test_head import push_done, scenario

N_GENERATORS, N_REWARDS = 4096, 1024
JOB = "job-of-4096-generators"


class Encoder:
    """Counts the receivers of what a head sends, by type, and encodes the last message of each: lists only grow."""

    def __init__(self) -> None:
        self.receivers: dict[type, set[str]] = {}
        self._last: dict[type, m.Message] = {}

    def take(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._last[type(effect.message)] = effect.message
                self.receivers.setdefault(type(effect.message), set()).add(effect.to)

    def check(self) -> None:
        for message in self._last.values():
            assert codec.decode(codec.encode(message, job=JOB), job=JOB) == message


def join(head: Head, role: str, index: int) -> list[Effect]:
    name = f"{role}-{index}.0"
    endpoint = "" if role == "generator" else f"tcp://cluster-node-{index:04d}.example.org:{40000 + index % 20000}"
    host = f"cluster-node-{index:04d}.example.org"
    effects = head.on(name, m.Join(name, role, index, 0, endpoint, 1000 + index, host), 0.0)
    return [*effects, *head.on(name, m.Ready(4), 0.0)]


@pytest.mark.slow
def test_a_ring_of_4096_generators_is_sent_peer_list_push_eviction_and_stop() -> None:
    rules = scenario(n_generators=N_GENERATORS, n_rewards=N_REWARDS, batch_size=1, n_samples=1).rules
    head, encoder = Head(HeadState(rules, Numbers(None)), now=0.0), Encoder()
    generators = [f"generator-{index}.0" for index in range(N_GENERATORS)]
    for role, n in (("learner", 1), ("reward", N_REWARDS), ("generator", N_GENERATORS)):
        for index in range(n):
            encoder.take(join(head, role, index))
    assert len(encoder.receivers[m.PeerList]) == 1 + N_REWARDS + N_GENERATORS
    encoder.take(head.on("learner-0.0", m.BeginTerm(0, "digest 0", head.state.incarnation), 0.0))
    assert encoder.receivers[m.PushBegin] == {"learner-0.0", *generators}
    for name in ("learner-0.0", *generators):
        encoder.take(push_done(head, name, 0))
    assert head.state.gate.v == 0
    assert encoder.receivers[m.Prompt] <= set(generators)
    why = "it missed 3 pushes of its own in a row; the last error: " + "\u4e00" * 30_000
    head.lifecycle.part_with(generators[7], m.Evict(m_cut(why)), why)
    encoder.take(head.tick(time.monotonic(), until=0.0))
    assert encoder.receivers[m.Evict] == {generators[7]}
    head.phases.end(1, m_cut(why))
    encoder.take(head.tick(time.monotonic(), until=0.0))
    assert encoder.receivers[m.Stop] >= set(generators) - {generators[7]}
    encoder.check()


def m_cut(text: str) -> str:
    """As the encoder cuts it, so that what arrives can be compared."""
    return f"{text[:1997]}..."
