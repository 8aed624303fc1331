"""Trajectories of an episode: which tokens of a sample belong to which sequence.

An agent may rewrite its history, drop a part of it or call sub-agents. Each history of its own is one trajectory. A
sample holds the segments ([n_given, n_sampled], one for each call of the model) of all of them in the order of the
calls, so versions never decrease (I5), and the number of the trajectory that each segment extends. Pure.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Range = tuple[int, int]  # [first, end)
ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


@dataclass(slots=True)
class TrajectoryTokens:
    """Where the tokens of one trajectory are, in its order."""

    tokens: list[Range] = field(default_factory=list)  # among all tokens of the sample
    sampled: list[Range] = field(default_factory=list)  # among its sampled tokens
    places: list[Range] = field(default_factory=list)  # of the sampled tokens within the trajectory
    n: int = 0  # tokens of the trajectory


def broken_rule(segments: Sequence[Sequence[int]], trajectories: Sequence[int]) -> str:
    """The rule that these numbers break, with the numbers; "" for none."""
    if not trajectories:
        return ""
    if len(trajectories) != len(segments):
        return f"mismatch of trajectories: each of {len(segments)} segments has one; got {len(trajectories)}"
    n_sampled: list[int] = []
    for number, (given, sampled) in zip(trajectories, segments, strict=True):
        if not 0 <= number <= len(n_sampled):
            return f"unknown trajectory {number}: {len(n_sampled)} of the episode have begun"
        if number == len(n_sampled):
            if given < 1:
                return f"missing prompt: trajectory {number} begins with a sampled token"
            n_sampled.append(0)
        n_sampled[number] += sampled
    if 0 in n_sampled:
        return f"empty trajectory {n_sampled.index(0)}: each has one or more sampled tokens"
    return ""


def broken_roles(trajectories: Sequence[int], roles: str) -> str:
    """The rule that these roles break, with the names; "" for none."""
    names, n = roles.split(" ") if roles else [], max(trajectories, default=0) + 1
    if names and len(names) != n:
        return f"mismatch of roles: each of {n} trajectories has one, or none has; got {roles[:200]!r}"
    wrong = [name for name in names if ROLE_NAME.fullmatch(name) is None]
    return f"invalid role {wrong[0][:60]!r}: it has 1 to 40 letters, digits, _ and -, a letter first" if wrong else ""


def split(segments: Sequence[Sequence[int]], trajectories: Sequence[int]) -> list[TrajectoryTokens]:
    """The trajectories of a sample that keeps the rules, the first one first."""
    found: list[TrajectoryTokens] = []
    at = at_sampled = 0
    for (given, sampled), number in zip(segments, trajectories or [0] * len(segments), strict=True):
        if number == len(found):
            found.append(TrajectoryTokens())
        one = found[number]
        one.tokens.append((at, at + given + sampled))
        one.sampled.append((at_sampled, at_sampled + sampled))
        one.places.append((one.n + given, one.n + given + sampled))
        one.n += given + sampled
        at, at_sampled = at + given + sampled, at_sampled + sampled
    return found


def within(ranges: Sequence[Range]) -> Iterator[int]:
    """The numbers of these ranges, in order."""
    for first, end in ranges:
        yield from range(first, end)
