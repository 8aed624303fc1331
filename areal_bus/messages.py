"""Every record that crosses a process; knows nothing of sockets, encodings or clocks.

Arrays travel as raw little-endian bytes: token ids are int32, log-probs float32. A field marked `frame()` goes on the
wire as a frame of its own; all others go into the small header.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

PROTOCOL = 12  # raised with every change of a record here, of how they travel, or of a checksum

ATTEMPTS = 1000  # attempts that a prompt has in one term, so that no two terms' results are ever mixed up

Kind = TypeVar("Kind")


def frame(kind: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that travels as a raw frame; kind is "int32", "float32" or "text" (UTF-8)."""
    return dataclasses.field(default=default, metadata={"frame": kind})


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, frame))
def record(kind: type[Kind]) -> type[Kind]:
    """A slotted dataclass, compared and hashed by its values, whose fields nobody may assign: mypy refuses it.

    At run time nothing does. `dataclass(frozen=True)` would, and stores each field by a call of `object.__setattr__`:
    a record of 15 fields takes 2.1 us to build instead of 0.2, and every message is built twice.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


class Role(StrEnum):
    HEAD = "head"
    GENERATOR = "generator"
    REWARD = "reward"
    LEARNER = "learner"


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VerdictStatus(StrEnum):
    """I10: a timeout or an error stays one, also where `reward.on_timeout` or `on_error` declares a reward for it."""

    VALUE = "value"
    TIMEOUT = "timeout"
    ERROR = "error"


class Refund(StrEnum):
    """Why an admitted prompt left the ring without being trained."""

    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    SAMPLING_ERROR = "sampling_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    LOST_TIMELINE = "lost_timeline"  # the learner went back to a checkpoint from before; its row is issued again
    POISON = "poison"  # three generators died with it, the last one alone with it
    TOO_OLD = "too_old"  # policy `drop`: over eta versions old when it would have been trained
    END_OF_DATA = "end_of_data"
    END_OF_RUN = "end_of_run"


@record
class Join:
    """An actor is up and asks to belong to the ring."""

    name: str  # "generator-0.1": role, index among its role, incarnation
    role: str  # Role
    index: int  # 0, 1, 2, ... among its role
    incarnation: int  # 0 at first, +1 with every restart
    endpoint: str  # where it listens: a reward's ROUTER, a learner's TCPStore "host:port"; "" for a generator
    pid: int
    host: str
    again: int = 0  # grows with each time it was told to rejoin: the same Join twice is one


@record
class Ready:
    """A generator can receive weights, a reward can score, a learner holds version 0."""

    capacity: int  # samples it asks for at once, those that wait there included; 0 for a learner


@record
class Heartbeat:
    """I am alive; `progress` moves when I do."""

    progress: int  # tokens, scores or micro-batches so far
    version: int | None  # weights held; None before the first push (always None for a reward)
    note: str  # what it does or waits for, for people
    hears: bool = True  # False: alive, but the head has been silent here for bus.silent_s (one way is shut)


@record
class Disconnected:
    """Not on the wire: our own bus, in the name of a peer whose connection ended, after all that it had said.

    What was under way to it and from it is lost. The peer may be dead, or connect again.
    """


@record
class HeadHeartbeat:
    """The head's own heartbeat: the published clock, repeated.

    Who has joined another life of the head than this one does what Rejoin says.
    """

    term: int
    version: int
    life: int = 0  # incarnation of the head


@record
class Term:
    """A new term begins at `version`: what later versions of older terms made is void.

    A generator ends what has such tokens (and sends SampleFailed(lost_timeline) for it), and decodes no further with
    weights of such a version.
    """

    term: int
    version: int


@record
class Rejoin:
    """The head does not know you: forget what you hold of its work, and say Join and Ready again.

    A learner cannot forget. To a head of another life it says where it is (Begin); else, and whenever `anew` is set, it
    ends, and comes back from its checkpoint as a new incarnation.
    """

    reason: str
    life: int = 0  # of the head, as in HeadHeartbeat
    anew: bool = False


@record
class LeaveRequest:
    """A generator wants no further work: it ends what it has, and the head says Stop then."""


@record
class PeerList:
    """Where those who listen do so now. Comes after every Join, so that each knows whom it has joined."""

    names: list[str]
    endpoints: list[str]
    life: int = 0  # of the head, as in HeadHeartbeat


@record
class Prompt:
    """Leave to sample one group. Only the gate issues it."""

    uid: int  # 0, 1, 2, ... in order of admission; evaluation prompts count on their own
    attempt: int  # 0 at first, +1 each time it is leased again; a term's own begin at term * ATTEMPTS
    born: int  # version the head last knew its generator to hold when it leased the prompt first
    samples: list[int]  # which of the group's n samples to make
    evaluation: str  # "" for training; else the name of the evaluation, whose samples are never trained
    row: str = frame("text")  # JSON object: one row of the data
    more: bool = False  # eta = 0: further prompts of the same share follow at once; decode when the last one is here
    lease: str = ""  # id of this lease: results show it (lease_ids.py)


@record
class Trajectory:
    """One sample: all its tokens, and for the sampled ones their log-probs and versions."""

    uid: int
    sample: int
    attempt: int
    evaluation: str
    generator: str  # name of the member that made it
    finish: str  # Finish of the last completion
    segments: list[list[int]]  # [[n_given, n_sampled], ...] in order; one pair for a single turn
    spans: list[list[int]]  # [[version, n_tokens], ...] over the sampled tokens, in order
    seconds: float  # from submission to the last token
    term: int  # its generator's term when it was complete
    ids: bytes = frame("int32")  # (T,) given and sampled tokens
    logps: bytes = frame("float32")  # (n_sampled,) log-prob of each sampled token under the version stamped on it
    prompt_text: str = frame("text")
    text: str = frame("text")  # what the reward reads: the completion (all turns)
    row: str = frame("text")  # JSON object: the data row, so that a reward needs no state
    turns: str = frame("text", default="")  # of several turns: JSON [[given, sampled], ...], their texts for people
    lease: str = ""  # as in its Prompt


@record
class Scored:
    """A trajectory with its verdict. `correct` means something only when status is "value".

    So does `reward`, from a reward actor. In the head's ledger that of a timeout or error is the declared one, if any.
    """

    status: str  # VerdictStatus
    reward: float
    correct: bool | None  # the task's own yes or no, where it has one
    error: str  # the text of a timeout or error, else ""
    score_s: float
    uid: int
    sample: int
    attempt: int
    evaluation: str
    generator: str
    finish: str
    segments: list[list[int]]
    spans: list[list[int]]
    seconds: float
    term: int
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    prompt_text: str = frame("text")
    text: str = frame("text")
    turns: str = frame("text", default="")  # as in the Trajectory
    lease: str = ""  # as in the Trajectory

    @property
    def n_sampled(self) -> int:
        return sum(n for _, n in self.segments)


@record
class Sampled:
    """A sample left its generator for a reward: its slot is free again."""

    uid: int
    sample: int
    attempt: int
    evaluation: str
    n_tokens: int


@record
class Partial:
    """What a generator has of one training sample at a weight swap, all of it so far; to the head.

    After a Rejoin once more, of what it held until then: of the last lease of a prompt that waits for the next one.
    From the head, just before the Prompt that leases the sample again (of the same attempt): what there is already.
    """

    uid: int
    sample: int
    attempt: int
    term: int  # the sender's, as in Trajectory
    segments: list[list[int]]  # [[n_given, n_sampled]]: of the first turn
    spans: list[list[int]]
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    lease: str = ""  # as in its Prompt, where it comes from a generator

    @property
    def n_sampled(self) -> int:
        return sum(n for _, n in self.segments)


@record
class SampleFailed:
    """A generator cannot make this group (a workflow raised, a prompt is over the limit)."""

    uid: int
    attempt: int
    evaluation: str
    reason: str  # Refund
    error: str


@record
class Ack:
    """The head has the scored form: the generator may forget the trajectory."""

    uid: int
    sample: int
    attempt: int
    evaluation: str


@record
class Cancel:
    """Stop sampling this attempt; nothing of it is wanted any more."""

    uid: int
    attempt: int
    evaluation: str = ""


@record
class BeginTerm:
    """Learner rank 0 begins a term with these weights: the model's (version 0), those of a checkpoint or, where it has
    outlived a head and trained before (`lives_on`), its own.
    """

    version: int
    digest: str
    life: int = 0  # of the head that it has joined
    lives_on: bool = False
    sealed: list[int] = dataclasses.field(default_factory=list)  # versions whose checkpoints are whole on disk
    max_lag: int | None = None  # of the tokens that it has trained in this life


@record
class Checkpointed:
    """The checkpoint of `version` is whole and on disk. Rank 0 only."""

    version: int
    folder: str


@record
class BatchRequest:
    """A learner rank is ready for the batch of this step (0, 1, 2, ...)."""

    step: int
    life: int = 0  # of the head that it asks


@record
class ShardItem:
    """One trajectory of a rank's share of a batch. `clock` is c: updates finished when the batch was taken."""

    step: int
    clock: int
    group: int  # index of its group within the batch, over all ranks
    n_groups: int  # groups in the whole batch, over all ranks
    uid: int
    sample: int
    reward: float
    correct: bool | None
    finish: str
    segments: list[list[int]]
    spans: list[list[int]]
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    text: str = frame("text")


