"""Row 42: samples are cancelled before new weights are swapped in."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from actors.engines.protocol import Completion, Request
from actors.generator.delivery import Delivery
from actors.generator.loop import Generator
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.generator.weight_updates import ReceivedWeights
from actors.runtime.context import HeartbeatState
from actors.runtime.head_session import ActorRuntime, HeadSession
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus import messages as m
from areal_bus.config.sections import Config
from areal_bus.storage.journal import Journal
from areal_lab.staleness.simulator.scenario import ScenarioLengths, Tail
from tests.faults.simulated import arrived, play, scenario


def test_row_42_no_token_is_sampled_for_groups_cancelled_before_a_swap() -> None:
    """Refunds cancel groups while others' weights arrive; nothing of those groups is sampled, swapped or sent on."""
    n_cancelled = 0
    for seed in range(6):
        one = scenario(
            seed, p_error=0.3, n_samples=3, total_steps=12, lengths=ScenarioLengths(Tail.PARETO, 3.0, 1.2, 300)
        )
        ring, outcome = play(one)
        assert not outcome.violations
        cancelled: dict[tuple[str, int, int], float] = {}
        for at_s, what, about in ring.world.story or ():
            sender, _, to = what.partition(" -> ")
            if isinstance(about, m.Cancel) and to.startswith("generator-"):
                cancelled[to, about.uid, about.attempt] = at_s + 2 * one.link_s  # what was under way then may come
            elif isinstance(about, m.Sampled | m.Trajectory):
                assert at_s <= cancelled.get((sender, about.uid, about.attempt), at_s)
        n_cancelled += len(cancelled)
        assert len(arrived(ring, m.PushBegin)) > 10
    assert n_cancelled > 20


class Mail:
    """A bus in memory: messages in, messages out."""

    name = "generator-0.0"

    def __init__(self) -> None:
        self.waiting: list[tuple[str, m.Message]] = []
        self.sent: list[m.Message] = []

    def receive(self, timeout_s: float | None = None) -> tuple[str, m.Message] | None:
        return self.waiting.pop(0) if self.waiting else None

    def send(self, to: str, message: m.Message) -> None:
        self.sent.append(message)

    def send_all(self, letters: Iterable[tuple[str, m.Message]]) -> None:
        self.sent.extend(message for _, message in letters)

    def n_waiting(self, peer: str) -> int:
        return 0


class Arrived:
    """Weights that are there at once."""

    def __init__(self) -> None:
        self._begun: list[m.PushBegin] = []

    def begin(self, begin: m.PushBegin) -> None:
        self._begun.append(begin)

    def take(self) -> ReceivedWeights | None:
        return ReceivedWeights(self._begun.pop(0), {}, "digest", 0.0) if self._begun else None

    def swapped(self, received: ReceivedWeights, spare: Mapping[str, Any]) -> None:
        """Keeps no tensors for the next push."""

    def drop(self) -> None:
        self._begun.clear()


class Diary:
    """An engine that logs its calls, and ends nothing by itself."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.n_tokens = 0
        self.live: list[tuple[str, int, int, int, int]] = []
        self.calls: list[str] = []

    @property
    def n_live(self) -> int:
        return len(self.live)

    def submit(self, request: Request) -> None:
        self.live.append(request.key)

    def check(self) -> None:
        """It has no server that could be gone."""

    def step(self) -> list[Completion]:
        self.calls.append(f"step {[key[1] for key in self.live]}")
        return []

    def abort(self, key: tuple[str, int, int, int, int]) -> Completion | None:
        self.live.remove(key)
        self.calls.append(f"abort {key[1]}")
        return None

    def newest(self, key: tuple[str, int, int, int, int]) -> int | None:
        return self.version

    def parameters(self) -> Mapping[str, Any]:
        return {}

    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        self.version = version
        self.calls.append(f"update {[key[1] for key in self.live]}")
        return {}


class Letters:
    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class Flow:
    def __init__(self, config: Config) -> None: ...

    async def episode(self, row: Row, ask: Ask) -> Episode:
        return Episode((await ask([65])).text)


def test_row_42_a_generator_cancels_before_it_swaps_and_swaps_before_it_decodes(tmp_path: Path) -> None:
    """In whichever order the words come: what is cancelled costs no prefill under the new weights."""
    told = {}
    for first in ("cancel", "push"):
        mail, engine, config = Mail(), Diary(), Config()
        diary = Journal(tmp_path / first, role="generator", index=0, incarnation=0)
        sampling = RolloutRunner(engine, Flow(config), Letters(), config, RolloutLog(mail.name, diary))
        presence = HeadSession(mail, silent_s=60.0)  # type: ignore[arg-type]
        runtime = ActorRuntime(mail, presence, diary, HeartbeatState())  # type: ignore[arg-type]
        generator = Generator(runtime, engine, sampling, Arrived(), Delivery(1.0))  # type: ignore[arg-type]
        mail.waiting += [("head", m.PushBegin(0, 1, 0, [mail.name], "store", 1.0))]
        mail.waiting += [("head", m.Prompt(uid, 0, 0, [0], "", "{}")) for uid in (7, 8)]
        generator.turn()
        words: list[m.Message] = [m.Cancel(7, 0), m.PushBegin(1, 2, 0, [mail.name], "store", 1.0)]
        mail.waiting += [("head", word) for word in (words if first == "cancel" else words[::-1])]
        generator.turn()
        told[first] = engine.calls
        assert [type(x) for x in mail.sent] == [m.PushDone, m.PushDone]
    assert told["cancel"] == told["push"] == ["update [7, 8]", "step [7, 8]", "abort 7", "update [8]", "step [8]"]
