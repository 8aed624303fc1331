import pytest

from areal_serve.limits import MOST, MOST_SESSIONS, InFlight
from areal_serve.rejection import Rejected


@pytest.mark.parametrize(("name", "size"), [("requests", 1), ("bytes", 1 << 20), ("tokens", 1 << 24)])
def test_session_is_refused_at_its_limit_and_accepted_after_a_result(name: str, size: int) -> None:
    in_flight = InFlight()
    n_bytes, n_tokens = (size if name == one else 0 for one in ("bytes", "tokens"))
    given_back = [in_flight.take("a", n_bytes=n_bytes, n_tokens=n_tokens) for _ in range(MOST[name] // size)]
    with pytest.raises(Rejected, match=f"too many {name} in flight: session a has {MOST[name]}") as refused:
        in_flight.take("a", n_bytes=n_bytes, n_tokens=n_tokens)
    assert refused.value.status == 429
    in_flight.take("b", n_bytes=n_bytes, n_tokens=n_tokens)
    in_flight.take("a", n_bytes=n_bytes, n_tokens=n_tokens, is_urgent=True)()
    given_back.pop()()
    in_flight.take("a", n_bytes=n_bytes, n_tokens=n_tokens)


def test_all_sessions_together_are_refused_at_their_limit() -> None:
    in_flight = InFlight()
    for number in range(MOST_SESSIONS):
        in_flight.take(f"{number}", n_bytes=MOST["bytes"])
    with pytest.raises(Rejected, match="all sessions together have"):
        in_flight.take("another", n_bytes=1)


def test_request_larger_than_the_limit_is_accepted_alone() -> None:
    in_flight = InFlight()
    give_back = in_flight.take("a", n_bytes=0, n_tokens=MOST["tokens"] + 1)
    with pytest.raises(Rejected, match="too many tokens"):
        in_flight.take("a", n_bytes=0, n_tokens=1)
    give_back()
    in_flight.take("a", n_bytes=0, n_tokens=1)
