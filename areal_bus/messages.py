"""All messages between processes. Arrays are raw little-endian bytes: ids int32, log-probs float32; see `frame()`."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform

PROTOCOL = 20  # incremented with every change of a record, of the wire format or of a checksum

ATTEMPTS = 1000  # attempts of a prompt in one term; separates the results of different terms
MAX_PARTS = 32  # rewards by name that one score reports
MAX_PAIRS = 2048  # turns of a sample, and spans of its versions
MAX_NAMES = 8192  # in a list of members: as many as a socket has connections
MAX_TEXT_BYTES = 8 << 20  # of all text frames of a message together
MAX_ROW_BYTES = MAX_TEXT_BYTES - 1024  # of a row of the data as JSON, before the name of its source is added

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Longest:
    """Limit of a text field in the header. A longer prose is cut by its sender, any other one is not sent."""

    n: int  # characters
    is_prose: bool = False  # read by people only


Name = Annotated[str, Longest(200)]  # of a member, an evaluation, a lease, a digest
Address = Annotated[str, Longest(255)]  # an endpoint
Folder = Annotated[str, Longest(4096)]  # a path
Note = Annotated[str, Longest(200, is_prose=True)]
Sentence = Annotated[str, Longest(2000, is_prose=True)]  # an error or a reason
Parts = Annotated[str, Longest(10_000)]  # JSON of MAX_PARTS numbers by name
Roles = Annotated[str, Longest(1000)]  # names of roles, with a space between two


def frame(kind: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A field sent as a raw frame; kind: "int32", "float32", "text" (UTF-8), "names" (lines), "fields" (float32)."""
    return dataclasses.field(default=default, metadata={"frame": kind})


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, frame))
def record(kind: type[Kind]) -> type[Kind]:
    """A slotted dataclass, compared and hashed by value. Its fields are read-only: mypy rejects assignments.

    There is no check at run time. `dataclass(frozen=True)` has one, but calls `object.__setattr__` for each field:
    a record of 15 fields takes 2.1 us to build instead of 0.2, and every message is built twice.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


def recast(source: Any, kind: type[Kind], /, **others: Any) -> Kind:
    """A record of `kind`: the fields that `source` has too are taken from it, unless `others` names them."""
    names = _shared(type(source), kind)  # type: ignore[arg-type]  # mypy does not see that classes are hashable
    return kind(**{name: getattr(source, name) for name in names} | others)


@cache
def _shared(first: Any, second: Any) -> list[str]:
    names = {field.name for field in dataclasses.fields(first)}
    return [field.name for field in dataclasses.fields(second) if field.name in names]


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
    """I10: a timeout or error keeps its status, even if `reward.on_timeout` or `on_error` gives it a reward."""

    VALUE = "value"
    TIMEOUT = "timeout"
    ERROR = "error"


class Refund(StrEnum):
    """Why an admitted prompt left the ring without being trained."""

    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    SAMPLING_ERROR = "sampling_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    LOST_TIMELINE = "lost_timeline"  # the learner resumed from an earlier checkpoint; the row is issued again
    POISON = "poison"  # three generators died while they sampled it; the last one sampled nothing else
    NO_SIGNAL = "no_signal"  # data.max_refill: all its rewards are equal, and another prompt takes its place
    TOO_OLD = "too_old"  # policy `drop`: more than eta versions old at training time
    END_OF_DATA = "end_of_data"
    END_OF_RUN = "end_of_run"


@record
class Join:
    """An actor has started and asks to join the ring."""

    name: Name  # "generator-0.1": role, index among its role, incarnation
    role: Name  # Role
    index: int  # 0, 1, 2, ... among its role
    incarnation: int  # 0 at first, +1 with every restart
    endpoint: Address  # its address: ROUTER of a reward, TCPStore "host:port" of a learner; "" for a generator
    pid: int
    host: Note
    again: int = 0  # incremented with each Rejoin received; a duplicate Join has the same number
    split: int = 0  # number of the split of ranks that its supervisor knew when it started it


@record
class Ready:
    """A generator can receive weights, a reward can score, a learner holds version 0."""

    capacity: int  # samples that it accepts at once, queued ones included; 0 for a learner


@record
class Heartbeat:
    """A sign of life of an actor. `progress` increases while it works."""

    progress: int  # tokens, scores or micro-batches so far
    version: int | None  # version held; None before the first push, and for a reward
    note: Note  # current activity, for people
    hears: bool = True  # False: nothing received from the head for bus.silent_s (the connection works one way)


@record
class Disconnected:
    """The connection of a peer has ended. Local: the own bus produces it, after the last message of the peer.

    Messages in flight in both directions are lost. The peer may be dead, or reconnect.
    """


@record
class HeadHeartbeat:
    """Heartbeat of the head, with the published version. An actor that joined another incarnation acts as on Rejoin."""

    term: int
    version: int
    life: int = 0  # incarnation of the head


@record
class Term:
    """A new term begins at `version`: tokens of later versions of older terms are void.

    A generator ends samples with such tokens, reports SampleFailed(lost_timeline), and stops decoding with weights of
    such a version.
    """

    term: int
    version: int


@record
class Rejoin:
    """The head does not know the receiver: discard all work of the head, then send Join and Ready again.

    A learner cannot discard its state. It reports its version to a new incarnation of the head (BeginTerm). Otherwise,
    and whenever `anew` is set, it exits and restarts as a new incarnation, with `undo` from its checkpoint on disk.
    """

    reason: Sentence
    life: int = 0  # incarnation of the head
    anew: bool = False
    undo: bool = False


@record
class Reassign:
    """The split of ranks has changed: exit for a restart. The supervisor starts the actor of the new split."""

    reason: Sentence


@record
class LeaveRequest:
    """A generator asks to leave: it finishes its samples and gets no new ones. The head then sends Stop."""


@record
class PeerList:
    """Current endpoints of listening peers. Sent after every Join; names the incarnation of the head."""

    names: list[str] = frame("names")
    endpoints: list[str] = frame("names")
    life: int = 0  # incarnation of the head


@record
class Prompt:
    """Permission to sample one group. Only the gate issues it."""

    uid: int  # 0, 1, 2, ... in order of admission; evaluation prompts have their own numbers
    attempt: int  # 0 at first, +1 with each new lease; those of a term begin at term * ATTEMPTS
    born: int  # version that its generator last reported when the prompt was first leased
    samples: list[int]  # indices within the group to sample
    evaluation: Name  # "" for training, otherwise the name of the evaluation; its samples are never trained
    row: str = frame("text")  # JSON object: one row of the data
    more: bool = False  # eta = 0: more prompts of this batch follow; start to decode after the last one
    lease: Name = ""  # id of this lease; results repeat it


@record
class Trajectory:
    """One sample: all tokens, with log-prob and version of each sampled one.

    An episode may have several trajectories: sequences of tokens of their own, such as a rewritten history or a
    sub-agent's. They are one sample: leased, scored, acknowledged and trained together.
    """

    uid: int
    sample: int
    attempt: int
    evaluation: Name
    generator: Name  # name of the generator that sampled it
    finish: Name  # Finish of the last completion
    segments: list[list[int]]  # [[n_given, n_sampled], ...] in order; one pair for a single turn
    spans: list[list[int]]  # [[version, n_tokens], ...] over the sampled tokens, in order
    seconds: float  # from submission to the last token
    term: int  # term of its generator at completion
    ids: bytes = frame("int32")  # (T,) given and sampled tokens
    logps: bytes = frame("float32")  # (n_sampled,) log-prob of each sampled token under its own version
    prompt_text: str = frame("text")
    text: str = frame("text")  # the completion (all turns), read by the reward
    row: str = frame("text")  # JSON object: the data row, so that rewards are stateless
    turns: str = frame("text", default="")  # several turns: JSON [[given, sampled], ...], texts for people
    fields: bytes = frame("fields", default=b"")  # numbers by name that the workflow adds (sample_fields.py)
    lease: Name = ""  # as in its Prompt
    trajectories: list[int] = dataclasses.field(default_factory=list)  # that each segment extends; []: all the same
    roles: Roles = ""  # of each trajectory of the episode; "": they have none


@record
class Scored:
    """A trajectory with its verdict. `correct` and `reward` are valid only for the status "value".

    In the head's ledger the reward of a timeout or error is the configured one, if any.
    """

    status: Name  # VerdictStatus
    reward: float
    correct: bool | None  # correctness, for tasks that define it
    error: Sentence  # text of a timeout or error, otherwise ""
    score_s: float
    uid: int
    sample: int
    attempt: int
    evaluation: Name
    generator: Name
    finish: Name
    segments: list[list[int]]
    spans: list[list[int]]
    seconds: float
    term: int
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    prompt_text: str = frame("text")
    text: str = frame("text")
    turns: str = frame("text", default="")  # as in the Trajectory
    fields: bytes = frame("fields", default=b"")  # as in the Trajectory
    lease: Name = ""  # as in the Trajectory
    parts: Parts = ""  # JSON object: rewards by name that the score reports (core/parts/reward_parts.py); "" for none
    trajectories: list[int] = dataclasses.field(default_factory=list)  # as in the Trajectory
    roles: Roles = ""  # as in the Trajectory; their rewards are among the parts

    @property
    def n_sampled(self) -> int:
        return sum(n for _, n in self.segments)


@record
class Group:
    """All samples of a prompt that have a reward, for `reward.group`. The head sends it to one reward actor."""

    uid: int
    attempt: int
    prompt_text: str = frame("text")
    row: str = frame("text")  # as in the Prompt
    samples: str = frame("text")  # JSON [{"sample", "completion", "reward", "correct"}, ...]


@record
class GroupScored:
    """The verdict of `reward.group` on a group: a reward for each of its samples, or an error."""

    status: Name  # VerdictStatus
    rewards: list[float]  # in the order of `Group.samples`; empty unless the status is "value"
    error: Sentence
    score_s: float
    uid: int
    attempt: int


@record
class Sampled:
    """A generator has sent a sample to a reward: its slot is free."""

    uid: int
    sample: int
    attempt: int
    evaluation: Name
    n_tokens: int


@record
class Partial:
    """All tokens so far of one unfinished training sample.

    A generator sends it to the head at a weight update, and again after a Rejoin for all samples that it held. The head
    sends it to a generator just before the Prompt that leases the sample again (same attempt).
    """

    uid: int
    sample: int
    attempt: int
    term: int  # term of the sender
    segments: list[list[int]]  # [[n_given, n_sampled]] of the first turn
    spans: list[list[int]]
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    lease: Name = ""  # as in its Prompt, if sent by a generator

    @property
    def n_sampled(self) -> int:
        return sum(n for _, n in self.segments)


@record
class SampleFailed:
    """A generator cannot sample this group (the workflow raised, or the prompt is too long)."""

    uid: int
    attempt: int
    evaluation: Name
    reason: Name  # Refund
    error: Sentence


@record
class Ack:
    """The head has the scored trajectory: the generator may delete its copy."""

    uid: int
    sample: int
    attempt: int
    evaluation: Name


@record
class Cancel:
    """Stop sampling this attempt and discard it."""

    uid: int
    attempt: int
    evaluation: Name = ""


@record
class BeginTerm:
    """Learner rank 0 begins a term: weights initial, of a checkpoint or copy (`restored`), or its own (`lives_on`)."""

    version: int
    digest: Name
    life: int = 0  # incarnation of the head that it has joined
    lives_on: bool = False
    sealed: list[int] = dataclasses.field(default_factory=list)  # versions with complete checkpoints on disk
    max_lag: int | None = None  # of the tokens trained by this incarnation, and by that of the copy
    restored: bool = False


@record
class Checkpointed:
    """The checkpoint of `version` is complete on disk. Rank 0 only."""

    version: int
    folder: Folder


@record
class BatchRequest:
    """A learner rank is ready for the batch of this step (0, 1, 2, ...)."""

    step: int
    life: int = 0  # incarnation of the head that it asks


@record
class ShardItem:
    """One trajectory of a rank's shard. `clock` is c: updates finished when the batch was taken."""

    step: int
    clock: int
    group: int  # index of its group within the batch, over all ranks
    n_groups: int  # groups in the whole batch, over all ranks
    uid: int
    sample: int
    reward: float
    correct: bool | None
    finish: Name
    segments: list[list[int]]
    spans: list[list[int]]
    ids: bytes = frame("int32")
    logps: bytes = frame("float32")
    text: str = frame("text")
    fields: bytes = frame("fields", default=b"")  # as in the Trajectory
    born: int = 0  # version at which its prompt was admitted: its stage
    trajectories: list[int] = dataclasses.field(default_factory=list)  # as in the Trajectory
    source: Name = ""  # name of the [[data.source]] of its row: its limits and temperature
    roles: Roles = ""  # as in the Trajectory
    rewards: list[float] = dataclasses.field(default_factory=list)  # of each trajectory, if the episode has roles


