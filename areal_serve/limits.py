"""What the sessions have in flight, and its limits: one client does not take the server's memory from the others."""

from collections import Counter
from collections.abc import Callable

from areal_serve.rejection import Rejected

MOST = {"requests": 4096, "bytes": 256 << 20, "tokens": 1 << 28}  # of one session: tokens that it asks to be sampled
MOST_SESSIONS = 4  # so many times as much for all sessions together
ALL = ""  # in place of a session


class InFlight:
    """Counts requests that are accepted and not finished."""

    def __init__(self) -> None:
        self._used: dict[str, Counter[str]] = {}

    def take(self, session_id: str, *, n_bytes: int, n_tokens: int = 0, is_urgent: bool = False) -> Callable[[], None]:
        """Count a request until the returned function is called. One that others wait for (`is_urgent`), or that is
        alone, always has room. Raises Rejected.
        """
        asked = {"requests": 1, "bytes": n_bytes, "tokens": n_tokens}
        if not is_urgent:
            self._check(session_id, f"session {session_id} has", asked, 1)
            self._check(ALL, "all sessions together have", asked, MOST_SESSIONS)
        for id in (session_id, ALL):
            self._used.setdefault(id, Counter()).update(asked)

        def give_back() -> None:
            for id in (session_id, ALL):
                self._used[id].subtract(asked)
                if not self._used[id]["requests"]:
                    del self._used[id]

        return give_back

    def _check(self, id: str, whose: str, asked: dict[str, int], times: int) -> None:
        used = self._used.get(id, Counter())
        for name, most in MOST.items():
            if used["requests"] and used[name] + asked[name] > most * times:
                raise Rejected(
                    f"too many {name} in flight: {whose} {used[name]}, this request adds {asked[name]}, at most "
                    f"{most * times}: wait for results before you send more",
                    status=429,
                )
