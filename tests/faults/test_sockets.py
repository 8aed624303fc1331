"""Rows 14, 18 and 20 over TCP through a proxy: production head, bus and wire; all invariants are checked.

Messages are lost only with their connection; on a live connection they are late but in order.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.messages import Prompt
from areal_bus.transport.bus import Bus
from areal_lab.staleness.simulator.scenario import ScenarioLengths, Tail
from tests.faults.proxy import Proxy
from tests.faults.simulated import lines, scenario, when
from tests.faults.wired import WiredRing

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = "generator-0.0"
LEASE_S = 20.0  # half a second of this machine
DEATH_S = LEASE_S - 7.0  # since the last heartbeat, which came before
LONG = ScenarioLengths(Tail.UNIFORM, 12.0, 0.0, 60)


def wired(seed: int = 1, **changes: Any) -> WiredRing:
    standard: dict[str, Any] = {"silent_s": LEASE_S, "calm_s": 100.0, "patience_s": 600.0, "lengths": LONG}
    return WiredRing(scenario(seed, **(standard | changes)))


def often(ring: WiredRing, first_s: float, every_s: float, times: int, act: Callable[[], object]) -> None:
    """Something happens again and again, as long as the ring turns."""

    def again(left: int) -> None:
        if ring.end is None and left:
            act()
            ring.world.at(ring.world.now + every_s, again, left - 1)

    ring.world.at(first_s, again, times)


WHO = ["generator-0", "reward-0", "learner-0"]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["generator-0", *(pytest.param(x, marks=pytest.mark.soak) for x in WHO[1:])])
@pytest.mark.parametrize("silently", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_row_14_a_message_lost_with_its_connection_is_made_good(who: str, silently: bool) -> None:
    """All connections of one member to the head are cut again and again, with what is under way in them.

    eta = 0: a single prompt, share or push that is lost for good would hold up everybody.
    """
    with wired(eta=0, total_steps=5, n_generators=2) as ring:
        proxy = ring.world.between(f"{who}.0", "head")
        n_cut: list[int] = []
        often(ring, 14.0, 17.0, 6, lambda: n_cut.append(proxy.cut(silently=silently)))
        ring.survive()
        assert sum(n_cut) >= 3
        if who != "learner-0":
            assert lines(ring, Event.MEMBER, name=f"{who}.0", why="its connection is gone")
            assert lines(ring, Event.MEMBER, name=f"{who}.0", why="heard again")
        else:  # it cannot forget: it comes back from its checkpoint
            assert lines(ring, Event.TERM)[-1]["term"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("to_head", [pytest.param(True, marks=pytest.mark.soak), False])
def test_row_18_a_black_hole_one_way_fences_the_member(to_head: bool) -> None:
    """The connection stands, and nothing comes through one way: both sides' heartbeats tell."""
    with wired(total_steps=10, capacity=2) as ring:
        proxy = ring.world.between(GENERATOR, "head")
        ring.world.at(14.0, setattr, proxy.up if to_head else proxy.down, "is_open", False)
        ring.world.at(100.0, proxy.heal)
        ring.survive()
        why = f"silent for {LEASE_S:g} s" if to_head else "it does not hear the head"
        out = when(ring, Event.MEMBER, name=GENERATOR, state="dead", why=why)
        assert DEATH_S < out - 14.0 < 60.0
        leases = [x.fields for at_s, x in ring.records or () if x.event is Event.LEASE and out <= at_s < 100.0]
        assert {line["holder"] for line in leases} == {"generator-1.0"}
        assert held_at(ring, out) <= {line["uid"] for line in leases}
        assert lines(ring, Event.MEMBER, name=GENERATOR, why="heard again")


def held_at(ring: WiredRing, moment: float) -> set[int]:
    """Prompts of generator 0 that had no verdict yet."""
    holders: dict[int, str] = {}
    for at_s, record in ring.records or ():
        if at_s < moment and record.event is Event.LEASE:
            holders[record.fields["uid"]] = record.fields["holder"]
        elif at_s < moment and record.event in (Event.READY, Event.REFUND):
            holders.pop(record.fields["uid"], None)
    return {uid for uid, holder in holders.items() if holder == GENERATOR}


@pytest.mark.soak
def test_row_20_a_slow_link_delays_only_its_own_member() -> None:
    """2 KB a second to one of three generators, heartbeats included: it never gets more than it has slots (I9)."""
    with wired(total_steps=10, n_generators=3, capacity=2) as ring:
        proxy = ring.world.between(GENERATOR, "head")
        ring.world.at(14.0, setattr, proxy.down, "bytes_per_s", 2000.0)
        ring.survive()
        assert ring.head.state.gate.u == 10
        assert ring.witness.n_checks["I9"] >= len(lines(ring, Event.LEASE)) > 0
        assert ring.world.buses["head"].send_queues.undelivered.total() == 0


READER = """
import sys
from areal_bus.transport.bus import BusOptions
from tests.support.strangers import OpenBus
head = OpenBus("head", job="job", listen="tcp://127.0.0.1:0", options=BusOptions(inbox_bytes=1 << 20))
print(head.endpoint, flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[1])):
    assert head.receive()[1].uid == number
print("all", flush=True)
sys.stdin.readline()
"""


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.slow
def test_row_20_a_slow_reader_stops_its_sender_and_its_memory_is_flat() -> None:
    """96 MiB are sent to one that takes nothing: its inbox and what ZeroMQ reads ahead fill, the rest waits (I9)."""
    n, text = 1536, "x" * (1 << 16)
    words = [sys.executable, "-c", READER, str(n)]
    reader = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert reader.stdout is not None
    proxy = Proxy(reader.stdout.readline().strip())
    actor = Bus("generator-0.0", job="job")
    try:
        before = rss_mib(reader.pid)
        actor.connect("head", proxy.endpoint)
        for number in range(n):
            actor.send("head", Prompt(number, 0, 0, [0], "", text))
        stands_still(lambda: proxy.up.n_bytes)
        assert proxy.up.n_bytes < n * len(text) / 2
        assert rss_mib(reader.pid) - before < 32
        reader.stdin.write("go on\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "all\n"
        assert proxy.up.n_bytes > n * len(text)
        assert rss_mib(reader.pid) - before < 32
    finally:
        reader.kill()
        reader.communicate()
        actor.close(0.0)
        proxy.close()


def stands_still(value: Callable[[], int], for_s: float = 1.0) -> None:
    """Wait until something that was on its way has not moved for a while."""
    deadline, since, last = time.monotonic() + 30.0, time.monotonic(), -1
    while time.monotonic() - since < for_s:
        assert time.monotonic() < deadline
        if (now := value()) != last or not now:
            last, since = now, time.monotonic()
        time.sleep(0.02)
