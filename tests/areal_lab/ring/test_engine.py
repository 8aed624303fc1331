"""The engine that makes its tokens up: its laws, its clock, and that what it says of its tokens is true.

The rules that it shares with all engines are in test_conformance.py.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.protocol import Completion, Done, Request
from actors.engines.servers.model_spec import ModelSpec
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_lab.ring.connect import open_simulated
from areal_lab.ring.engine import LATE_S, WAIT_S, SimulatedEngine, SimulatedRules
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from tests.servers.engines import VirtualClock, context_of, model_folder
from tests.test_tiny import events, launch

ROOT = Path(__file__).resolve().parents[3]
V, STOP = 12, 1
SHAPE = ModelSpec(parameters={"w": torch.empty(3, device="meta")}, vocabulary=V, most_tokens=4096)
LENGTHS = LengthLaw(20.0, 0.8)
SPEEDS = SpeedLaw(decode_tokens_per_s=100.0, half_slots=4.0, prefill_tokens_per_s=1000.0, update_s=0.5)


class Timed:
    """A simulated engine under a virtual clock."""

    def __init__(self, *, lengths: LengthLaw = LENGTHS, n_slots: int = 8, on_update: Any = "recompute") -> None:
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(
            SHAPE,
            SimulatedRules(n_slots, lengths, SPEEDS, on_update),
            stop_ids=frozenset({STOP}),
            clock=self.clock.now,
            wait=self.clock.wait,
        )
        self.ended: dict[Any, Completion] = {}

    def hold(self, version: int) -> None:
        self.engine.update(version, weights(version))

    def run(self, *requests: Request, until_s: float = math.inf) -> None:
        """Until that time, or all have ended."""
        for request in requests:
            self.engine.submit(request)
        while self.engine.n_live and self.clock.now() < until_s:
            self.ended |= {completion.key: completion for completion in self.engine.step()}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([1.0, 2.0, float(version)])}


def ask(uid: int, *, sample: int = 0, n: int = 2000, ids: tuple[int, ...] = (3, 4, 5), temperature: float = 1.0) -> Any:
    return Request(("", uid, 0, sample, 0), ids, (1, uid, sample), n, temperature, 1.0)


ENDLESS = LengthLaw(1e7, 0.1)

# lengths


@given(st.floats(1, 1e5), st.floats(0, 3), st.floats(0, 1, exclude_max=True), st.integers(0, 300))
def test_a_drawn_length_is_one_that_the_hazard_allows(median: float, sigma: float, at: float, beyond: int) -> None:
    law = LengthLaw(median, sigma)
    n = law.draw(at, beyond=beyond)
    assert n > beyond
    assert 0 < law.hazard(n) <= 1
    assert n == beyond + 1 or law.hazard(n - 1) < 1


@pytest.mark.parametrize("law", [LENGTHS, LengthLaw(3.0, 1.5), LengthLaw(40.0, 0.05), LengthLaw(7.0, 0.0)])
def test_the_hazards_are_of_the_lengths_that_are_drawn(law: LengthLaw) -> None:
    n_drawn, most = 4000, 400
    drawn = [law.draw((i + 0.5) / n_drawn) for i in range(n_drawn)]
    alive = 1.0
    for n in range(1, most):
        alive *= 1 - law.hazard(n)
        assert alive == pytest.approx(sum(length > n for length in drawn) / n_drawn, abs=1 / n_drawn)
    assert law.mean(most) == pytest.approx(sum(min(length, most) for length in drawn) / n_drawn, rel=0.01)


def test_lengths_and_tokens_depend_on_seed_position_and_weights_and_not_on_company_or_time() -> None:
    requests = [ask(uid) for uid in range(20)]
    alone, together, other, cooler = Timed(), Timed(n_slots=3), Timed(), Timed()
    for timed, version in ((alone, 0), (together, 0), (other, 7), (cooler, 0)):
        timed.hold(version)
    alone.run(requests[3])
    together.run(*requests)
    other.run(*requests)
    cooler.run(*(ask(uid, temperature=0.6) for uid in range(20)))
    assert alone.ended[requests[3].key] == together.ended[requests[3].key]
    for timed in (other, cooler):
        assert all(len(timed.ended[key].ids) == len(done.ids) for key, done in together.ended.items())
    assert other.ended[requests[3].key].ids != alone.ended[requests[3].key].ids
    assert len({len(done.ids) for done in together.ended.values()}) > 10


# time


@pytest.mark.parametrize("n_live", [1, 4, 8])
def test_the_simulated_engine_decodes_at_the_speed_of_its_law(n_live: int) -> None:
    timed = Timed(lengths=ENDLESS)
    timed.hold(0)
    timed.run(*(ask(uid, ids=(uid + 2,)) for uid in range(n_live)), until_s=20.0)
    seconds = timed.clock.now() - SPEEDS.update_s - SPEEDS.prefill_s(n_live)
    assert timed.engine.n_tokens == pytest.approx(seconds * SPEEDS.tokens_per_s(n_live), abs=n_live)


def test_a_group_reads_its_prompt_once_and_other_prompts_cost_theirs() -> None:
    for others, n_prompts in ((False, 1), (True, 4)):
        timed = Timed(lengths=ENDLESS)
        timed.hold(0)
        ids = tuple(range(2, 10)) * 25
        for i in range(4):
            timed.engine.submit(ask(i, ids=(2 + i if others else 2, *ids)))
        timed.run(until_s=SPEEDS.update_s + SPEEDS.prefill_s(n_prompts * 201) + SPEEDS.step_s(4) - 1e-6)
        assert timed.engine.n_tokens in (0, 4)  # the step that ends just then
        timed.run(until_s=timed.clock.now() + 1e-3)
        assert timed.engine.n_tokens == 4


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_an_update_costs_its_swap_time_and_the_recompute(on_update: str) -> None:
    timed = Timed(lengths=ENDLESS, on_update=on_update)
    timed.hold(0)
    timed.run(*(ask(0, sample=sample) for sample in range(4)), until_s=10.0)
    before, sampled = timed.clock.now(), timed.engine.n_tokens
    timed.hold(1)
    timed.run(until_s=20.0)
    again = sampled + 3 if on_update == "recompute" else 0
    seconds = timed.clock.now() - before - SPEEDS.update_s - SPEEDS.prefill_s(again)
    assert timed.engine.n_tokens - sampled == pytest.approx(seconds * SPEEDS.tokens_per_s(4), abs=8)


def test_a_step_waits_for_a_moment_at_most_and_makes_up_for_a_second_at_most_after_a_stop() -> None:
    timed = Timed(lengths=ENDLESS)
    timed.hold(0)
    timed.engine.submit(ask(0))
    assert timed.engine.step() == []
    assert timed.clock.now() == pytest.approx(WAIT_S)
    assert timed.engine.n_tokens == 0
    timed.run(until_s=2.0)
    before = timed.engine.n_tokens
    timed.clock.wait(1000.0)
    timed.engine.step()
    assert timed.engine.n_tokens - before == pytest.approx(LATE_S * SPEEDS.tokens_per_s(1), abs=2)


def test_time_without_work_is_not_made_up_for() -> None:
    timed = Timed(lengths=ENDLESS)
    timed.hold(0)
    timed.clock.wait(50.0)
    timed.run(ask(0), until_s=50.0 + SPEEDS.prefill_s(3) + 0.99 * SPEEDS.step_s(1))
    assert timed.engine.n_tokens == 0 or timed.clock.now() >= 50.0 + SPEEDS.prefill_s(3) + SPEEDS.step_s(1)


# tokens


def test_token_frequencies_match_their_log_probs() -> None:
    n = 4000
    timed = Timed(n_slots=n, lengths=LengthLaw(2.0, 1.0))
    timed.hold(0)
    timed.run(*(ask(0, sample=sample, n=1) for sample in range(n)))
    said = {completion.ids[0]: math.exp(completion.logps[0]) for completion in timed.ended.values()}
    counts = {token: sum(c.ids[0] == token for c in timed.ended.values()) for token in said}
    assert sum(said.values()) == pytest.approx(1.0, abs=1e-6)
    for token, p in said.items():
        assert counts[token] / n == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))


def test_a_sample_longer_than_the_new_length_law_ends_at_its_next_token() -> None:
    timed = Timed()
    timed.hold(0)
    request = ask(0)
    timed.run(request)
    done = timed.ended.pop(request.key)
    n = len(done.ids)
    shorter = Timed(lengths=LengthLaw(2.0, 0.3))  # the settings have changed on the way
    shorter.hold(0)
    begun = replace(request, done=first(done, n - 1))
    shorter.run(begun)
    completion = shorter.ended[request.key]
    assert completion.finish == "stop"
    assert len(completion.ids) >= n
    assert all(math.isfinite(logp) for logp in completion.logps)


def first(completion: Completion, n: int) -> Done:
    return Done(completion.ids[:n], completion.logps[:n], [[0, n]])


# what it needs, and what it says


def test_it_imports_without_torch() -> None:
    code = "import sys, areal_lab.ring.engine; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_vocabulary_in_which_no_text_ends_is_refused() -> None:
    for stops in (frozenset[int](), frozenset(range(V))):
        with pytest.raises(ConfigError, match="stop token"):
            SimulatedEngine(
                SHAPE, SimulatedRules(1, LENGTHS, SPEEDS, "keep"), stop_ids=stops,
                clock=VirtualClock().now, wait=VirtualClock().wait,
            )  # fmt: skip


def test_only_the_first_generator_warns_that_tokens_are_simulated(tmp_path: Path, warned: list[str]) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    for more in ({"index": 0}, {"index": 1}, {"index": 0, "incarnation": 1}):
        open_simulated(context_of(folder, **more), Config(), tokenizer)
    assert sum("MADE UP" in line for line in warned) == 1


BASE = {"model": {"path": "m"}, "data": {"task": "sums"}, "rollout": {"engine": "simulated"}}


def test_scores_of_made_up_tokens_are_refused_and_so_are_settings_of_a_server() -> None:
    check(Config.model_validate(BASE))
    with pytest.raises(ConfigError, match="does not use the model"):
        check(Config.model_validate({**BASE, "evaluate": {"after": True}}))
    with pytest.raises(ConfigError, match=r"the simulated engine has no server: remove engine\.silent_s"):
        check(Config.model_validate({**BASE, "engine": {"silent_s": 3.0}}))


@pytest.mark.soak
def test_a_job_of_six_generators_runs_on_two_cores_and_its_audit_is_clean(tmp_path: Path) -> None:
    run = launch(tmp_path, "run.total_train_steps=12", config="configs/simulated.toml", ranks=8)
    assert [update["version"] for update in events(run, "head-0.0", "update")] == list(range(1, 13))
    line = [sys.executable, "-m", "tools.audit", "--json", str(run)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])
    over = [line["versions"] for line in events(run, "generator-0.0", "completion") if len(line["versions"]) > 2]
    assert over


def test_a_turn_that_goes_on_with_an_episode_is_begun_before_other_episodes() -> None:
    timed = Timed(lengths=LengthLaw(1.0, 0.0), n_slots=1)
    timed.hold(0)
    for uid, turn in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 2)):
        timed.engine.submit(Request(("", uid, 0, 0, turn), [3, 4], (1, uid), 8, 1.0, 1.0))
    order = []
    while timed.engine.n_live:
        order += [completion.key[1] for completion in timed.engine.step()]
    assert order == [2, 4, 0, 1, 3]
