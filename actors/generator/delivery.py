"""Which trajectory goes to which reward, and when again; a plain state machine that knows no socket and no clock.

A trajectory is kept from its last token until the head has its scored form. It is sent again when its reward is gone or
nobody has acknowledged it for a while: reward actors are stateless, and the head takes each sample once (I4). A reward
that does not take what is sent to it gets no more of it; it waits here, where it is kept anyhow (I9).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areal_bus.messages import Partial, PeerList, Trajectory
from areal_bus.transport.send_queue import ROOM_BYTES

GATHER_S = 0.25  # longest time that a new one waits for others to go along

Key = tuple[str, int, int, int]  # evaluation, uid, attempt, sample
Group = tuple[str, int, int]  # evaluation, uid, attempt


@dataclass(slots=True)
class PendingTrajectory:
    """One trajectory, whom it went to last, and how often."""

    trajectory: Trajectory
    reward: str = ""  # "": nobody has it
    n_sent: int = 0
    resend_at: float = 0.0


class Delivery:
    """Trajectories that the head has not acknowledged."""

    def __init__(self, resend_s: float, *, gather: int = 1) -> None:
        """So many new ones go at once, where the caller asks whether to wait for them."""
        self._resend_s, self._gather = resend_s, gather
        self._gathers_since: float | None = None
        self._rewards: dict[str, str] = {}  # name -> endpoint
        self._kept: dict[Key, PendingTrajectory] = {}

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    def directory(self, message: PeerList) -> tuple[dict[str, str], list[str]]:
        """Rewards to connect to (name -> endpoint), and names to let go."""
        listed = dict(zip(message.names, message.endpoints, strict=True))
        now = {name: endpoint for name, endpoint in listed.items() if name.startswith("reward-")}
        new = {name: endpoint for name, endpoint in now.items() if self._rewards.get(name) != endpoint}
        gone = [name for name in self._rewards if name not in now]
        self._rewards = now
        for kept in self._kept.values():
            if kept.reward and (kept.reward in new or kept.reward not in now):
                kept.reward, kept.resend_at = "", 0.0  # whoever had it is gone
        return new, gone

    def add(self, trajectory: Trajectory) -> None:
        t = trajectory
        self._kept[t.evaluation, t.uid, t.attempt, t.sample] = PendingTrajectory(t)

    def gathers(self, now: float) -> bool:
        """Whether the new ones may wait for more: each that goes alone wakes everybody on its way (docs/design.md)."""
        n_new = sum(not kept.n_sent for kept in self._kept.values())
        if n_new == 0:
            return False
        if self._gathers_since is None:
            self._gathers_since = now
        return n_new < self._gather and now < self._gathers_since + GATHER_S

    def due(self, now: float, n_waiting: Callable[[str], int]) -> Iterator[tuple[str, Trajectory, bool]]:
        """What to send now: the reward, the trajectory, and whether it leaves for the first time.

        `n_waiting`: bytes that a reward's socket has not taken yet. Send what it gave before you ask for much more.
        """
        self._gathers_since = None
        names = sorted(self._rewards)
        idle = {name for name in names if not n_waiting(name)}
        for kept in self._kept.values():
            if kept.n_sent and now < kept.resend_at:
                continue
            first = (kept.trajectory.uid + kept.n_sent) % len(names) if names else 0
            for name in names[first:] + names[:first]:
                # where something waits, a second copy would wait behind it
                if name in idle if kept.reward else n_waiting(name) < ROOM_BYTES:
                    kept.reward = name
                    kept.n_sent += 1
                    kept.resend_at = now + self._resend_s
                    yield name, kept.trajectory, kept.n_sent == 1
                    break

    def ack(self, key: Key) -> None:
        """The head has it, or wants it no more."""
        self._kept.pop(key, None)

    def forget(self, evaluation: str, uid: int, attempt: int) -> None:
        """Nothing of this group is wanted any more."""
        for key in [key for key in self._kept if key[:3] == (evaluation, uid, attempt)]:
            del self._kept[key]

    def unfinished(self) -> Iterator[Partial]:
        """Training samples of one turn, each without its last token: whoever goes on from there ends them again."""
        for kept in self._kept.values():
            t = kept.trajectory
            if t.evaluation or len(t.segments) != 1 or t.segments[0][1] < 2:
                continue
            (n_given, n_sampled), (version, n_last) = t.segments[0], t.spans[-1]
            spans = [*t.spans[:-1], [version, n_last - 1]] if n_last > 1 else t.spans[:-1]
            segments = [[n_given, n_sampled - 1]]
            yield Partial(t.uid, t.sample, t.attempt, t.term, segments, spans, t.ids[:-4], t.logps[:-4], t.lease)

    def forget_all(self) -> None:
        """Whoever wanted these is gone."""
        self._kept.clear()

    def lost(self, keeps: Callable[[int | None], bool]) -> set[Group]:
        """Groups of which a trajectory has tokens of a version that does not count."""
        return {key[:3] for key, kept in self._kept.items() if not keeps(kept.trajectory.spans[-1][0])}