@record
class ShardEnd:
    """The shard is complete. n_items may be 0: the rank still takes part in the step."""

    step: int
    clock: int
    n_items: int
    n_groups: int
    last: bool  # no further batch follows


@record
class NoBatch:
    """No batch for this step: the run or its data has ended, or the job drains."""

    step: int
    drained: bool  # the run continues later: write a checkpoint regardless of the settings


@record
class UpdateDone:
    """An update is finished and its snapshot taken. version = updates finished so far. Rank 0 only."""

    version: int
    stats: dict[str, float]  # metrics of the step
    digest: Name  # of the snapshot
    kept: bool = False  # a checkpoint of this version is being written
    held: bool = False  # the supervisors of all learner ranks hold a copy of it


@record
class PushBegin:
    """Take part in a push of `version`: learner rank 0 is the root, members follow in this order."""

    push: int  # 0, 1, 2, ...
    version: int
    view: int  # membership view: the same number means the same process group
    members: list[str] = frame("names")
    store: Address  # "host:port" of the TCPStore at learner rank 0
    timeout_s: float
    term: int = 0
    base: int = 0  # version at which the term began, for members that missed Term


@record
class PushDone:
    """This member (or the root) completed the push: weights verified and, on a member, swapped in."""

    push: int
    version: int
    digest: Name  # of the weights held now
    receive_s: float
    stall_s: float  # pause of decoding at the swap
    sent_bytes: int = 0  # to each member; 0 where members copied from shared memory
    delta_from: int | None = None  # version that the delta started from; None: all bytes


@record
class PushBroken:
    """This member (or the root) could not complete the push."""

    push: int
    version: int
    error: Sentence


@record
class Finished:
    """A learner rank has ended its loop and written its output."""

    checkpoint: Folder  # folder of the last checkpoint, "" if none
    model: Folder  # folder of the exported model, "" if none


@record
class Failure:
    """An actor is about to exit with an error."""

    error: Sentence


@record
class Stop:
    """Exit now, cleanly."""

    reason: Sentence


@record
class Evict:
    """Exit now as failed: the generator completes no push, or no sample. Its supervisor restarts it."""

    reason: Sentence
    for_good: bool = False  # restarts have not helped: its supervisor does not restart it


Message = (
    Join
    | Ready
    | Heartbeat
    | Disconnected
    | HeadHeartbeat
    | Term
    | Rejoin
    | Reassign
    | LeaveRequest
    | PeerList
    | Prompt
    | Trajectory
    | Scored
    | Group
    | GroupScored
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
