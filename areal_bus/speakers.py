"""Which role says what to the head; knows no state. A key says who somebody is, this what such a one may say."""

from areal_bus import messages as m
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role

SPEAKERS: dict[type, Role] = {  # what is not here may come from any member, or has a rule of its own
    m.Sampled: Role.GENERATOR,
    m.Unsampled: Role.GENERATOR,
    m.Partial: Role.GENERATOR,
    m.Scored: Role.REWARD,
    m.BatchRequest: Role.LEARNER,
    m.UpdateDone: Role.LEARNER,
    m.Finished: Role.LEARNER,
}


def check_speaker(role: Role, message: m.Message) -> None:
    """Raises ImpossibleEvent when that is not for this role to say."""
    speaker = SPEAKERS.get(type(message), role)
    if role is not speaker:
        raise ImpossibleEvent(f"{type(message).__name__} is for a {speaker} to say; this is a {role}")
