"""Where every prompt is: leases, attempts, duplicates, conservation."""

from dataclasses import replace

import pytest

from areal_bus.core.parts.ledger import Ledger, PromptState
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Refund, Sampled, Scored
from tests.areal_bus.core import test_head


def scored(uid: int, sample: int, attempt: int = 0, status: str = "value") -> Scored:
    return replace(test_head.scored(uid, sample, attempt), status=status)


def ledger_with(n_prompts: int = 1, n_samples: int = 2) -> Ledger:
    ledger = Ledger()
    for _ in range(n_prompts):
        ledger.admit(born=0, n_samples=n_samples, holder="g")
    return ledger


def finish(ledger: Ledger, uid: int) -> None:
    for sample in ledger.open[uid].missing:
        ledger.deliver(scored(uid, sample, ledger.open[uid].attempt))


def test_a_prompt_is_scoring_when_all_its_samples_left_the_generator() -> None:
    ledger = ledger_with()
    for sample in (0, 1):
        ledger.sampled(ledger.open[0].holder or "", Sampled(0, sample, 0, "", 3))
    assert ledger.open[0].state is PromptState.SCORING


@pytest.mark.parametrize(
    "event",
    [
        scored(7, 0),  # never admitted
        scored(0, 0),  # the same verdict twice
        scored(0, 9),  # no such sample
        scored(0, 1, attempt=1),  # an attempt nobody leased
    ],
)
def test_impossible_results_are_refused_and_change_nothing(event: Scored) -> None:
    ledger = ledger_with()
    ledger.deliver(scored(0, 0))
    with pytest.raises(ImpossibleEvent):
        ledger.deliver(event)
    assert ledger.open[0].scored.keys() == {0}
    assert ledger.counts[PromptState.LEASED] == 1


def test_trained_and_refunded_prompts_are_closed() -> None:
    ledger = ledger_with(2)
    finish(ledger, 0)
    ledger.take(1, batch=0)
    ledger.trained(0)
    ledger.refund(1, Refund.END_OF_RUN)
    for uid in (0, 1):
        with pytest.raises(ImpossibleEvent, match="closed"):
            ledger.deliver(scored(uid, 0))
    assert ledger.counts[PromptState.TRAINED] == ledger.counts[PromptState.REFUNDED] == 1
    assert ledger.refunds == {Refund.END_OF_RUN: 1}
    with pytest.raises(ImpossibleEvent):
        ledger.trained(0)
    with pytest.raises(ImpossibleEvent):
        ledger.refund(1, Refund.END_OF_RUN)
