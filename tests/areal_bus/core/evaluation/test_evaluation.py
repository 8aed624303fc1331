"""The evaluation that is open: what comes too late for it was right when it was sent."""

import pytest

from areal_bus.core.evaluation.evaluation import Evaluation, Evaluations
from areal_bus.errors import ImpossibleEvent, LateEvent


def test_news_of_a_closed_evaluation_are_late_and_of_no_evaluation_impossible() -> None:
    evaluations = Evaluations()
    evaluations.open = Evaluation("before", 0, 1, [])
    assert evaluations.named("before").name == "before"
    assert evaluations.close() is not None  # it has no problems
    with pytest.raises(LateEvent, match="'before' is not open"):
        evaluations.named("before")
    with pytest.raises(ImpossibleEvent, match="'after' is not open") as found:
        evaluations.named("after")
    assert not isinstance(found.value, LateEvent)
