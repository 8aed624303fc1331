"""A state machine as data: which state may follow which, and when. The tables of docs/glossary.md are made from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from areal_bus.errors import ImpossibleEvent

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True)
class StateTable(Generic[State]):
    """The states of one kind of object, with the reason for each change, in words for people."""

    subject: str
    begins: Mapping[State, str]
    moves: Mapping[tuple[State, State], str]

    def begin(self, state: State) -> State:
        """Raises ImpossibleEvent unless an object may begin in this state."""
        if state not in self.begins:
            raise ImpossibleEvent(f"forbidden first state of a {self.subject}: {state}")
        return state

    def move(self, before: State, after: State) -> State:
        """Raises ImpossibleEvent unless `after` may follow `before`. A state may always be kept."""
        if before is not after and (before, after) not in self.moves:
            raise ImpossibleEvent(f"forbidden transition of a {self.subject}: {before} -> {after}")
        return after
