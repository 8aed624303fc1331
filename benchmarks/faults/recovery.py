"""Computes recovery times and losses of a ring from its journal and the list of kills."""

import math
from collections.abc import Iterable, Iterator, Sequence

from areal_bus.messages import Role
from benchmarks.jobs.real_job import Kill
from tools.run import Line

Key = tuple[int, int, int]  # uid, attempt, sample


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them do not exceed; None of nothing."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None


def follower(name: str) -> str:
    """Name of its next incarnation."""
    place, _, incarnation = name.rpartition(".")
    return f"{place}.{int(incarnation) + 1}"


def detections(lines: Sequence[Line], kills: Iterable[Kill]) -> Iterator[float]:
    """From a kill to the head's line that the victim is dead or that its next incarnation has joined."""
    noticed = [line for line in lines if line["event"] == "joined" or line.get("state") == "dead"]
    for kill in kills:
        names = (kill.name, follower(kill.name))
        found = [line["t"] for line in noticed if line["t"] > kill.t and line["name"] in names]
        if found:
            yield found[0] - kill.t


def lost_leases(lines: Sequence[Line], kill: Kill) -> dict[int, int]:
    """Prompts (and attempts) leased to a killed generator that lacked verdicts at the kill."""
    held: dict[int, int] = {}
    for line in lines:
        if line["t"] >= kill.t:
            break
        match line["event"]:
            case "lease":
                held.pop(line["uid"], None)
                if line["holder"] == kill.name:
                    held[line["uid"]] = line["attempt"]
            case "ready" | "refund":
                held.pop(line["uid"], None)
            case "term":
                held.clear()
    return held


def lease_recoveries(lines: Sequence[Line], kills: Iterable[Kill]) -> Iterator[float]:
    """From a kill to the next lease of each prompt of the victim, except prompts with all verdicts."""
    for kill in kills:
        held = lost_leases(lines, kill)
        for line in lines:
            if line["t"] > kill.t and line["event"] == "term":
                break  # later prompts belong to the new term
            if line["t"] > kill.t and line["event"] in ("lease", "ready", "refund") and line["uid"] in held:
                del held[line["uid"]]
                if line["event"] == "lease":
                    yield line["t"] - kill.t


def score_recoveries(
    lines: Sequence[Line], scores: Sequence[Line], kills: Iterable[Kill], *, n_rewards: int
) -> Iterator[float]:
    """From a reward's kill to the verdict, by another one, on each sample that it had and had not judged.

    A sample goes first to the reward at uid modulo their number, in order of name; counted are those that left their
    generator while both were there, since the last change among rewards.
    """
    for kill in kills:
        before = [line for line in lines if line["t"] < kill.t]
        changed = max((x["t"] for x in before if str(x.get("name", "")).startswith("reward-")), default=0.0)
        index = int(kill.name.rpartition(".")[0].rpartition("-")[2])
        judged = {key(x) for x in scores if x["t"] < kill.t and f"reward-{x['rank']}.{x['inc']}" == kill.name}
        sent = {
            key(x) for x in before if x["event"] == "sampled" and x["t"] > changed and x["uid"] % n_rewards == index
        }
        left = sent - judged - {key(x) for x in before if x["event"] == "scored"}
        for line in lines:
            if line["t"] > kill.t and line["event"] == "scored" and key(line) in left:
                left.discard(key(line))
                yield line["t"] - kill.t


def returns(lines: Sequence[Line], kills: Iterable[Kill]) -> Iterator[float]:
    """From the kill of a learner or head to the next finished update."""
    for kill in kills:
        term = next((x["t"] for x in lines if x["event"] == "term" and x["t"] > kill.t), None)
        if term is not None:
            found = next((x["t"] for x in lines if x["event"] == "update" and x["t"] > term), None)
            if found is not None:
                yield found - kill.t


def key(line: Line) -> Key:
    return line["uid"], line["attempt"], line["sample"]


def of_role(kills: Iterable[Kill], *roles: Role) -> list[Kill]:
    return [kill for kill in kills if kill.role in roles]
