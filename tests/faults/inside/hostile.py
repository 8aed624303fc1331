"""A generator that completes its pushes and takes leases, and whose results and reports are all wrong.

`sitecustomize.py` puts it into the process of the guest that the file `hostile` of a test's folder names.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

HEAD = "head"


def wrong(sample: Any) -> Iterator[Any]:
    """Samples of its own lease that no engine can have made. None: it delivers nothing."""
    n_given, version = sample.segments[0][0], sample.spans[0][0]
    ids, more = sample.ids, 400
    yield None  # first, so that a lease times out however few it is given
    last = ids[:-4] + struct.pack("<i", 2**31 - 1)
    yield replace(sample, ids=last)
    yield replace(
        sample, segments=[[n_given, more]], spans=[[version, more]], ids=ids[: 4 * n_given] + bytes(4 * more),
        logps=struct.pack("<f", -1.0) * more,
    )  # fmt: skip
    yield replace(sample, logps=struct.pack("<f", 0.5) * (len(sample.logps) // 4))
    yield replace(sample, logps=struct.pack("<f", -1e30) * (len(sample.logps) // 4))
    yield replace(sample, spans=[[2**40, len(sample.logps) // 4]])
    yield replace(sample, term=sample.term + 1)
    yield replace(sample, uid=sample.uid + 1)
    yield replace(sample, lease="0" * 16)


class Hostile:
    """Its results are replaced in `add`; `act` sends reports without end."""

    def __init__(self) -> None:
        self.n = 0
        self._kinds = itertools.cycle(range(9))

    def result(self, sample: Any) -> Any:
        return next(itertools.islice(wrong(sample), next(self._kinds), None))

    def act(self, generator: Any, m: Any) -> None:
        """Send 200 heartbeats at once, failures of prompts that others hold, and repeated joins."""
        self.n += 1
        bus, uid = generator._bus, self.n % 200
        bus.send_all((HEAD, m.Heartbeat(self.n, 2**40, f"note {self.n}")) for _ in range(200))
        for reason in ("sampling_error", "prompt_too_long", "lost_timeline"):
            bus.send(HEAD, m.SampleFailed(uid, 0, "", reason, "so it says"))
        bus.send(HEAD, m.Sampled(uid, 0, 0, "", 1))
        bus.send(HEAD, m.Partial(uid, 0, 0, 0, [[1, 1]], [[0, 1]], bytes(8), bytes(4)))
        bus.send(HEAD, m.PushDone(0, 0, "forged", 0.0, 0.0))
        bus.send(HEAD, m.Failure(f"it fails {self.n} times"))
        for join in [one for one in generator._session._sent if isinstance(one, m.Join)]:
            bus.send(HEAD, replace(join, again=self.n))
