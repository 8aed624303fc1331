"""Training in virtual time (areal_lab.loops.virtual_time): the ring's events, and real updates along them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError
from areal_lab.loops.exact_lag import ExactLagLoop
from areal_lab.loops.virtual_ring import Key, Pace, VirtualRing
from areal_lab.loops.virtual_time import VirtualTimeLoop
from areal_lab.settings import VirtualTimeConfig, load
from launch.commands.main import main as launch
from tests.areal_lab.test_sweep import BASE, SMALL
from tools.offline.synchronous_reference import ReferenceStep

N_SAMPLES = 2
KEYS: dict[str, object] = {
    **{key: value for key, value in SMALL.items() if key != "run.total_train_steps"},
    "rollout.exact_lag": "[]",
    "virtual_time.seconds": 6.2,
    "virtual_time.update_s": 1.0,
    "virtual_time.token_s": 0.01,
    "evaluate.before": "false",
    "evaluate.after": "false",
    "evaluate.every_steps": 0,
}


def train(folder: Path, loop_class: type[VirtualTimeLoop | ExactLagLoop], **changes: object) -> list[ReferenceStep]:
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    config = load(BASE, [f"{key}={value}" for key, value in keys.items() if value is not None])
    loop = loop_class(config, BASE.parent, folder)
    steps = list(loop.train())
    loop.journal.close()
    return steps


def tokens(step: ReferenceStep) -> list[tuple[int, int, list[list[int]], list[int]]]:
    """(uid, sample, spans, ids) of the samples of a batch."""
    return [(t.uid, t.sample, t.spans, np.frombuffer(t.ids, "<i4").tolist()) for g in step.groups for t, _, _ in g]


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0, 2])
def test_samples_that_are_faster_than_an_update_have_the_lag_eta_exactly(tmp_path: Path, eta: int) -> None:
    virtual = train(tmp_path / "virtual", VirtualTimeLoop, rollout__max_head_offpolicyness=eta)
    given = train(
        tmp_path / "given",
        ExactLagLoop,
        rollout__exact_lag=eta,
        rollout__max_head_offpolicyness=eta,
        virtual_time__seconds=None,
        run__total_train_steps=len(virtual),
    )
    assert len(virtual) == (5 if eta == 0 else 6)  # at eta = 0 the learner waits for each batch
    assert [tokens(step) for step in virtual] == [tokens(step) for step in given]
    assert [step.digest for step in virtual] == [step.digest for step in given]


def test_a_run_repeats_bit_for_bit_and_its_tokens_have_the_versions_of_their_times(tmp_path: Path) -> None:
    slow = {"virtual_time__token_s": 0.5, "virtual_time__seconds": 20, "rollout__max_head_offpolicyness": 2}
    first, again = (train(tmp_path / name, VirtualTimeLoop, **slow) for name in ("first", "again"))
    assert [step.digest for step in first] == [step.digest for step in again]
    assert len({step.digest for step in first}) > 1
    spans = [spans for step in first for _, _, spans, _ in tokens(step)]
    assert any(len(of_sample) > 1 for of_sample in spans)  # weights changed within samples
    assert all(a < b for of_sample in spans for (a, _), (b, _) in pairwise(of_sample))


class CountingWorker:
    """A worker without a model: lengths by uid and version."""

    def __init__(self, n_prompts: int) -> None:
        self.n_left, self.next_uid, self.version = n_prompts, 0, 0
        self.born: dict[int, int] = {}
        self.batches: list[list[int]] = []
        self.dropped: list[int] = []
        self.copied = 0

    def begin(self, n: int) -> Mapping[int, Sequence[int]]:
        n = min(n, self.n_left)
        uids = range(self.next_uid, self.next_uid + n)
        self.n_left, self.next_uid = self.n_left - n, self.next_uid + n
        self.born |= dict.fromkeys(uids, self.version)
        return {uid: [1 + (uid + sample) % 5 for sample in range(N_SAMPLES)] for uid in uids}

    def continue_from(self, kept: Mapping[Key, int]) -> Mapping[Key, int]:
        return {key: max(n + 1, 1 + (key[0] + self.version) % 5) for key, n in kept.items()}

    def is_scored(self, uid: int) -> bool:
        return uid % 7 != 6

    def drop(self, uid: int) -> None:
        self.dropped.append(uid)

    def train_batch(self, uids: Sequence[int]) -> None:
        self.batches.append(list(uids))

    def copy_weights(self) -> None:
        self.copied = len(self.batches)

    def load(self, version: int) -> None:
        assert version == self.copied > self.version
        self.version = version


@given(
    policy=st.sampled_from(list(StalenessPolicy)),
    eta=st.integers(0, 3),
    window=st.sampled_from([0, 3, 5]),
    exponent=st.floats(1.05, 4),
    push_s=st.sampled_from([0.0, 0.4, 2.5]),
    slots=st.sampled_from([2, 7, 40]),
    seed=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_every_policy_keeps_its_bound_and_never_stops_early(
    policy: StalenessPolicy, eta: int, window: int, exponent: float, push_s: float, slots: int, seed: int
) -> None:
    size = 3
    virtual = VirtualTimeConfig(
        seconds=1e9, token_s=0.3, token_growth=1.3, tail="pareto", exponent=exponent, push_s=push_s, window=window
    )
    worker = CountingWorker(n_prompts=90)
    gate = Gate(batch_size=size, eta=eta, policy=policy)
    ring = VirtualRing(virtual, gate, worker, slots=slots, n_samples=N_SAMPLES, seed=seed)
    times = list(ring.run())

    taken = [uid for batch in worker.batches for uid in batch]
    assert times == sorted(times)
    assert len(times) == len(worker.batches) == gate.u
    assert len(set(taken)) == len(taken)
    n_left = gate.live + gate.in_training
    assert len(taken) + len(worker.dropped) + ring.waste.failed + n_left == 90 + gate.in_training
    assert n_left < size + gate.in_training  # less than a batch is left: nothing waits for ever
    ages = [clock - worker.born[uid] for clock, batch in enumerate(worker.batches) for uid in batch]
    if policy in (StalenessPolicy.HOLD, StalenessPolicy.DROP):
        assert max(ages, default=0) <= eta
    if window and policy is not StalenessPolicy.DROP:  # a prompt is overtaken by fewer than `window` younger ones
        for place, uid in enumerate(taken):
            assert sum(other > uid for other in taken[:place]) < window


def test_the_factor_of_a_sample_has_mean_1() -> None:
    for settings_of_tail in (
        VirtualTimeConfig(tail="pareto", exponent=3.0),
        VirtualTimeConfig(tail="log-normal", spread=0.7),
    ):
        pace = Pace(settings_of_tail, seed=0)
        assert np.mean([pace.factor((uid, 0)) for uid in range(20000)]) == pytest.approx(1.0, abs=0.03)


def test_a_token_that_has_begun_keeps_its_version() -> None:
    pace = Pace(VirtualTimeConfig(token_s=1.0, token_growth=2.0), seed=0)  # tokens begin at 0, 1, 3, 7
    assert [pace.begun((0, 0), elapsed_s, 4) for elapsed_s in (0.0, 0.5, 1.0, 1.5, 3.5, 7.0, 99.0)] == [
        0, 1, 1, 2, 3, 3, 4,
    ]  # fmt: skip
    assert pace.seconds((0, 0), 3) == 7.0


def test_settings_that_virtual_time_cannot_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, value, why in (
        ("rollout.exact_lag", "2", "a ring cannot have it; train with a given lag"),
        ("virtual_time.seconds", "5", "a ring cannot have it; train in virtual time"),
    ):
        assert launch(["configs/tiny.toml", "--set", f"{key}={value}"]) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(ConfigError, match="either the lag is given or it follows from virtual time"):
        load(BASE, ["virtual_time.seconds=5"])
    with pytest.raises(ConfigError, match="is less than data"):
        load(BASE, ["virtual_time.window=3"])
    with pytest.raises(ConfigError, match="give the virtual seconds of the run"):
        train(tmp_path, VirtualTimeLoop, virtual_time__seconds=None)
