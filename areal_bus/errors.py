"""Exception classes, one for each possible reaction of a caller. Texts give the rule first, then the values."""


class ArealBusError(Exception):
    """Base class of all errors that this project raises."""


class ConfigError(ArealBusError):
    """Invalid user input; the text says what to change. Exit code 2."""


class GateShut(ArealBusError):
    """The gate has no credit left: try again after a publish or a refund."""


class ImpossibleEvent(ArealBusError):
    """An event that the rules exclude (an unrequested result, a clock that goes back): reject and journal it."""


class LateEvent(ImpossibleEvent):
    """A result of a prompt that has left the ring since it was sent: journal it without a log line."""


class WireError(ArealBusError):
    """Bytes that are not a message of this job: drop them, count them by reason, log the peer once."""

    def __init__(self, sentence: str, reason: str = "format") -> None:
        super().__init__(sentence)
        self.reason = reason


class EndpointTaken(ArealBusError):
    """A bus cannot listen: its port or path is taken. It may be free later."""


class PushFailed(ArealBusError):
    """A weight push did not complete: fence the member; the clock continues."""


class Evicted(ArealBusError):
    """The head evicts this generator after repeated failed pushes or leases; the supervisor restarts it."""


class EvictedForGood(ArealBusError):
    """The head evicts this generator, and restarts have not helped: the supervisor does not restart it."""


class NonFinite(ArealBusError):
    """A loss or gradient is not finite: discard the update, save the batch and stop the run."""


class EngineError(ArealBusError):
    """The inference engine cannot serve this request (for example, a prompt over its limit)."""


class SettingRefused(EngineError):
    """The engine does not sample with a setting of this request; with another value it may serve it."""


class EngineLost(ArealBusError):
    """The inference server ended, is wrong or is silent: this process exits and restarts with a new server."""


class PromptTooLong(EngineError):
    """A prompt exceeds data.max_prompt_tokens: refund it. Prompts are never truncated."""


class WorkflowError(ArealBusError):
    """A workflow violated its protocol, or its agent failed: refund the group and log the text."""

    def __init__(self, sentence: str, *, place: str = "", trace: str = "") -> None:
        """`place` is FILE:LINE in the user's code; `trace` is the traceback of an agent in another process."""
        super().__init__(sentence)
        self.place, self.trace = place, trace


class UserCodeFailed(ArealBusError):
    """User code failed again at the same place, without progress in between: end the job."""


class CheckpointError(ArealBusError):
    """A checkpoint is missing, incomplete or does not match its manifest."""


class ActorFailed(ArealBusError):
    """An actor ended with an error: end the job and name the actor."""


class Restart(ArealBusError):
    """This process must restart from the checkpoint, without a failure of its own. Exit code 75."""
