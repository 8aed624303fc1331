"""A true small run written by hand, line by line after docs/journal.md, for the auditor to pass and for tests to forge.

B = 2, eta = 1, 2 samples a prompt, 2 generators, policy `mask`. Prompt 2 is a straggler, two versions behind when it is
trained; generator-1 falls silent, and its prompt 5 is leased again; prompt 9 meets a reward timeout; an evaluation has
one error; what lives at the end is refunded. Nothing of the ring itself is used.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

CONFIG: dict[str, Any] = {
    "run": {"total_train_steps": 4},
    "data": {"batch_size": 2},
    "gconfig": {"n_samples": 2},
    "rollout": {"max_head_offpolicyness": 1, "staleness_policy": "mask"},
    "weights": {"timeout_s": 60.0},
    "bus": {"silent_s": 60.0},
    "journal": {"dir": ""},
    "actor": {"advantage": "rloo"},
}
N = 2
HEAD, REWARD, LEARNER = "head-0.0", "reward-0.0", "learner-0.0"
GENERATORS = ("generator-0.0", "generator-1.0")


class Forge:
    """Lines by process, in order of time; `edit` them, then `save`."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Line]] = {name: [] for name in (HEAD, REWARD, LEARNER, *GENERATORS)}
        self.config: dict[str, Any] = json.loads(json.dumps(CONFIG))
        self.t = 100.0
        self.live = self.in_training = self.u = self.v = self.w = self.n_pushes = 0
        self.held: dict[str, int] = {}
        self.prompts: dict[int, Line] = {}
        self.next_uid = self.term = 0
        self.digests = {0: "digest of 0"}
        self.head, self.learner = HEAD, LEARNER  # the lives that write now

    def write(self, name: str, event: str, /, **fields: Any) -> Line:
        self.t += 0.01
        line = {"t": round(self.t, 6), "wall": round(self.t + 1e9, 6), "term": self.term, "event": event}
        line |= fields
        self.lines[name].append(line)
        return line

    def of(self, name: str, event: str, /, **fields: Any) -> list[Line]:
        """Lines of one process and event that have these values."""
        found = [line for line in self.lines[name] if line["event"] == event]
        return [line for line in found if all(line.get(key) == value for key, value in fields.items())]

    # the ring

    def assemble(self) -> None:
        for name in self.lines:
            self.write(name, "start", schema=1, pid=1, host="here")
        for name in (REWARD, *GENERATORS, LEARNER):
            self.join(name)
        self.write(self.head, "term", version=0, next_uid=0, position=0, open=[], kept=[])
        self.push(catch_up=True)

    def join(self, name: str) -> None:
        self.write(self.head, "joined", name=name, host="here", pid=1)
        self.write(self.head, "member", name=name, state="stale" if name in GENERATORS else "healthy", why="ready")

    def push(self, *, catch_up: bool = False) -> None:
        version = self.u
        ids = {"push": self.n_pushes, "version": version}
        members = [name for name in GENERATORS if self.is_alive(name)]
        self.write(self.head, "push", **ids, view=0, n_members=len(members), catch_up=catch_up)
        self.n_pushes += 1
        for name in (self.learner, *members):
            self.write(name, "pushed", **ids, digest=self.digests[version], receive_s=0.0, stall_s=0.0)
            if name != self.learner:
                self.held[name] = version
                why = f"holds version {version}"
                self.write(self.head, "member", name=name, state="healthy", why=why, version=version)
        if not catch_up:
            self.v = version
            self.in_training = 0
            self.write(self.head, "publish", version=version, v=version, members=len(members))

    def is_alive(self, name: str) -> bool:
        return not self.of(self.head, "member", name=name, state="dead")

    def admit(self, holder: str) -> int:
        uid, born = self.next_uid, self.held[holder]
        self.next_uid += 1
        self.live += 1
        clock = {"live": self.live, "in_training": self.in_training, "u": self.u, "v": self.v, "w": self.w}
        self.write(self.head, "admit", uid=uid, born=born, row=uid, epoch=0, issue=0, **clock)
        self.prompts[uid] = {"born": born, "attempt": 1000 * self.term, "scored": {}, "began": {}}
        self.lease(uid, holder)
        return uid

    def lease(self, uid: int, holder: str) -> None:
        prompt = self.prompts[uid]
        prompt["holder"] = holder
        n = N - len(prompt["scored"])
        self.write(self.head, "lease", uid=uid, attempt=prompt["attempt"], holder=holder, born=prompt["born"], n=n)
        for sample in [s for s in range(N) if s not in prompt["scored"]]:
            self.write(holder, "request", uid=uid, sample=sample, attempt=prompt["attempt"])
            prompt["began"][sample] = self.held[holder]

    def finish(self, uid: int, sample: int, *, status: str = "value") -> None:
        """A sample of 3 tokens by the version that it began with, and 2 by what its generator holds now."""
        prompt = self.prompts[uid]
        holder, began = prompt["holder"], prompt["began"][sample]
        held = self.held[holder]
        versions = [began, 3, held, 2] if held > began else [began, 5]
        ids = {"uid": uid, "sample": sample, "attempt": prompt["attempt"]}
        self.write(holder, "completion", **ids, n_tokens=5, finish="stop", versions=versions)
        self.write(self.head, "sampled", **ids, n_tokens=5)
        spread = 0.0 if uid % 5 == 1 else sample / 10  # groups 1 and 6 have no signal
        reward = uid + spread + 100 * self.term
        verdict = {"reward": reward} if status == "value" else {"error": "no answer"}
        self.write(REWARD, "score", **ids, evaluation="", status=status, score_s=0.0, **verdict)
        seen = {"n_tokens": 5, "finish": "stop", "min_version": began, "max_version": held, "seconds": 1.0}
        told = reward if status == "value" else 0.0
        self.write(self.head, "scored", **ids, status=status, reward=told, correct=None, **seen)
        prompt["scored"][sample] = {"attempt": prompt["attempt"], "reward": told, "versions": versions}
        if status != "value":
            self.refund(uid, f"reward_{status}")
        elif len(prompt["scored"]) == N:
            self.write(self.head, "ready", uid=uid)

    def refund(self, uid: int, reason: str) -> None:
        scored = self.prompts.pop(uid)["scored"]
        self.live -= 1
        dropped = {"n_tokens_dropped": 5 * len(scored), "n_scored": len(scored), "again": False}
        self.write(self.head, "refund", uid=uid, reason=reason, error="", **dropped)

    def train(self, *uids: int) -> None:
        """A batch, its update and its push."""
        self.update(uids, n_masked=self.take(*uids))
        self.push()

    def take(self, *uids: int) -> int:
        """A batch. Returns how many of its tokens are masked."""
        self.batch: list[Line] = []
        step, eta = self.w, self.config["rollout"]["max_head_offpolicyness"]
        counts = {"n_groups": len(uids), "n_trajectories": N * len(uids), "short": len(uids) < 2}
        self.write(self.head, "batch", step=step, clock=step, **counts, u=self.u, v=self.v)
        n_masked = 0
        for uid in uids:
            prompt = self.prompts.pop(uid)
            for sample, scored in sorted(prompt["scored"].items()):
                pairs = zip(scored["versions"][::2], scored["versions"][1::2], strict=True)
                masked = sum(n for version, n in pairs if step - version > eta)
                n_masked += masked
                ids = {"step": step, "clock": step, "born": prompt["born"], "uid": uid, "sample": sample}
                tail = {"n_tokens": 5, "n_masked": masked, "finish": "stop", **scored}
                self.batch.append(self.write(self.head, "trajectory", **ids, **tail))
        self.live -= len(uids)
        self.in_training += len(uids)
        self.w += 1
        return n_masked

    def update(self, uids: tuple[int, ...], *, n_masked: int) -> None:
        self.u += 1
        self.digests[self.u] = f"digest of {self.u} by {self.learner}"
        figures = self.figures(n_tokens=5 * N * len(uids), n_masked=n_masked)
        self.write(self.learner, "step", version=self.u, digest=self.digests[self.u], **figures)
        self.write(self.head, "update", version=self.u, u=self.u, digest=self.digests[self.u], **figures)

    def figures(self, *, n_tokens: int, n_masked: int) -> dict[str, float]:
        """Of the last batch. Groups with equal rewards train nothing."""
        groups = {line["uid"]: {x["reward"] for x in self.batch if x["uid"] == line["uid"]} for line in self.batch}
        signal = {uid for uid, rewards in groups.items() if len(rewards) > 1}
        lags = [
            line["clock"] - version
            for line in self.batch
            for version, n in zip(line["versions"][::2], line["versions"][1::2], strict=True)
            for _ in range(n)
            if line["uid"] in signal
        ]
        lags = sorted(lags)[: len(lags) - n_masked]  # the oldest are masked
        return {
            "n_tokens": float(n_tokens),
            "n_tokens_trained": float(len(lags)),
            "n_tokens_masked": float(n_masked),
            "n_tokens_skipped": float(n_tokens - n_masked - len(lags)),
            "reward": sum(line["reward"] for line in self.batch) / len(self.batch),
            "truncated_share": 0.0,
            "masked_share": n_masked / n_tokens,
            "zero_advantage_share": 1 - len(signal) / len(groups),
            "loss": 0.25,
            **({"lag_mean": sum(lags) / len(lags), "lag_max": float(lags[-1])} if lags else {}),
        }

    def evaluate(self) -> None:
        """Two answers with a value, one error."""
        for uid, status in enumerate(("value", "error", "value")):
            ids = {"uid": uid, "sample": 0, "attempt": 0, "evaluation": "after"}
            self.write(GENERATORS[0], "request", **ids)
            self.write(GENERATORS[0], "completion", **ids, n_tokens=4, finish="stop", versions=[self.v, 4])
            verdict = {"reward": 0.5} if status == "value" else {"error": "no answer"}
            self.write(REWARD, "score", **ids, status=status, score_s=0.0, **verdict)
            seen = {"n_tokens": 4, "finish": "stop", "min_version": self.v, "max_version": self.v, "seconds": 1.0}
            told = {"reward": verdict.get("reward", 0.0), "correct": status == "value"}
            self.write(self.head, "scored", **ids, status=status, **told, **seen)
        told = {"n": 3, "n_failed": 1, "accuracy": 1.0, "reward": 0.5, "k": 1, "avg_at_k": 1.0, "avg_at_k_se": 0.0}
        told |= {"n_asked": 3, "n_missing": 1, "set": "", "version_mean": float(self.v)}
        told |= {"maj_at_k": 1.0, "pass_at_k": 1.0, "version_first": self.v, "version_last": self.v}
        self.write(self.head, "evaluation", name="after", version=self.v, **told)

    def end(self) -> None:
        self.write(self.head, "end", wall_s=0.0, code=0, reason="done")
        for name in (REWARD, LEARNER, GENERATORS[0]):
            self.write(name, "end", wall_s=0.0, reason="done")

    # on disk

    def wait(self, seconds: float, *, after: Line) -> None:
        """No event for this long after a line in any process; the head continues to label its time."""
        for lines in self.lines.values():
            for line in [x for x in lines if x["t"] > after["t"]]:
                line["t"] += seconds
                line["wall"] += seconds
        head = self.lines[self.head]
        at = head.index(after) + 1
        silence = [{**after, "event": "spans", "t": after["t"] + s, "s_wait": 1.0} for s in range(1, int(seconds))]
        head[at:at] = silence

    def save(self, folder: Path) -> Path:
        """Save in the format of the processes: numbered, with every second labelled."""
        (folder / "journal").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, lines in self.lines.items():
            role, _, place = name.partition("-")
            rank, _, inc = place.partition(".")
            who = {"role": role, "rank": int(rank), "inc": int(inc)}
            text = ""
            for seq, line in enumerate(self._labelled(lines)):
                text += json.dumps({**line, **who, "seq": line.get("seq", seq)}, separators=(",", ":")) + "\n"
            (folder / "journal" / f"{name}.jsonl").write_text(text)
        return folder

    def _labelled(self, lines: list[Line]) -> list[Line]:
        began, last = lines[0]["t"], lines[-1]
        labelled = sum(line.get("s_wait", 0.0) for line in lines)
        spans = {"t": last["t"], "wall": last["wall"], "term": last["term"], "event": "spans"}
        spans["s_work"] = last["t"] - began - labelled
        if last["event"] != "end":
            return [*lines, spans]
        return [*lines[:-1], spans, {**last, "wall_s": last.get("forged_wall_s", last["t"] - began)}]


