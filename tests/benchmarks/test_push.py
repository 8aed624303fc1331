"""Bench `push`: both halves with a very small model, and the figures."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import ScratchConfig
from areal_bus.weights.route import Route
from benchmarks.harness.interleave import Rounds
from benchmarks.push import bench as push
from benchmarks.push import generator as push_generator
from benchmarks.push import learner as push_learner
from benchmarks.push.bench import ALONE, MEMCPY, WITH, WITHOUT, PushObservations

SMALL = """
[model]
path = "unused"
[data]
task = "reverse"
prompt = "{question}>"
chat_template = false
batch_size = 2
[gconfig]
n_samples = 4
max_new_tokens = 8
[reward]
function = "reverse"
"""


class Here:
    """A half in a thread of this process."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._thread = ThreadPoolExecutor(1)
        self._asked: deque[Future[Any]] = deque()

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        self._asked.append(self._thread.submit(self._functions[do], **arguments))

    def answer(self) -> Any:
        return self._asked.popleft().result(120)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A config, and a very small model."""
    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    write_scratch_folder(tmp_path / "shape", ScratchConfig(hidden_size=16, layers=1, heads=2))
    load_model(str(tmp_path / "shape"), "float32", "cpu", random_seed=1).save_pretrained(tmp_path / "model")
    load_tokenizer(str(tmp_path / "shape")).save_pretrained(tmp_path / "model")
    return config, tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize("route", ["gloo", "shared"])
def test_a_learner_pushes_to_a_generator_that_decodes(
    small: tuple[Path, Path], route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def snapshot(*given: Any, **named: Any) -> Any:
        taken = take_snapshot(*given, **named)
        places.append(taken.data.data_ptr())
        return taken

    take_snapshot = push_learner.take_snapshot
    monkeypatch.setattr(push_learner, "take_snapshot", snapshot)
    learner, generator = Here(push_learner.FUNCTIONS), Here(push_generator.FUNCTIONS)
    steps, apart, seen = push.compare(learner, generator, lambda: 1.0, push.PushWay(route=route, rounds=2), *small)
    assert [set(costs) for costs in steps.costs] == 2 * [{WITH, WITHOUT}]
    assert [set(costs) for costs in apart.costs] == push.APART * [{ALONE, MEMCPY}]
    assert all(cost > 0 for costs in (*steps.costs, *apart.costs) for cost in costs.values())
    assert len(seen.learner[WITH]) == len(seen.generator[WITH]) == 2
    assert all(one["push_s"] > 0 for one in seen.learner[WITH])
    assert all(one["push_s"] == 0 for one in seen.learner[WITHOUT])
    assert all(one["swap_s"] > 0 and one["tokens_per_s"] > 0 for one in seen.generator[WITH])
    n_parameters = sum(p.numel() for p in load_model(str(small[1]), "float32", "cpu").parameters())
    assert {one["bytes"] for one in seen.learner[ALONE]} == {2 * n_parameters}
    assert len(places) == 2 + 2 + push.APART
    assert all(places[i] == places[i % 2] for i in range(len(places)))  # each in the memory of the one before the last
    assert places[0] != places[1]


def test_shares_are_of_a_step_without_a_push() -> None:
    longer = (1.03, 1.01, 1.02, 1.025, 1.4, 1.03, 0.5, 1.02, 1.04)
    steps = Rounds(tuple({WITH: 4.0 * more, WITHOUT: 4.0} for more in longer), 1, 1e-3, 1.0)
    apart = Rounds(({ALONE: 0.5, MEMCPY: 0.05},), 0, 1e-3, 1.0)
    seen = PushObservations()
    step = {"seconds": 4.0, "cpu_s": 4.0, "push_s": 0.0}
    decoding = {"tokens_per_s": 100.0, "step_s": 0.25, "swap_s": 0.0, "after_s": 0.0}
    for i, more in enumerate(longer):
        without = 4.0 if i % 3 else 2.0
        seen.note(WITHOUT, step | {"cpu_s": without}, decoding)
        swap = decoding | {"swap_s": 0.002, "after_s": 0.5}
        seen.note(WITH, step | {"seconds": 4.1, "cpu_s": without * (2 * more - 1), "push_s": 1.0}, swap)
    seen.note(ALONE, {"cpu_s": 0.1, "snapshot_s": 0.06, "bytes": 269e6}, {"swap_s": 0.002})
    found = push.figures(steps, apart, seen)
    assert found["step_increase_share"] == pytest.approx(0.025)
    assert (found["step_increase_share_sure_low"], found["step_increase_share_sure_high"]) == (0.01, 0.04)
    assert found["step_increase_cpu_share"] == pytest.approx(0.05)  # of each round's two steps
    assert (found["step_increase_cpu_share_sure_low"], found["step_increase_cpu_share_sure_high"]) == (0.02, 0.08)
    assert (found["rounds"], found["refused"]) == (9, 1)
    assert found["push_cpu_share"] == pytest.approx(0.025)
    assert (found["stall_ms"], found["stall_share"]) == (2.0, 0.0005)
    assert found["recompute_ms"] == pytest.approx(250)
    assert found["share_of_memcpy"] == pytest.approx(0.1)
    assert found["bytes_per_s"] == 538_000_000
    assert found["overlaps"] is True
