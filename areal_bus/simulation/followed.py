"""What a witness remembers of a prompt, and what it says when an invariant does not hold."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str  # "I1" .. "I12"
    what: str
    at_s: float
    uid: int | None = None

    def __str__(self) -> str:
        about = "" if self.uid is None else f" (prompt {self.uid})"
        return f"{self.invariant} at {self.at_s:.2f} s{about}: {self.what}"


@dataclass(slots=True)
class Followed:
    """One admitted prompt, as the witness knows it."""

    born: int
    row: tuple[int, int]  # epoch, row
    attempt: int = 0
    state: str = "live"  # live, training, trained, refunded
    accepted: dict[int, int] = field(default_factory=dict)  # sample -> attempt whose verdict counted
    issue: int = 0  # times its row was issued before
    batch: int | None = None  # that it was taken in
    tokens: dict[int, int] = field(default_factory=dict)  # sample -> tokens of the verdict that counted
    failures: dict[tuple[int, int], str] = field(default_factory=dict)  # (sample, attempt) -> verdict, if no value
    failed: str = ""  # status of a verdict that counted, and after which only a refund can follow
    n_accounted: int = 0  # trained, masked or dropped
    n_leases: int = 0

    @property
    def n_received(self) -> int:
        return sum(self.tokens.values())
