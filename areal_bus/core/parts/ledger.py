"""The ledger: the state of every admitted prompt, with leases, attempts and verdicts. Pure: no I/O.

A prompt is in one state (PROMPT_STATES, I3). A result counts once, for the attempt that is open (I4, I6).
A group is trained whole, or without its failed samples if at least two are left (I8).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush

from areal_bus.core.parts.reward_parts import role_rewards, with_group_reward
from areal_bus.core.parts.state_table import StateTable
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import ATTEMPTS, Refund, Sampled, Scored, VerdictStatus


class PromptState(StrEnum):
    LEASED = "leased"
    QUEUED = "queued"
    SCORING = "scoring"
    COMPARING = "comparing"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    REFUNDED = "refunded"


LIVE = (PromptState.LEASED, PromptState.QUEUED, PromptState.SCORING, PromptState.COMPARING, PromptState.READY)
PROMPT_STATES = StateTable(
    "prompt",
    {
        PromptState.LEASED: "It is admitted, or its lease of an earlier term goes on.",
        PromptState.SCORING: "Its lease of an earlier term goes on; all its samples are finished.",
        PromptState.COMPARING: "All verdicts of its samples were kept when a term began, and none of the group.",
        PromptState.READY: "All its verdicts were kept when a term began.",
        PromptState.QUEUED: "Its lease was not kept when a term began.",
    },
    {
        (PromptState.LEASED, PromptState.SCORING): "Its generator has finished the last sample.",
        (PromptState.LEASED, PromptState.READY): "The last verdict is here, before the generator's own report.",
        (PromptState.SCORING, PromptState.READY): "The last verdict is here.",
        (PromptState.LEASED, PromptState.COMPARING): "As to ready, with reward.group, which compares its samples.",
        (PromptState.SCORING, PromptState.COMPARING): "As to ready, with reward.group, which compares its samples.",
        (PromptState.COMPARING, PromptState.READY): "The verdict of the group is here.",
        (PromptState.LEASED, PromptState.QUEUED): "Its generator died, or gave it back.",
        (PromptState.SCORING, PromptState.QUEUED): "Its generator died, or gave it back; a verdict was lost.",
        (PromptState.QUEUED, PromptState.LEASED): "It is leased again, under the next attempt.",
        (PromptState.READY, PromptState.TRAINING): "It is taken into a batch.",
        (PromptState.TRAINING, PromptState.TRAINED): "The update of its batch is finished.",
        **{(state, PromptState.REFUNDED): "It is refunded, with a reason." for state in LIVE},
    },
)
LEAST = 2  # samples with a reward that a short group needs: one alone has no baseline


@dataclass(slots=True)
class LedgerEntry:
    """One admitted prompt: a group of n samples."""

    uid: int
    born: int
    n_samples: int
    holder: str | None
    attempt: int = 0
    state: PromptState = PromptState.LEASED
    sampled: set[int] = field(default_factory=set)  # finished by a generator, in this attempt or an earlier one
    noted: set[int] = field(default_factory=set)  # reported as finished by the holder, in this attempt
    scored: dict[int, Scored] = field(default_factory=dict)  # verdicts with a reward
    failed: dict[int, Scored] = field(default_factory=dict)  # verdicts without one: left out of the group
    n_deaths: int = 0  # holders that died while they sampled it
    alone: bool = False  # its holder has no other work
    failed_at: set[str] = field(default_factory=set)  # generators that could not sample it, without incarnation
    leased_at: float = 0.0  # when this attempt was leased, in monotonic seconds
    asked: str | None = None  # the reward actor that compares its samples
    source: str = ""  # of its row, of a mix
    singles: dict[int, Scored] | None = None  # of a compared group: `scored` as the rewards gave it, sample by sample

    @property
    def missing(self) -> list[int]:
        """Samples without a verdict."""
        return [i for i in range(self.n_samples) if i not in self.scored and i not in self.failed]

    @property
    def verdicts(self) -> dict[int, Scored]:
        """All, by sample, as the rewards gave them."""
        return dict(sorted((self.scored | self.failed | (self.singles or {})).items()))

    @property
    def group(self) -> tuple[float, ...] | None:
        """The rewards of a compared group, by sample; None for another one."""
        return None if self.singles is None else tuple(scored.reward for _, scored in sorted(self.scored.items()))

    def compare(self, rewards: Sequence[float]) -> None:
        """Give the group these rewards, one for each of `scored`, by sample. A failed sample keeps its own (I10)."""
        self.singles = dict(self.scored)
        for reward, (sample, single) in zip(rewards, sorted(self.singles.items()), strict=True):
            if single.status == VerdictStatus.VALUE:
                self.scored[sample] = with_group_reward(single, reward)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards of a role differ. Without roles: its rewards."""
        rewards = {pair for scored in self.scored.values() for pair in role_rewards(scored)}
        return len(rewards) > len({role for role, _ in rewards})

    @property
    def solved(self) -> tuple[int, int]:
        """Right samples, and samples that the task judged."""
        judged = [scored.correct for scored in self.scored.values() if scored.correct is not None]
        return sum(judged), len(judged)

    @property
    def is_hopeless(self) -> bool:
        """Too few samples can still be trained: the prompt must be refunded."""
        return bool(self.failed) and self.n_samples - len(self.failed) < LEAST


