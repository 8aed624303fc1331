"""Replays a head's journal: derives the message behind each line, and compares what the head then writes.

The journal holds decisions and nearly all of their causes. The missing causes (a learner's request, the root's part
of a push, version 0) are inserted as late as possible. Lost members are not supported.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from actors.data.loading import load_sets
from actors.data.source import make_source
from actors.head.shell import rules_of
from actors.runtime.context import Context
from areal_bus import messages as m
from areal_bus.config.capacity import capacity
from areal_bus.config.sections import Config
from areal_bus.core.effects import Effect, Record
from areal_bus.core.head import Head
from areal_bus.core.parts.reward_parts import PREFIX, dumped
from areal_bus.core.rows import DataSource
from areal_bus.core.rules import HeadRules
from areal_bus.core.state import HeadState
from areal_bus.messages import Role

Line = dict[str, Any]
HEADER = {"t", "wall", "term", "role", "rank", "inc", "seq", "event", "chain"}
NOT_DECIDED = {"start", "end", "spans", "note", "wait", "stall"}  # of the shell and its watchdog


class Differs(Exception):
    """The replayed head decides differently from the journal."""


class Replay:
    """One head, replayed from its journal."""

    def __init__(self, rules: HeadRules, source: DataSource, *, capacity: int) -> None:
        self.head = Head(HeadState(rules, source), now=0.0)
        self.n_compared = 0
        self._capacity = capacity
        self._written: deque[Line] = deque()
        self._spans: dict[tuple[int, int, int], list[list[int]]] = {}  # of what was trained: uid, sample, attempt
        self._errors: dict[int, str] = {}  # uid -> why it was refunded

    def run(self, lines: Iterable[Line]) -> None:
        """Raises Differs at the first line that the head does not reproduce."""
        lines = [line for line in lines if line["event"] not in NOT_DECIDED]
        for line in lines:
            if line["event"] == "trajectory":
                flat = line["versions"]
                pairs = [[flat[i], flat[i + 1]] for i in range(0, len(flat), 2)]
                self._spans[line["uid"], line["sample"], line["attempt"]] = pairs
            elif line["event"] == "refund":
                self._errors[line["uid"]] = line["error"]
        for line, following in zip(lines, [*lines[1:], {"event": ""}], strict=True):
            self._follow(line, ends_push=following["event"] in ("push", "publish"))
        if self._written:
            raise Differs(f"the head goes on with {self._written[0]}")

    def _follow(self, line: Line, *, ends_push: bool) -> None:
        """Compare one line; the one after it tells whether a push ends with it, so that the root was done before."""
        while not self._written:
            push = self.head.state.pushes.current
            holds = line["event"] == "member" and line["why"].startswith("holds version")
            if ends_push and holds and push is not None and push.root not in push.done:
                self._done(push.root)
            effects = self._cause(line)
            self._written += [as_line(effect) for effect in effects if isinstance(effect, Record)]
        ours = {key: value for key, value in self._written.popleft().items() if key == "event" or key not in HEADER}
        theirs = {key: value for key, value in line.items() if key == "event" or key not in HEADER}
        if ours != theirs:
            raise Differs(f"the journal says {theirs}, the head {ours}")
        self.n_compared += 1

    # causes

    def _cause(self, line: Line) -> Sequence[Effect]:
        """Send the head the message that causes this line."""
        match line["event"]:
            case "joined":
                return self._join(line)
            case "member" if line["why"] == "ready":
                return self._say(line["name"], m.Ready(self._capacity))
            case "member" if line["why"].startswith("holds version"):
                return self._done(line["name"])
            case "term":
                return self._say(self._learners[0], m.BeginTerm(line["version"], "digest of 0"))
            case "push" | "publish":
                return self._done(self._learners[0])
            case "sampled":
                ids = (line["uid"], line["sample"], line["attempt"], line.get("evaluation", ""))
                return self._say(self._holder(line), m.Sampled(*ids, line["n_tokens"]))
            case "scored":
                return self._score(line)
            case "compared":
                rewards, error = line.get("rewards", []), line.get("error", "")
                verdict = m.GroupScored(line["status"], rewards, error, 0.0, line["uid"], line["attempt"])
                return self._say(line["reward_actor"], verdict)
            case "unsampled":
                unsampled = m.SampleFailed(line["uid"], line["attempt"], "", line["reason"], line["error"])
                return self._say(line["holder"], unsampled)
            case "refund" if line["reason"] in (m.Refund.SAMPLING_ERROR, m.Refund.PROMPT_TOO_LONG):
                entry = self.head.state.ledger.open[line["uid"]]
                unsampled = m.SampleFailed(entry.uid, entry.attempt, "", line["reason"], line["error"])
                return self._say(entry.holder or "", unsampled)
            case "batch" | "refund":
                return self._request()
            case "update":
                own = {"event", "version", "u", "digest"} | HEADER
                stats = {key: value for key, value in line.items() if key not in own}
                return self._say(self._learners[0], m.UpdateDone(line["version"], stats, line["digest"]))
            case "refused" if line["what"] == "SampleFailed":
                unsampled = m.SampleFailed(line["uid"], line["attempt"], "", m.Refund.SAMPLING_ERROR, "")
                return self._say(line["sender"], unsampled)
            case "refused" if line["what"] == "Sampled":
                ids = (line["uid"], line["sample"], line["attempt"])
                evaluation = re.match(
                    r"evaluation '(.*)' is not open", line["why"]
                )  # the line has neither it nor tokens
                return self._say(line["sender"], m.Sampled(*ids, evaluation[1] if evaluation else "", 1))
            case "refused" if line["what"] == "Scored":
                return self._score({**line, "status": "value", "reward": 0.0, "correct": None, "n_tokens": 0})
        raise Differs(f"nothing that the journal names leads to {line}")

    @property
    def _learners(self) -> list[str]:
        return [member.name for member in self.head.state.members.of(Role.LEARNER)]

    def _say(self, sender: str, message: m.Message) -> list[Effect]:
        return self.head.on(sender, message, 0.0)

    def _join(self, line: Line) -> list[Effect]:
        role, _, rest = line["name"].partition("-")
        index, _, incarnation = rest.partition(".")
        endpoint = "somewhere" if role != Role.GENERATOR else ""
        join = m.Join(line["name"], role, int(index), int(incarnation), endpoint, line["pid"], line["host"])
        return self._say(line["name"], join)

    def _done(self, name: str) -> list[Effect]:
        """Complete a part of the push in flight."""
        push = self.head.state.pushes.current
        if push is None or name in push.done:
            raise Differs(f"no push waits for {name}")
        digest = self.head.publisher._digests[push.version]
        return self._say(name, m.PushDone(push.id, push.version, digest, 0.0, 0.0))

    def _request(self) -> list[Effect]:
        """Every learner asks for the next batch."""
        before = set(self.head.state.terms.requests)
        effects: list[Effect] = []
        for index, name in enumerate(self._learners):
            if index not in before:
                effects += self._say(name, m.BatchRequest(self.head.state.gate.w))
        if not effects:
            raise Differs("the learners have asked, and the head gives no batch")
        return effects

    def _score(self, line: Line) -> list[Effect]:
        n, key = line["n_tokens"], (line["uid"], line["sample"], line["attempt"])
        low, high = line.get("min_version"), line.get("max_version")
        spans = [[low, n]] if low == high else [[low, 1], [high, n - 1]]
        is_value = line["status"] == m.VerdictStatus.VALUE
        n_roles = len(line.get("roles", "").split())
        segments = [[1, n - max(n_roles - 1, 0)], *[[1, 1]] * (n_roles - 1)]  # the lengths of trajectories are unknown
        parts = {key.removeprefix(PREFIX): value for key, value in line.items() if key.startswith(PREFIX)}
        scored = m.Scored(
            status=line["status"], reward=line["reward"], correct=line["correct"], score_s=0.0, uid=line["uid"],
            error="" if is_value else self._errors.get(line["uid"], ""), sample=line["sample"],
            attempt=line["attempt"], evaluation=line.get("evaluation", ""), generator=self._holder(line),
            finish=line.get("finish", ""), segments=segments, seconds=line.get("seconds", 0.0), term=0,
            spans=self._spans.get(key, spans) if n and not line.get("evaluation") else spans if n else [],
            logps=bytes(4 * n), ids=b"", prompt_text="", text="", roles=line.get("roles", ""), parts=dumped(parts),
            trajectories=list(range(n_roles)),
        )  # fmt: skip
        sender = line.get("sender") or self.head.state.members.of(Role.REWARD)[0].name
        return self._say(sender, scored)

    def _holder(self, line: Line) -> str:
        """The holder of the prompt; any generator when there is none."""
        if line.get("evaluation"):
            evaluation = self.head.state.evaluations.open
            holder = None if evaluation is None else evaluation.leased.get(line["uid"])
        else:
            entry = self.head.state.ledger.open.get(line["uid"])
            holder = None if entry is None else entry.holder
        return holder or self.head.state.members.of(Role.GENERATOR)[0].name


def replay_run(run: Path, *, n_generators: int) -> Replay:
    """The replay of a run's own journal, done: one learner and one reward. Raises Differs."""
    config = Config.model_validate_json((run / "config.json").read_text())
    context = Context("head", 0, 0, 0, "", "", "", "", "cpu", n_generators, 1, 1, str(run), "configs", "")
    rules = rules_of(context, config, load_sets(config, "configs"))
    replay = Replay(rules, make_source(config, "configs"), capacity=capacity(config))
    replay.run(json.loads(line) for line in (run / "journal" / "head-0.0.jsonl").read_text().splitlines())
    return replay


def as_line(record: Record) -> Line:
    """In the format of the journal."""
    line: Line = json.loads(json.dumps({"event": str(record.event), **record.fields}))
    return line
