import numpy as np
import pytest

from areal_serve.versions import BASE, KEPT, Versions, mark
from areal_serve.wire import Datum, Numbers, PassRequest

PROMPT, FIRST, REPLY, SECOND = [5, 9, 4], [7, 8], [3, 3, 6], [11]
TURNS = [*PROMPT, *FIRST, *REPLY, *SECOND]


def datum(tokens: list[int], trained: list[int]) -> Datum:
    """A datum as clients make them: the tokens but the last are read; `trained`: places with an advantage."""
    advantages = np.isin(np.arange(1, len(tokens)), trained).astype(np.float32)
    return Datum(np.array(tokens[:-1]), {"target_tokens": np.array(tokens[1:]), "advantages": advantages})


def passed(*data: Datum, loss_fn: str = "ppo") -> PassRequest:
    return PassRequest("m", 1, loss_fn, data=list(data))


@pytest.fixture
def versions() -> Versions:
    found = Versions()
    found.add("m", 3, [mark(PROMPT, FIRST)])
    found.add("m", 5, [mark([*PROMPT, *FIRST, *REPLY], SECOND)])
    return found


def test_conversation_is_as_old_as_the_oldest_turn_that_is_trained(versions: Versions) -> None:
    assert versions.oldest(passed(datum(TURNS, [3, 4, 8]))) == (0, 3)
    assert versions.oldest(passed(datum(TURNS, [4, 8]))) == (0, 3)
    assert versions.oldest(passed(datum(TURNS, [8]))) == (0, 5)
    assert versions.oldest(passed(datum(TURNS, [5, 6, 7]))) is None
    assert versions.oldest(passed(datum(TURNS, [8]), datum(TURNS[:5], [3]))) == (1, 3)


def test_every_position_counts_for_a_loss_with_a_term_at_each(versions: Versions) -> None:
    assert versions.oldest(passed(datum(TURNS, []), loss_fn="dro")) == (0, 3)
    assert versions.oldest(passed(datum(TURNS, []), loss_fn="cross_entropy")) == (0, 3)  # weights are 1 by default


def test_other_tokens_and_tokens_of_another_model_are_unknown(versions: Versions) -> None:
    assert versions.oldest(passed(datum([*PROMPT, 8, 7], [3, 4]))) is None
    assert versions.oldest(passed(datum([1, *TURNS], [4, 5, 9]))) is None
    versions.add("other", 1, [mark([1], [2])])
    assert versions.oldest(passed(datum([1, 2], [1]))) is None
    versions.add(BASE, 0, [mark([1], [2])])
    assert versions.oldest(passed(datum([1, 2], [1]))) == (0, 0)


def test_newest_version_counts_when_two_have_sampled_the_same(versions: Versions) -> None:
    versions.add("m", 9, [mark(PROMPT, FIRST), mark([1], [2])])
    versions.add("m", 4, [mark(PROMPT, FIRST), mark([1], [3])])
    assert versions.oldest(passed(datum(TURNS[:5], [3]))) == (0, 9)
    assert versions.oldest(passed(datum([1, 3], [1]))) == (0, 4)


@pytest.mark.parametrize("targets", [np.zeros((4, 2), np.int64), np.zeros(0, np.int64), np.array(3)])
def test_datum_of_another_form_is_unknown(versions: Versions, targets: Numbers) -> None:
    assert versions.oldest(passed(Datum(np.array(TURNS[:4]), {"target_tokens": targets}))) is None
    assert versions.oldest(passed(Datum(np.empty(0, np.int64), {}))) is None


def test_memory_of_sequences_is_bounded(versions: Versions) -> None:
    versions.add("m", 6, [(number, 1) for number in range(KEPT)])
    assert versions.oldest(passed(datum(TURNS, [3]))) is None
