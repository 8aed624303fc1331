"""Draws a run: reads every process, lays its slices on tracks, and writes them with flows and counters."""

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

from areal_bus.errors import ConfigError
from tools import run
from tools.run import Run
from tools.timeline.actors import EVENTS, ActorStory, Work
from tools.timeline.clocks import Clocks, read_clocks
from tools.timeline.story import BatchStory, Key, PushStory, Story, TrajectoryStory
from tools.timeline.trace_file import TraceFile, Window

ROLES = ("head", "generator", "reward", "learner")
LABELS, EVENTS_TRACK, ADMITS, BATCHES, FIRST_LANE = 1, 2, 3, 4, 10
PUSH_LANE = 500  # of a head, a generator or a learner
TRACKS = {"sample": "slot", "score": "score", "update": "updates", "receive": "push"}
ADMIT_S = 1e-6

Anchor = tuple[tuple[int, int], float, float]  # track, begin and end of a slice


class Lanes:
    """Gives lanes to slices, which come in order of their begin."""

    def __init__(self) -> None:
        self.n = 0  # lanes so far
        self._busy: list[tuple[float, int]] = []  # end, lane
        self._free: list[int] = []

    def take(self, begin: float, end: float) -> int:
        """The lane of the slice, from 0."""
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            heapq.heappush(self._free, self.n)
            self.n += 1
        lane = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end, lane))
        return lane


@dataclass(slots=True)
class Timeline:
    """All that is drawn, on one clock: seconds since `began`."""

    story: Story
    actors: list[ActorStory]
    clocks: Clocks
    began: float
    ended: float
    pids: dict[str, int] = field(default_factory=dict)  # role-rank -> pid


def read(where: Run) -> Timeline:
    """Read a run. Raises ConfigError when it has no head or another schema."""
    clocks, story, actors = read_clocks(where), Story(), []
    for path in where.journals():
        actor = ActorStory(path.name.removesuffix(".jsonl"))
        is_head, start = actor.name.startswith("head-"), -1
        wanted = {*EVENTS, *Story.EVENTS} if is_head else EVENTS
        for line in run.lines(path, *wanted):
            if line["event"] == "start":
                run.check_schema(line, path)
                start += 1
            if start < 0:
                continue  # the first line was lost
            offset = clocks.offset(actor.name, start)
            actor.on(line, offset)
            if is_head:
                story.read([line], offset)
        actor.finish()
        actors.append(actor)
    starts = [at for actor in actors for at in actor.starts]
    if story.began is None or not starts:
        raise ConfigError(f"missing journal of the head in {where.folder}, or its start line: a timeline needs it")
    ends = [span.end for actor in actors for span in actor.labels[-1:]] + [story.ended]
    order = {role: place for place, role in enumerate(ROLES)}
    ranks = {actor.name.partition(".")[0] for actor in actors}
    named = sorted(ranks, key=lambda rank: (order.get(rank.split("-")[0], 9), int(rank.split("-")[1])))
    pids = {rank: number for number, rank in enumerate(named, start=1)}
    return Timeline(story, actors, clocks, min(starts), max(ends), pids)


def window_of_step(timeline: Timeline, version: int) -> Window:
    """From the first admission of a batch to the publish of its version. Raises ConfigError when there is none."""
    batch = next((batch for batch in reversed(timeline.story.batches) if batch.version == version), None)
    if batch is None:
        known = sorted({batch.version for batch in timeline.story.batches})
        range_ = f"the run has versions {known[0]} to {known[-1]}" if known else "the run has no batch yet"
        raise ConfigError(f"unknown version --step {version}: it names the version that an update made; {range_}")
    admitted = [one.admitted for one in timeline.story.trajectories.values() if one.batch is batch]
    end = max(batch.taken, batch.updated or 0.0, (batch.push and batch.push.ended) or 0.0)
    return Window(min([*admitted, batch.taken]) - timeline.began, end - timeline.began + 0.001)


