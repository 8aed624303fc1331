"""One actor of a rank, as its supervisor sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.runtime.context import Context
from actors.runtime.user_failures import Fault
from areal_bus.messages import Role
from launch.run.process import ActorProcess
from launch.run.restart_policy import RestartBackoff, StallTimer


@dataclass(slots=True)
class SupervisedActor:
    """One actor of this rank over all its incarnations."""

    context: Context  # of the current or next incarnation
    gpus: Sequence[int]
    backoff: RestartBackoff
    stall_timer: StallTimer  # of the current incarnation; checked for the head only
    child: ActorProcess | None = None  # None: it waits for a restart, or is done
    due: float = 0.0  # time of the restart
    stopped: bool | None = None  # it ended with 0 and waits for RUN/summary.json; the value: whether it progressed
    is_done: bool = False
    is_parked: bool = False  # this rank runs no learner or generator in the present split
    misplaced_since: float | None = None  # when the split was seen to have another actor here
    fault: Fault | None = None  # where in the user's code the incarnation before ended, if it did

    @property
    def is_head(self) -> bool:
        return self.context.role == Role.HEAD
