"""Delivers trajectories to rewards, and keeps each until the head acknowledges it. Pure.

A lost or unacknowledged one is sent again: the head takes each sample once (I4). A full reward's ones wait here (I9).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areal_bus.messages import Partial, PeerList, Trajectory
from areal_bus.transport.send_queue import ROOM_BYTES

COALESCE_S = 0.25  # longest time that a new trajectory waits for others to be sent with it

Key = tuple[str, int, int, int]  # evaluation, uid, attempt, sample
Group = tuple[str, int, int]  # evaluation, uid, attempt


@dataclass(slots=True)
class PendingTrajectory:
    """One unacknowledged trajectory, the reward it was last sent to, and the number of sends."""

    trajectory: Trajectory
    reward: str = ""  # "": no reward holds it
    n_sent: int = 0
    resend_at: float = 0.0


class Delivery:
    """Trajectories that the head has not acknowledged."""

    def __init__(self, resend_s: float, *, gather: int = 1) -> None:
        """`gather`: new trajectories that are sent together, when the caller asks `should_wait`."""
        self._resend_s, self._gather = resend_s, gather
        self._waits_since: float | None = None
        self._rewards: dict[str, str] = {}  # name -> endpoint
        self._pending: dict[Key, PendingTrajectory] = {}

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    def update_rewards(self, message: PeerList) -> tuple[dict[str, str], list[str]]:
        """Rewards to connect to (name -> endpoint) and names to disconnect."""
        listed = dict(zip(message.names, message.endpoints, strict=True))
        now = {name: endpoint for name, endpoint in listed.items() if name.startswith("reward-")}
        new = {name: endpoint for name, endpoint in now.items() if self._rewards.get(name) != endpoint}
        gone = [name for name in self._rewards if name not in now]
        self._rewards = now
        for kept in self._pending.values():
            if kept.reward and (kept.reward in new or kept.reward not in now):
                kept.reward, kept.resend_at = "", 0.0  # its reward is gone
        return new, gone

    def add(self, trajectory: Trajectory) -> None:
        t = trajectory
        self._pending[t.evaluation, t.uid, t.attempt, t.sample] = PendingTrajectory(t)

    def should_wait(self, now: float) -> bool:
        """Whether new trajectories wait for more: each send wakes every process on its way (docs/design.md)."""
        n_new = sum(not kept.n_sent for kept in self._pending.values())
        if n_new == 0:
            return False
        if self._waits_since is None:
            self._waits_since = now
        return n_new < self._gather and now < self._waits_since + COALESCE_S

    def due(self, now: float, n_waiting: Callable[[str], int]) -> Iterator[tuple[str, Trajectory, bool]]:
        """Yields (reward, trajectory, first send): send each at once. `n_waiting`: bytes in a reward's send queue."""
        self._waits_since = None
        names = sorted(self._rewards)
        idle = {name for name in names if not n_waiting(name)}
        for kept in self._pending.values():
            if kept.n_sent and now < kept.resend_at:
                continue
            first = (kept.trajectory.uid + kept.n_sent) % len(names) if names else 0
            for name in names[first:] + names[:first]:
                # resend only to an idle reward: behind queued data the copy would wait as the original does
                if name in idle if kept.reward else n_waiting(name) < ROOM_BYTES:
                    kept.reward = name
                    kept.n_sent += 1
                    kept.resend_at = now + self._resend_s
                    yield name, kept.trajectory, kept.n_sent == 1
                    break

    def ack(self, key: Key) -> bool:
        """The head has the trajectory, or does not want it. Returns whether this generator held it."""
        return self._pending.pop(key, None) is not None

    def drop(self, evaluation: str, uid: int, attempt: int) -> None:
        for key in [key for key in self._pending if key[:3] == (evaluation, uid, attempt)]:
            del self._pending[key]

    def as_partials(self) -> Iterator[Partial]:
        """Single-turn training samples as partial rollouts without their last token, for another generator."""
        for kept in self._pending.values():
            t = kept.trajectory
            if t.evaluation or len(t.segments) != 1 or t.segments[0][1] < 2:
                continue
            (n_given, n_sampled), (version, n_last) = t.segments[0], t.spans[-1]
            spans = [*t.spans[:-1], [version, n_last - 1]] if n_last > 1 else t.spans[:-1]
            segments = [[n_given, n_sampled - 1]]
            yield Partial(t.uid, t.sample, t.attempt, t.term, segments, spans, t.ids[:-4], t.logps[:-4], t.lease)

    def drop_all(self) -> None:
        self._pending.clear()

    def lost(self, keeps: Callable[[int | None], bool]) -> set[Group]:
        """Groups with a trajectory whose tokens belong to a lost timeline."""
        return {key[:3] for key, kept in self._pending.items() if not keeps(kept.trajectory.spans[-1][0])}
