"""Unguessable lease ids: a result is accepted only with the id of its lease.

The head derives the ids from a secret and stores none. It sends an id to the holder of the lease only, in the Prompt.
The holder sends it to a reward with each sample, and the verdict returns it. So a reward can score only samples that
it received, and a generator can report only samples of prompts that it holds.
"""

from hashlib import blake2b
from hmac import compare_digest

from areal_bus import messages as m
from areal_bus.errors import ImpossibleEvent

ID_BYTES = 8


class LeaseIds:
    """The lease ids of one job: the same for all incarnations of its head."""

    def __init__(self, secret: bytes) -> None:
        """Without a secret all ids are "": for heads without a network, as in the simulator."""
        self._secret = secret

    def of(self, evaluation: str, uid: int, attempt: int) -> str:
        """The id of the lease of one group, in hexadecimal digits."""
        if not self._secret:
            return ""
        return blake2b(f"{uid}.{attempt}.{evaluation}".encode(), key=self._secret, digest_size=ID_BYTES).hexdigest()

    def check(self, message: m.Scored | m.Partial) -> None:
        """Raises ImpossibleEvent unless it shows the id of the lease that it is about."""
        evaluation = message.evaluation if isinstance(message, m.Scored) else ""
        if not compare_digest(message.lease.encode(), self.of(evaluation, message.uid, message.attempt).encode()):
            raise ImpossibleEvent(
                "a result must carry the id of its lease, which only its generator and the rewards that it sends to "
                f"have; this one, of prompt {message.uid} at attempt {message.attempt}, carries another id"
            )