def true_run() -> Forge:
    """The whole run."""
    forge = Forge()
    forge.assemble()
    for holder in (GENERATORS[0], GENERATORS[0], GENERATORS[0], GENERATORS[1]):
        forge.admit(holder)  # 0, 1, 2 and 3
    for uid in (0, 1):
        both(forge, uid)
    forge.train(0, 1)
    forge.admit(GENERATORS[0])  # 4
    forge.admit(GENERATORS[1])  # 5
    both(forge, 3)
    both(forge, 4)
    forge.finish(5, 0)
    forge.write(HEAD, "member", name=GENERATORS[1], state="dead", why="silent for 60 s")
    forge.prompts[5]["attempt"] = 1
    forge.lease(5, GENERATORS[0])
    forge.write(HEAD, "refused", what="Scored", sender=REWARD, why="an older attempt", uid=5, sample=1, attempt=0)
    forge.train(3, 4)
    forge.admit(GENERATORS[0])  # 6
    forge.admit(GENERATORS[0])  # 7
    both(forge, 2)
    forge.finish(5, 1)
    forge.train(2, 5)
    forge.admit(GENERATORS[0])  # 8
    forge.admit(GENERATORS[0])  # 9
    forge.finish(9, 1, status="timeout")
    forge.admit(GENERATORS[0])  # 10
    both(forge, 6)
    both(forge, 7)
    forge.finish(8, 0)
    forge.train(6, 7)
    forge.refund(8, "end_of_run")
    forge.refund(10, "end_of_run")
    forge.evaluate()
    forge.t += 10
    forge.end()
    return forge


def both(forge: Forge, uid: int) -> None:
    """Both samples of a group are scored."""
    for sample in range(N):
        forge.finish(uid, sample)


Edit = Callable[[Forge], None]


def put(name: str, event: str, changes: Line, /, **which: Any) -> Edit:
    """Changes the first line of this process and event that has these values."""
    return lambda forge: forge.of(name, event, **which)[0].update(changes)


def drop(name: str, event: str, /, **which: Any) -> Edit:
    """Removes that line."""
    return lambda forge: forge.lines[name].remove(forge.of(name, event, **which)[0])


class Forgeries(list[tuple[str, Any, str]]):
    """Invariant, the change of a true run that breaks it, and the rule that reports it."""

    def add(self, invariant: str, rule: str) -> Callable[[Any], Any]:
        """A decorator of the change."""

        def keep(edit: Any) -> Any:
            self.append((invariant, edit, rule))
            return edit

        return keep
