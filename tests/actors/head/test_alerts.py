"""What a run says of itself while there is time to mend it: no signal, answers cut off, weights that are too uneven."""

from typing import Any

from actors.head.alerts import REPEAT_AFTER, Alert, Alerts
from areal_bus.config.sections import Config
from areal_bus.core.effects import Keep
from areal_bus.messages import Scored
from tests.support.learner_setup import settings

WELL = {"zero_advantage_share": 0.25, "truncated_share": 0.1, "ess": 0.9}


def kept(step: int | None, uid: int, *, reward: float = 0.0, text: str = "12") -> Keep:
    scored = Scored(
        status="value", reward=reward, correct=None, error="", score_s=0.0, uid=uid, sample=0, attempt=0,
        evaluation="" if step is not None else "before", generator="generator-0.0", finish="length", segments=[],
        spans=[], seconds=0.0, term=0, ids=b"", logps=b"", prompt_text=f"What is {uid} + 1?", text=text,
    )  # fmt: skip
    return Keep(scored, step=step, clock=0, n_masked=0)


def alerts(**actor: Any) -> Alerts:
    config: Config = settings(actor=actor, gconfig={"n_samples": 4, "max_new_tokens": 8})
    return Alerts(config)


def steps(those: Alerts, n: int, **figures: float) -> list[list[Alert]]:
    """Of each of n steps what is said."""
    return [those.step(WELL | figures) for _ in range(n)]


def test_three_batches_without_a_signal_are_a_warning_with_answers_to_read_and_one_at_the_end() -> None:
    those, said = alerts(), []
    those.keep(kept(None, 99))  # of an evaluation
    for step in range(4):
        for uid in (2 * step, 2 * step, 2 * step + 1):
            those.keep(kept(step, uid, text=f"an answer of step {step}"))
        said.append(those.step(WELL | {"zero_advantage_share": 1.0, "n_tokens_trained": 0.0}))
    assert [len(of_step) for of_step in said] == [0, 0, 1, 0]
    ((warning,),) = said[2:3]
    assert warning.level == "warning"
    assert warning.text.startswith("no group had a signal in 3 batches in a row")
    assert "every reward is 0" in warning.text
    assert "easier prompts" in warning.text
    assert warning.text.count("\n") == 2, "an answer a prompt"
    assert "reward 0: 'What is 4 + 1?' -> 'an answer of step 2'" in warning.text
    (last,) = those.end()
    assert last.level == "warning"
    assert last.text.startswith("none of 4 batches had a group with a signal")
    assert "'an answer of step 3'" in last.text


def test_a_run_warns_at_its_end_unless_it_has_found_a_signal() -> None:
    those = alerts()
    those.keep(kept(0, 1, reward=1.0))
    assert steps(those, 2, zero_advantage_share=1.0) == [[], []]  # too short for a streak
    assert [alert.level for alert in those.end()] == ["warning"]
    assert steps(those, 10) == [[]] * 10
    assert those.end() == []
    assert (those.n_batches, those.n_without_signal) == (12, 2)


def test_a_share_that_stays_high_is_warned_of_at_intervals_and_at_the_end() -> None:
    those = alerts()
    said = steps(those, 3 + REPEAT_AFTER, zero_advantage_share=0.88, truncated_share=0.97)
    assert [len(of_step) for of_step in said] == [0, 0, 2, *[0] * (REPEAT_AFTER - 1), 2]
    signals, cut = said[2]
    assert (signals.level, cut.level) == ("note", "note")
    assert "88% of the groups have no signal" in signals.text
    assert "97% of the answers are cut off at gconfig.max_new_tokens = 8" in cut.text
    assert [alert.text.split("%")[0] for alert in those.end()] == [
        "in the last 10 batches 88",
        "in the last 10 batches 97",
    ]
    assert steps(those, 12) == [[]] * 12
    assert those.end() == []


def test_one_odd_batch_is_no_news() -> None:
    those = alerts()
    for _ in range(5):
        assert steps(those, 2, zero_advantage_share=0.9, truncated_share=0.9) == [[], []]
        assert steps(those, 1) == [[]]


def test_an_effective_share_under_a_half_is_a_warning_at_once_that_names_the_cap() -> None:
    (first, *others) = steps(alerts(), 3, ess=0.31)
    assert [alert.level for alert in first] == ["warning"]
    assert "effective sample share is 0.31, below 0.5" in first[0].text
    assert "set actor.behav_imp_weight_cap (for example 5)" in first[0].text
    assert others == [[], []]
    ((capped,),) = steps(alerts(behav_imp_weight_cap=5.0), 1, ess=0.31)
    assert "actor.behav_imp_weight_cap = 5 bounds each weight" in capped.text
    assert steps(alerts(), 1, ess=0.5) == [[]]


def test_a_loop_of_ones_own_without_these_figures_is_left_alone() -> None:
    those = alerts()
    assert [those.step({"reward": 0.0}) for _ in range(5)] == [[]] * 5
    assert those.end() == []
