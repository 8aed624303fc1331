"""Exit codes of an actor's process: what its supervisor is to do next; knows no process."""

from areal_bus.errors import ActorFailed, CheckpointError, ConfigError, NonFinite, Restart, UserCodeFailed

DONE = 0  # told to stop by the head: the job is over. If it is not, the actor comes back, and that is counted
CRASHED = 1  # so does any other code and any signal: it comes back as a new incarnation, and is counted
BAD_INPUT = 2  # the user's input cannot run: so does no restart
OVER = 3  # the job has ended badly, for a reason that a restart would meet again
LEFT = 76  # asked to leave (SIGUSR1), and has left: it does not come back
RESTART = 75  # come back as a new incarnation; no failure, not counted


def code_of(error: Exception) -> int:
    """How a process ends by this error."""
    if isinstance(error, ConfigError):
        return BAD_INPUT
    if isinstance(error, ActorFailed | NonFinite | CheckpointError | UserCodeFailed):
        return OVER
    return RESTART if isinstance(error, Restart) else CRASHED
