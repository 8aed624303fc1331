"""The clock, the credits and the demand bound."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data.source import check_total
from areal_bus.config.data import DataConfig
from areal_bus.config.sections import Config
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError, GateShut, ImpossibleEvent

ACTS = st.lists(st.tuples(st.sampled_from(["admit", "take", "update", "publish", "refund"]), st.integers(0, 9)))


def step(gate: Gate, *borns: int, publish: bool = True) -> None:
    """A whole training step over prompts born at these versions."""
    gate.take(borns)
    gate.finish_update(gate.u + 1)
    if publish:
        gate.publish(gate.u)


def test_gate_shuts_when_every_credit_is_out() -> None:
    gate = Gate(batch_size=2, eta=1)
    for _ in range(4):
        gate.admit(0)
    with pytest.raises(GateShut, match=r"\(eta \+ 1\) \* B = 4"):
        gate.admit(0)


@pytest.mark.parametrize(
    "impossible",
    [
        lambda g: g.refund(0),
        lambda g: g.admit(1),
        lambda g: g.admit(-1),
        lambda g: g.take([]),
        lambda g: g.take([0]),
        lambda g: g.finish_update(1),
        lambda g: g.publish(1),
        lambda g: g.publish(-1),
    ],
)
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_impossible_events_raise_and_change_nothing(impossible: object, policy: StalenessPolicy) -> None:
    gate = Gate(batch_size=1, eta=0, policy=policy)
    with pytest.raises(ImpossibleEvent):
        impossible(gate)  # type: ignore[operator]
    assert (gate.u, gate.v, gate.w, gate.live, gate.in_training) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("policy", [StalenessPolicy.HOLD, StalenessPolicy.DROP])
def test_a_batch_with_a_prompt_over_eta_is_impossible_where_ages_are_bounded(policy: StalenessPolicy) -> None:
    gate = Gate(batch_size=1, eta=1, policy=policy)
    gate.admit(0)
    gate.admit(0)
    step(gate, 0)
    gate._born[-1] = gate._born.pop(0)  # as no admission can have made it
    with pytest.raises(ImpossibleEvent, match="c - born <= 1"):
        gate.take([-1])


def demand(gate: Gate, live: Counter[int], at: int) -> bool:
    """The bound as docs/staleness.md writes it, by a scan: due by D are at most (D - w + 1) * B for all D >= w."""
    return all(
        sum(n for born, n in live.items() if born + gate.eta <= due_by) <= (due_by - at + 1) * gate.batch_size
        for due_by in range(at, gate.u + gate.eta + 2)
    ) and all(born + gate.eta >= at for born in live)


@given(st.integers(1, 4), st.integers(0, 4), ACTS)
def test_the_demand_bound_by_counts_is_that_of_a_scan(batch_size: int, eta: int, acts: list[tuple[str, int]]) -> None:
    """Any admissions, batches and refunds: `hold` says yes exactly when the bound holds afterwards."""
    gate = Gate(batch_size=batch_size, eta=eta, policy=StalenessPolicy.HOLD)
    live: Counter[int] = Counter()
    for act, choice in acts:
        if act == "admit":
            born = max(0, gate.u - choice)
            fits = gate.free > 0 and demand(gate, live + Counter([born]), gate.w)
            assert gate.may_admit(born) == fits
            if fits:
                gate.admit(born)
                live[born] += 1
        elif act == "refund" and live:
            born = sorted(live)[choice % len(live)]
            gate.refund(born)
            live = +(live - Counter([born]))
        elif act == "take" and live:
            wanted = sorted(live.elements())[choice % live.total() :][:batch_size]
            fits = demand(gate, live - Counter(wanted), gate.w + 1)
            assert gate.may_take(len(wanted), Counter(wanted)) == fits
            if fits and gate.w == gate.u:
                gate.take(wanted)
                live = +(live - Counter(wanted))
            else:
                is_early = f"batch {gate.w} is taken when update {gate.w} is next"
                with pytest.raises(
                    ImpossibleEvent, match="must leave prompts that others can train" if gate.w == gate.u else is_early
                ):
                    gate.take(wanted)
        elif act == "update" and gate.w > gate.u:
            gate.finish_update(gate.w)
        elif act == "publish":
            gate.publish(gate.u)
        assert demand(gate, live, gate.w)


def test_data_that_never_fills_a_batch_is_refused_at_the_start() -> None:
    config = Config(data=DataConfig(task="sums", batch_size=8, drop_last=True))
    with pytest.raises(ConfigError, match=r"no batch can ever be full.*drop_last = false"):
        check_total(config.data, [7])
    check_total(config.data, [14])
    check_total(config.data, [7, None])
