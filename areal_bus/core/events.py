"""Names of all journal events. docs/journal.md describes their fields."""

from enum import StrEnum


class Event(StrEnum):
    START = "start"  # every process: first line
    END = "end"  # every process: last line of an orderly end
    SPANS = "spans"  # seconds by label since the last such line; labels do not overlap
    FAILED = "failed"
    NOTE = "note"
    PROFILE = "profile"  # a recording by torch.profiler is written
    # head: membership
    JOINED = "joined"
    MEMBER = "member"  # a change of state
    # head: terms
    TERM = "term"  # a term of the learner begins: the version and the open prompts that it starts from
    SPLIT = "split"  # how many ranks learn and sample, from this version on
    STAGE = "stage"  # a stage of [[run.stage]] begins, or a term begins within it
    # head: prompts
    ADMIT = "admit"
    LEASE = "lease"
    SAMPLED = "sampled"
    SCORED = "scored"
    REFUSED = "refused"  # an impossible or late event, by rule
    UNSAMPLED = "unsampled"  # a generator failed at a prompt, which goes to another one
    REFUND = "refund"
    COMPARE = "compare"  # a group with all its verdicts goes to a reward, for reward.group
    COMPARED = "compared"  # the verdict of reward.group
    READY = "ready"  # a whole group is scored
    BATCH = "batch"
    TRAJECTORY = "trajectory"  # one line a trajectory of a batch
    UPDATE = "update"
    COLLAPSE = "collapse"  # forecast: why, and what the head does
    ADAPT = "adapt"  # the planner wants another split of ranks
    PUBLISH = "publish"
    EVALUATION = "evaluation"
    # head: who waits for whom
    WAIT = "wait"  # one line for each wait, when the set of waits changed
    STALL = "stall"  # the whole ring, or one busy process, made no progress for long
    # pushes: head, learner and generator
    PUSH = "push"
    PUSHED = "pushed"
    PUSH_BROKEN = "push_broken"
    # generator
    REQUEST = "request"
    COMPLETION = "completion"
    # reward
    SCORE = "score"
    GROUP_SCORE = "group_score"
    CHECK = "check"  # a second grader scored a sample
    # learner
    MODEL = "model"  # its size, dtype and device
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    WARMUP = "warmup"
    CALL = "call"  # front of `areal-bus serve`: a client has the result of a call
