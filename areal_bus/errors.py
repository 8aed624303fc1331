"""Errors by what a caller can do about them: the rule comes first in every text, the values after it."""


class ArealBusError(Exception):
    """Everything this project raises on purpose."""


class ConfigError(ArealBusError):
    """The user's input cannot run as it stands; the text says what to change. Exit code 2."""


class GateShut(ArealBusError):
    """No credit is left: ask again after a publish or a refund."""


class ImpossibleEvent(ArealBusError):
    """An event that the rules exclude (a result nobody was asked for, a clock going back): refuse and journal it."""


class LateEvent(ImpossibleEvent):
    """One that was right when it was sent: its prompt has left since. To be journalled, and nothing for people."""


class WireError(ArealBusError):
    """Bytes that are no message of this job: drop, count by reason (one word) and name the peer once."""

    def __init__(self, sentence: str, reason: str = "format") -> None:
        super().__init__(sentence)
        self.reason = reason


class PushFailed(ArealBusError):
    """A weight push did not complete: fence the member and let the clock go on."""


class Evicted(ArealBusError):
    """The head parts with this process, which completes no push: its next incarnation may do better."""


class NonFinite(ArealBusError):
    """A loss or gradient is not finite: nothing is pushed or kept of it; the batch is saved and the run stops."""


class EngineError(ArealBusError):
    """The inference engine cannot serve this request (for example, a prompt over its limit)."""


class EngineLost(ArealBusError):
    """The server that samples is gone, wrong or silent: this process ends, and comes back with a new one."""


class PromptTooLong(EngineError):
    """A prompt is over data.max_prompt_tokens: refund it, never cut it."""


class WorkflowError(ArealBusError):
    """A workflow broke a rule of its protocol, or its agent failed: refund the group and show the sentence."""

    def __init__(self, sentence: str, *, place: str = "", trace: str = "") -> None:
        """`place` is FILE:LINE in the user's code and `trace` the traceback, of an agent in another process."""
        super().__init__(sentence)
        self.place, self.trace = place, trace


class UserCodeFailed(ArealBusError):
    """Code of the user's failed again where it had failed before, without progress in between: the job ends."""


class CheckpointError(ArealBusError):
    """A checkpoint is missing, torn or not what its manifest says."""


class ActorFailed(ArealBusError):
    """An actor of this job ended with an error: the job ends and names it."""


class Restart(ArealBusError):
    """This process must come back and go on from the checkpoint; that is no failure of its own. Exit code 75."""