class Drawing:
    """Writes one timeline."""

    def __init__(self, timeline: Timeline, trace: TraceFile) -> None:
        self._line, self._trace = timeline, trace
        self._anchors: dict[tuple[str, Key], Anchor] = {}  # (sample or score, trajectory) -> slice
        self._updates: list[tuple[float, Anchor]] = []  # end of an update, slice; in order
        self._admits: dict[tuple[float, int], Anchor] = {}  # (time, uid) -> slice
        self._batches: dict[int, Anchor] = {}  # id of the story -> slice
        self._pushes: dict[int, Anchor] = {}
        self._samples: dict[int, Anchor] = {}  # id of the work -> slice
        self._makers: dict[Key, ActorStory] = {}  # trajectory -> its generator
        self._threads: set[tuple[int, int]] = set()

    def draw(self) -> None:
        """Write everything."""
        for rank, pid in self._line.pids.items():
            self._trace.process(pid, rank)
        lanes: dict[tuple[int, str], Lanes] = {}
        for actor in self._line.actors:
            self._draw_actor(actor, self._line.pids[actor.name.partition(".")[0]], lanes)
        head = next((pid for rank, pid in self._line.pids.items() if rank.startswith("head-")), 1)
        self._draw_story(head)
        self._draw_flows()

    def _slice(
        self, place: tuple[int, int], track: str, name: str, begin: float, end: float, category: str, **args: object
    ) -> Anchor | None:
        """Write a slice; returns its visible part, None if it is outside the window."""
        if place not in self._threads:
            self._threads.add(place)
            self._trace.thread(*place, track)
        begin, end = begin - self._line.began, max(begin, end) - self._line.began
        part = self._trace.window.clip(begin, end)
        if part is None:
            return None
        self._trace.slice(place, name, begin, end, category, **args)
        return (place, *part)

    def _draw_actor(self, actor: ActorStory, pid: int, lanes: dict[tuple[int, str], Lanes]) -> None:
        for span in actor.labels:
            args = {"short spans, summed": True} if span.is_merged else {}
            self._slice((pid, LABELS), "time", span.label, span.begin, span.end, "label", **args)
        for part in actor.parts:
            self._slice((pid, LABELS), "time", part.label, part.begin, part.end, "part", **{"share of its label": True})
        for work in actor.work:
            lane = lanes.setdefault((pid, work.kind), Lanes()).take(work.begin, work.end)
            tid = lane + (PUSH_LANE if work.kind == "receive" else FIRST_LANE)
            track = f"{TRACKS[work.kind]} {lane}" if work.kind in ("sample", "score") else TRACKS[work.kind]
            anchor = self._slice((pid, tid), track, work.name, work.begin, work.end, work.kind, **work.args)
            if anchor is not None:
                self._keep(actor, work, anchor)
        for number, at in enumerate(actor.starts):
            name = "start" if actor.name.endswith(".0") and not number else "restart"
            self._instant((pid, LABELS), f"{name} {actor.name}", at)
        for at, n_bytes in actor.memory:
            self._counter(pid, "memory (MiB)", at, round(n_bytes / 2**20, 1))
        for at, rate in actor.tokens_per_second():
            self._counter(pid, "tokens/s", at, rate)

    def _keep(self, actor: ActorStory, work: Work, anchor: Anchor) -> None:
        if work.kind == "update":
            self._updates.append((work.end, anchor))
        if work.kind == "sample":
            self._samples[id(work)] = anchor
        if work.key is not None:
            self._anchors[work.kind, work.key] = anchor
            if work.kind == "sample":
                self._makers[work.key] = actor

    def _draw_story(self, pid: int) -> None:
        story = self._line.story
        free = 0.0
        for at, uid in story.admits:
            begin = max(at, free)
            free = begin + ADMIT_S
            anchor = self._slice((pid, ADMITS), "admissions", f"admit {uid}", begin, free, "admit")
            if anchor is not None:
                self._admits[at, uid] = anchor
        free = 0.0
        for batch in story.batches:
            begin = max(batch.taken, free)
            free = max(begin, batch.updated or begin)
            anchor = self._slice((pid, BATCHES), "batches", f"batch of version {batch.version}", begin, free, "batch")
            if anchor is not None:
                self._batches[id(batch)] = anchor
        lanes = Lanes()
        for push in story.pushes:
            self._draw_push(pid, push, lanes)
        for name, at, value in story.counters:
            self._counter(pid, name, at, value)
        for name, at, args in story.instants:
            self._instant((pid, EVENTS_TRACK), name, at, **args)

    def _draw_push(self, pid: int, push: PushStory, lanes: Lanes) -> None:
        end = push.began if push.ended is None else push.ended
        lane = lanes.take(push.began, end)
        what = "catch-up" if push.is_catch_up else "push"
        name = f"{what} {push.number}: version {push.version}"
        anchor = self._slice((pid, PUSH_LANE + lane), "pushes", name, push.began, end, "push")
        if anchor is not None:
            self._pushes[id(push)] = anchor

    def _draw_flows(self) -> None:
        self._updates.sort(key=lambda one: one[0])
        ends = [end for end, _ in self._updates]
        for number, (key, trajectory) in enumerate(self._line.story.trajectories.items(), start=1):
            anchors = [
                self._admits.get((trajectory.admitted, key[0])),
                self._anchors.get(("sample", key)),
                self._anchors.get(("score", key)),
                *self._after(key, trajectory, ends),
            ]
            points = _in_order([anchor for anchor in anchors if anchor is not None])
            if len(points) > 1:
                self._trace.flow(number, points)

    def _after(self, key: Key, trajectory: TrajectoryStory, ends: list[float]) -> list[Anchor | None]:
        """Batch, update, push, and the next sample of its generator."""
        batch = trajectory.batch
        if batch is None:
            return []
        found = [self._batches.get(id(batch)), self._update(batch, ends)]
        if batch.push is not None:
            found.append(self._pushes.get(id(batch.push)))
            maker = self._makers.get(key)
            sample = maker.first_sample_with(batch.version, batch.push.began) if maker is not None else None
            found.append(self._samples.get(id(sample)) if sample is not None else None)
        return found

    def _update(self, batch: BatchStory, ends: list[float]) -> Anchor | None:
        """The learner's update of this batch: the first that ends after the batch was taken."""
        place = bisect_left(ends, batch.taken)
        return self._updates[place][1] if place < len(ends) and batch.updated is not None else None

    def _instant(self, place: tuple[int, int], name: str, at: float, **args: object) -> None:
        if place not in self._threads:
            self._threads.add(place)
            self._trace.thread(*place, "events")
        self._trace.instant(place, name, at - self._line.began, **args)

    def _counter(self, pid: int, name: str, at: float, value: float) -> None:
        self._trace.counter(pid, name, at - self._line.began, value)


def _in_order(anchors: list[Anchor]) -> list[tuple[tuple[int, int], float]]:
    """A time within each slice, never before the last one; a slice that ended before is left out (clock error)."""
    points: list[tuple[tuple[int, int], float]] = []
    last = 0.0
    for place, begin, end in anchors:
        if end >= last:
            last = max(begin, last)
            points.append((place, last))
    return points


def write(timeline: Timeline, path: Path, window: Window) -> int:
    """Write the trace; returns the number of its events. The file is complete or absent."""
    part = path.with_name(path.name + ".part")
    try:
        with TraceFile(part, window) as trace:
            Drawing(timeline, trace).draw()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return trace.n_events