@record
class ShardEnd:
    """The rank has its whole share. n_items = 0 is a share, too: the rank still takes part in the step."""

    step: int
    clock: int
    n_items: int
    n_groups: int
    last: bool  # no further batch will come


@record
class NoBatch:
    """There will be no batch for this step: the run or its data has ended, or the job drains."""

    step: int
    drained: bool  # the run goes on later: write a checkpoint whatever the settings say


@record
class UpdateDone:
    """An update is finished and its weights are snapshot: version = updates finished so far. Rank 0 only."""

    version: int
    stats: dict[str, float]  # the step's figures, flat
    digest: str  # of the snapshot
    kept: bool = False  # a checkpoint of this version is being written


@record
class PushBegin:
    """Take part in a push of `version`: learner rank 0 is the root, members follow in this order."""

    push: int  # 0, 1, 2, ...
    version: int
    view: int  # membership view: the same number means the same group, kept from last time
    members: list[str]
    store: str  # "host:port" of the TCPStore at learner rank 0
    timeout_s: float
    term: int = 0
    base: int = 0  # version that the term began with: a member that missed Term learns it here


@record
class PushDone:
    """This member (or the root) completed its part: weights verified and, for a member, swapped in."""

    push: int
    version: int
    digest: str  # of what it holds now
    receive_s: float
    stall_s: float  # decoding stood still for so long at the swap


@record
class PushBroken:
    """This member (or the root) could not complete its part."""

    push: int
    version: int
    error: str


@record
class Finished:
    """A learner rank has ended its loop and written what it had to write."""

    checkpoint: str  # folder of the last checkpoint, "" if none
    model: str  # folder of the exported model, "" if none


@record
class Failure:
    """An actor is about to end with an error."""

    error: str


@record
class Stop:
    """End now, cleanly."""

    reason: str


@record
class Evict:
    """End now, as failed: a generator that completes no push. Its next incarnation may."""

    reason: str


Message = (
    Join
    | Ready
    | Heartbeat
    | Disconnected
    | HeadHeartbeat
    | Term
    | Rejoin
    | LeaveRequest
    | PeerList
    | Prompt
    | Trajectory
    | Scored
    | Sampled
    | Partial
    | SampleFailed
    | Ack
    | Cancel
    | BeginTerm
    | Checkpointed
    | BatchRequest
    | ShardItem
    | ShardEnd
    | NoBatch
    | UpdateDone
    | PushBegin
    | PushDone
    | PushBroken
    | Finished
    | Failure
    | Stop
    | Evict
)
