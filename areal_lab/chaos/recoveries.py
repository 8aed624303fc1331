"""When a ring has recovered from each fault, by the head's journal. Pure.

A ring has recovered at the first update at which the victim is back and every actor is healthy: of a killed actor the
next incarnation, of a stopped one after SIGCONT, of a killed rank a later head.
"""

import math
from collections import defaultdict

from areal_bus.messages import Role
from areal_lab.chaos.fault_schedule import AppliedFault, FaultKind
from tools.run import Line

HEAD = f"{Role.HEAD}-0"


class Recoveries:
    """Takes lines of the head in order, and faults up to a second late."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[int, str]] = {}  # place -> newest incarnation and its state
        self._heads: dict[int, float] = {}  # incarnation -> when it started
        self._open: list[AppliedFault] = []
        self.recovered: dict[AppliedFault, float] = {}  # fault -> when

    def add(self, fault: AppliedFault) -> None:
        self._open.append(fault)

    @property
    def open(self) -> list[AppliedFault]:
        """Faults from which the ring has not recovered."""
        return list(self._open)

    @property
    def disturbed(self) -> list[tuple[float, float]]:
        """From each fault to its recovery; without end for open ones."""
        return [(fault.t, t) for fault, t in self.recovered.items()] + [(fault.t, math.inf) for fault in self._open]

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Recovery times of each kind of fault, of a stop from its SIGCONT on."""
        found = defaultdict(list)
        for fault, t in self.recovered.items():
            found[fault.label].append(t - fault.until)
        return dict(found)

    def take(self, line: Line) -> None:
        match line["event"]:
            case "start":
                self._heads.setdefault(line["inc"], line["t"])
                self._members = {place: (inc, "joining") for place, (inc, _) in self._members.items()}
            case "joined":
                self._set(line["name"], "joining")
            case "member":
                self._set(line["name"], line["state"])
            case "update":
                self._close(line["t"])

    def _set(self, name: str, state: str) -> None:
        place, _, incarnation = name.rpartition(".")
        if state == "left":
            self._members.pop(place, None)
        elif int(incarnation) >= self._members.get(place, (0, ""))[0]:
            self._members[place] = int(incarnation), state

    def _close(self, t: float) -> None:
        if any(state != "healthy" for _, state in self._members.values()):
            return
        for fault in [fault for fault in self._open if fault.until < t and self._is_back(fault)]:
            self._open.remove(fault)
            self.recovered[fault] = t

    def _is_back(self, fault: AppliedFault) -> bool:
        if fault.kind is FaultKind.RANK:
            return any(t > fault.t for t in self._heads.values())
        if fault.kind is not FaultKind.KILL or fault.of_server:
            return True
        newest = max(self._heads, default=0) if fault.place == HEAD else self._members.get(fault.place, (0, ""))[0]
        return newest > fault.incarnation