class Oldest:
    """A heap of entries by (born, uid). Adding and taking cost O(log n); removed entries are skipped later."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._entries: dict[int, LedgerEntry] = {}
        self.born: Counter[int] = Counter()  # version -> entries born at it

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: LedgerEntry) -> None:
        self._entries[entry.uid] = entry
        self.born[entry.born] += 1
        heappush(self._order, (entry.born, entry.uid))

    def first(self) -> LedgerEntry | None:
        """The oldest entry; it is not removed."""
        while self._order:
            entry = self._entries.get(self._order[0][1])
            if entry is not None:
                return entry
            heappop(self._order)
        return None

    def first_of(self, may: Callable[[LedgerEntry], bool]) -> LedgerEntry | None:
        """The oldest entry with this property; it is not removed. O(n) unless the first has it."""
        first = self.first()
        if first is None or may(first):
            return first
        return min(filter(may, self._entries.values()), key=lambda entry: (entry.born, entry.uid), default=None)

    def pop(self) -> LedgerEntry:
        """Remove and return the oldest entry. Raises ImpossibleEvent when there is none."""
        entry = self.first()
        if entry is None:
            raise ImpossibleEvent("no entry is left to take")
        heappop(self._order)
        self.discard(entry.uid)
        return entry

    def discard(self, uid: int) -> LedgerEntry | None:
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self.born[entry.born] -= 1
            if not self.born[entry.born]:
                del self.born[entry.born]
        return entry


class Ledger:
    """Owns the states of all prompts. Raises ImpossibleEvent for a forbidden transition and then changes nothing."""

    def __init__(self, *, compares: bool = False) -> None:
        """`compares`: a complete group needs one more verdict, which compares its samples."""
        self.compares = compares
        self.restart(next_uid=0, term=0)

    def restart(self, *, next_uid: int, term: int) -> None:
        """Begin a term with no open prompt. Its attempts are larger than those of all earlier terms."""
        self.open: dict[int, LedgerEntry] = {}  # uid -> entry, in order of admission, until trained or refunded
        self.next_uid = next_uid
        self.n_before = next_uid  # prompts that an earlier term trained or refunded: no state here
        self.first_attempt = term * ATTEMPTS
        self.counts: Counter[PromptState] = Counter()
        self.refunds: Counter[Refund] = Counter()
        self.ready = Oldest()  # groups with a verdict for each sample, enough of them with a reward
        self.flat = Oldest()  # of the ready groups those without signal
        self.queued = Oldest()  # whose lease was lost
        self.uncompared = Oldest()  # whose samples no reward compares yet
        self.n_asked: Counter[str] = Counter()  # groups that each reward compares
        self._training: dict[int, list[LedgerEntry]] = {}

    # admission and leases

    def admit(self, *, born: int, n_samples: int, holder: str, source: str = "") -> LedgerEntry:
        """Create a prompt and lease it to `holder`."""
        entry = LedgerEntry(self.next_uid, born, n_samples, holder, attempt=self.first_attempt, source=source)
        self.next_uid += 1
        self._open(entry, PromptState.LEASED)
        return entry

    def reopen(self, entry: LedgerEntry) -> None:
        """Add an open prompt of an earlier term: ready if complete, else leased or scoring as before, else queued."""
        if entry.uid in self.open or entry.uid >= self.next_uid:
            raise ImpossibleEvent(f"prompts 0..{self.next_uid - 1} can be reopened, once each; got {entry.uid}")
        self.n_before -= 1
        if not entry.missing and self.compares and entry.singles is None:
            self._open(entry, PromptState.COMPARING)
            asked, entry.asked = entry.asked, None
            self._ask(entry, asked)
        elif not entry.missing:
            self._open(entry, PromptState.READY)
            self._add_ready(entry)
        elif entry.holder is None:
            self._open(entry, PromptState.QUEUED)
            self.queued.add(entry)
        else:
            self._open(entry, entry.state)

    def lose(self, holder: str, *, died: bool = True) -> list[LedgerEntry]:
        """`holder` is lost: queue its leased and scoring prompts again; another reward compares its groups."""
        for entry in [x for x in self.open.values() if x.asked == holder] if self.n_asked[holder] else ():
            self._ask(entry, None)
        held = [entry for entry in self.open.values() if entry.holder == holder]
        lost = [entry for entry in held if entry.state in (PromptState.LEASED, PromptState.SCORING)]
        for entry in lost:
            if died and entry.state is PromptState.LEASED:
                entry.n_deaths += 1
            self._requeue(entry)
        return lost

    def give_back(self, uid: int) -> LedgerEntry:
        """The holder will not finish this prompt: queue it for another lease."""
        entry = self.open.get(uid)
        if entry is None or entry.state not in (PromptState.LEASED, PromptState.SCORING):
            raise ImpossibleEvent(f"only a leased prompt can be given back; prompt {uid} is not leased")
        self._requeue(entry)
        return entry

    def is_of_earlier_term(self, entry: LedgerEntry) -> bool:
        """Whether its lease was issued before this term began, so that its samples may have void tokens."""
        return entry.attempt < self.first_attempt

    def lease(self, uid: int, holder: str) -> LedgerEntry:
        """Lease a queued prompt again, under the next attempt."""
        entry = self.queued.discard(uid)
        if entry is None:
            raise ImpossibleEvent(f"only a queued prompt can be leased again; prompt {uid} is not queued")
        entry.attempt = max(entry.attempt + 1, self.first_attempt)
        entry.holder = holder
        entry.sampled, entry.noted = set(entry.verdicts), set()
        self._move(entry, PromptState.LEASED)
        return entry

    # results

    def sampled(self, holder: str, message: Sampled) -> LedgerEntry:
        """The holder finished one sample. Its verdict takes another route and may have arrived before."""
        uid, sample, attempt = message.uid, message.sample, message.attempt
        entry = self.open.get(uid)
        if entry is None:
            raise self.not_open("only an open prompt is sampled", uid)
        if entry.holder != holder or entry.attempt != attempt:
            raise ImpossibleEvent(f"{holder} does not hold prompt {uid} at attempt {attempt}")
        if sample in entry.noted or not 0 <= sample < entry.n_samples:
            raise ImpossibleEvent(f"each of the {entry.n_samples} samples is made once; got sample {sample} again")
        entry.noted.add(sample)
        entry.sampled.add(sample)
        if entry.state is PromptState.LEASED and len(entry.sampled) == entry.n_samples:
            self._move(entry, PromptState.SCORING)
        return entry

    def deliver(self, scored: Scored) -> LedgerEntry:
        """Record a verdict with a reward. The last verdict makes the group READY."""
        entry = self._open_sample(scored)
        entry.scored[scored.sample] = scored
        return self._judged(entry, scored.sample)

    def fail(self, scored: Scored) -> LedgerEntry:
        """Record a verdict without a reward. The last verdict makes the group READY or hopeless."""
        entry = self._open_sample(scored)
        entry.failed[scored.sample] = scored
        return self._judged(entry, scored.sample)

    def ask(self, reward: str) -> LedgerEntry:
        """This reward actor compares the samples of the oldest group that waits for it."""
        entry = self.uncompared.pop()
        self._ask(entry, reward)
        return entry

    def compared(self, reward: str, uid: int, attempt: int, rewards: Sequence[float]) -> LedgerEntry:
        """Record the verdict of a group, which becomes READY. It counts once, from the reward that was asked (I4)."""
        entry = self.awaits_comparison(reward, uid, attempt)
        entry.compare(rewards)
        self._end_asking(entry)
        self._move(entry, PromptState.READY)
        self._add_ready(entry)
        return entry

    def awaits_comparison(self, reward: str, uid: int, attempt: int) -> LedgerEntry:
        """The group that this reward was asked to compare. Raises ImpossibleEvent or LateEvent when there is none."""
        entry = self.open.get(uid)
        if entry is None:
            raise self.not_open("only the samples of an open prompt are compared", uid)
        if entry.attempt != attempt or entry.state is not PromptState.COMPARING or entry.asked != reward:
            asked = f", asked of {entry.asked}" if entry.asked else ""
            raise LateEvent(f"prompt {uid} is at attempt {entry.attempt} ({entry.state}{asked}); {reward} compared "
                            f"attempt {attempt}")  # fmt: skip
        return entry

    def _open_sample(self, scored: Scored) -> LedgerEntry:
        """The entry of this verdict. Raises ImpossibleEvent when the verdict cannot count."""
        entry = self._of(scored.uid, scored.attempt)
        if not 0 <= scored.sample < entry.n_samples:
            there = f"prompt {scored.uid} has samples 0..{entry.n_samples - 1}"
            raise ImpossibleEvent(f"unknown sample {scored.sample}: {there}")
        if scored.sample in entry.scored or scored.sample in entry.failed:  # I4
            which = f"sample {scored.sample} of prompt {scored.uid}"
            raise ImpossibleEvent(f"each sample is scored once; {which} already has a verdict")
        return entry

    def _judged(self, entry: LedgerEntry, sample: int) -> LedgerEntry:
        """Update the state after a verdict."""
        entry.sampled.add(sample)
        if len(entry.scored) + len(entry.failed) == entry.n_samples and not entry.is_hopeless:  # I8
            self._complete(entry)
        elif entry.state is PromptState.LEASED and len(entry.sampled) == entry.n_samples:
            self._move(entry, PromptState.SCORING)
        return entry

    # training and refunds

    @property
    def n_live(self) -> int:
        return sum(map(self.counts.__getitem__, LIVE))

    def take(self, n_prompts: int, batch: int) -> list[LedgerEntry]:
        """Move the n oldest ready groups, by (born, uid), into `batch`."""
        if not 0 < n_prompts <= len(self.ready):
            raise ImpossibleEvent(f"{len(self.ready)} groups are ready; {n_prompts} were asked for")
        taken = [self.ready.pop() for _ in range(n_prompts)]
        for entry in taken:
            self.flat.discard(entry.uid)
            self._move(entry, PromptState.TRAINING)
        self._training[batch] = taken
        return taken

    def trained(self, batch: int) -> list[LedgerEntry]:
        """The update of `batch` is finished."""
        done = self._training.pop(batch, None)
        if done is None:
            raise ImpossibleEvent(f"batch {batch} is not in training; {sorted(self._training)} are")
        for entry in done:
            self._move(entry, PromptState.TRAINED)
            del self.open[entry.uid]
        return done

    def refund(self, uid: int, reason: Refund) -> LedgerEntry:
        """Close a live prompt without training it."""
        entry = self.open.get(uid)
        if entry is None or entry.state not in LIVE:
            raise ImpossibleEvent(f"only a live prompt can be refunded; prompt {uid} is not live")
        self.ready.discard(uid)
        self.flat.discard(uid)
        self.queued.discard(uid)
        self._end_asking(entry)
        self._move(entry, PromptState.REFUNDED)
        self.refunds[reason] += 1
        del self.open[uid]
        return entry

    def live(self) -> Iterable[LedgerEntry]:
        """All live prompts, oldest first."""
        return [entry for entry in self.open.values() if entry.state in LIVE]

    # inside

    def _of(self, uid: int, attempt: int) -> LedgerEntry:
        """The open entry that a result of this attempt belongs to (I6)."""
        entry = self.open.get(uid)
        if entry is None:
            raise self.not_open("a result needs an open prompt", uid)
        if attempt != entry.attempt or entry.state is PromptState.QUEUED:
            raise ImpossibleEvent(f"prompt {uid} is at attempt {entry.attempt} ({entry.state}); got attempt {attempt}")
        if entry.state in (PromptState.COMPARING, PromptState.READY, PromptState.TRAINING):
            raise ImpossibleEvent(f"prompt {uid} is {entry.state}: its results are complete")
        return entry

    def not_open(self, rule: str, uid: int) -> ImpossibleEvent:
        """The error for a message about a prompt that is not open: LateEvent if it is closed, else ImpossibleEvent."""
        if 0 <= uid < self.next_uid:
            return LateEvent(f"{rule}; prompt {uid} is closed")
        return ImpossibleEvent(f"{rule}; prompt {uid} was never admitted")

    def _complete(self, entry: LedgerEntry) -> None:
        if self.compares:
            self._move(entry, PromptState.COMPARING)
            self._ask(entry, None)
            return
        self._move(entry, PromptState.READY)
        self._add_ready(entry)

    def _add_ready(self, entry: LedgerEntry) -> None:
        self.ready.add(entry)
        if not entry.has_signal:
            self.flat.add(entry)

    def _ask(self, entry: LedgerEntry, reward: str | None) -> None:
        """Its samples are compared by this reward, or wait for one."""
        self._end_asking(entry)
        if reward is None:
            self.uncompared.add(entry)
        else:
            entry.asked = reward
            self.n_asked[reward] += 1

    def _end_asking(self, entry: LedgerEntry) -> None:
        self.uncompared.discard(entry.uid)
        if entry.asked is not None:
            self.n_asked[entry.asked] -= 1
            entry.asked = None

    def _requeue(self, entry: LedgerEntry) -> None:
        self._move(entry, PromptState.QUEUED)
        entry.holder = None
        entry.alone = False
        self.queued.add(entry)

    def _open(self, entry: LedgerEntry, state: PromptState) -> None:
        entry.state = PROMPT_STATES.begin(state)
        self.open[entry.uid] = entry
        self.counts[state] += 1

    def _move(self, entry: LedgerEntry, state: PromptState) -> None:
        before, entry.state = entry.state, PROMPT_STATES.move(entry.state, state)
        self.counts[before] -= 1
        self.counts[state] += 1
