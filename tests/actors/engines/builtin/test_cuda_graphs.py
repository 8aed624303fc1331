"""Recorded decode steps, by a recorder that repeats what was done to the same memory and nothing else, as CUDA does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from actors.engines.builtin import cuda_graphs
from actors.engines.builtin.cuda_graphs import CudaGraphs, CudaRecorder, Step
from actors.engines.builtin.dense_cache import DenseCache
from actors.engines.builtin.engine import BuiltinEngine
from actors.engines.protocol import Completion, Request
from areal_cpu.fused_llama import FusedLlama
from tests.actors.engines.builtin.test_engine import assert_logps, engine, llama, mixed, qwen, request, run_all, weights


class Traced:
    """Records the operations and the tensors they were applied to; numbers and sizes are those of the recording."""

    def __init__(self) -> None:
        self.n_recorded = self.n_replayed = 0
        self.found: list[Tensor] = []

    def __call__(self, step: Step) -> Step:
        self.n_recorded += 1
        traced = make_fx(step)()

        def again() -> Tensor:
            self.n_replayed += 1
            found: Tensor = traced()
            self.found.append(found)
            return found

        return again


@pytest.fixture(autouse=True)
def short_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "REACH", 16)


def recorded(model: Any, *requests: Request, **more: Any) -> tuple[BuiltinEngine, Traced]:
    recorder = Traced()
    return engine(model, *requests, recorder=recorder, **more), recorder


@pytest.mark.parametrize("absent", [pytest.param(frozenset[int](), marks=pytest.mark.slow), frozenset({5, 9, 11, 17})])
def test_recorded_steps_in_a_row_draw_the_tokens_of_single_steps(absent: frozenset[int]) -> None:
    """Of rows that end at different places, greedy ones among them; none draws an absent one."""
    model = llama(0)
    requests = [replace(one, temperature=0.0) if i % 5 == 4 else one for i, one in enumerate(mixed(20))]
    found, n_calls = [], []
    for ahead_s in (0.0, 1e9):
        running, recorder = recorded(model, *requests, n_slots=6, ahead_s=ahead_s)
        running._absent, calls = absent, 0
        done: dict[int, Completion] = {}
        while running.n_live:
            calls += 1
            done |= {c.key[1] * 100 + c.key[3]: c for c in running.step()}
        found.append(done)
        n_calls.append(calls)
        assert running.n_tokens == sum(len(c.ids) for c in done.values())
        assert recorder.n_replayed
    single, several = found
    assert {k: (c.ids, c.finish) for k, c in several.items()} == {k: (c.ids, c.finish) for k, c in single.items()}
    assert len({len(c.ids) for c in single.values()}) > 5
    assert not absent & {token for c in several.values() for token in c.ids}
    for key, c in several.items():
        assert c.logps == pytest.approx(single[key].logps, abs=1e-5)
    if not absent:
        assert n_calls[1] < n_calls[0] / 3


def test_a_drawing_that_draws_other_tokens_than_the_sampler_is_not_used(warned: list[str]) -> None:
    traced, n = Traced(), 0

    def wrong(step: Step) -> Step:
        nonlocal n
        n += 1
        return traced(step) if n == 1 else lambda: torch.zeros(1)  # the second one is the drawing

    model, asked = llama(0), request(0, [3, 4], n=20)
    running = engine(model, asked, recorder=wrong, stop_ids=frozenset(), ahead_s=1e9)
    assert_logps([asked], run_all(running), {0: model})
    assert n == 2
    assert ["other tokens than the sampler" in line for line in warned] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_each_set_of_weights_has_recordings_of_its_own(on_update: Any) -> None:
    """Two sets of memory in turn, as pushes have them: a recording of one is never used for the other."""
    models = {version: llama(version) for version in range(6)}
    requests = [request(uid, [5, 6 + uid, 7], n=48) for uid in range(6)]
    running, recorder = recorded(llama(0), *requests, on_update=on_update, stop_ids=frozenset())
    done: dict[int, Completion] = {}
    free = weights(models[0])
    for version in range(1, 6):
        for _ in range(8):
            done |= {c.key[1] * 100: c for c in running.step()}
        new = dict(free)
        for name, tensor in weights(models[version]).items():
            new[name].copy_(tensor)
        free = dict(running.update(version, new))
    done |= run_all(running)
    assert all([v for v, _ in c.spans] == list(range(6)) for c in done.values())
    if on_update == "recompute":
        assert_logps(requests, done, models)
    assert recorder.n_recorded >= 3
    assert recorder.n_replayed > 2 * recorder.n_recorded, "the recordings of a set are there when its turn comes"


@pytest.mark.slow
def test_a_cuda_graph_is_recaptured_when_its_kv_cache_moves() -> None:
    """A long sample among short ones makes room for itself: what was recorded before is of memory that is no more."""
    model = llama(0)
    running, recorder = recorded(model, stop_ids=frozenset())
    requests = [request(0, [3, 4], n=30), request(1, [5] * 70, n=100), request(2, [6], n=60)]
    running.submit(requests[0])
    done: dict[int, Completion] = {}
    for _ in range(20):
        done |= {c.key[1] * 100: c for c in running.step()}
    before = recorder.n_recorded
    for r in requests[1:]:
        running.submit(r)
    done |= run_all(running)
    assert_logps(requests, done, {0: model})
    assert before
    assert recorder.n_recorded > before


def test_a_recording_that_does_something_else_is_not_used(warned: list[str]) -> None:
    """It is looked at once, when it is made; then the plain steps go on, and people hear why."""
    model = llama(0)

    def wrong(step: Step) -> Step:
        return lambda: step() * 1.01

    def failing(step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    for recorder in (wrong, failing):
        running = engine(model, recorder=recorder, stop_ids=frozenset())
        asked = request(0, [3, 4], n=20)
        running.submit(asked)
        assert_logps([asked], run_all(running), {0: model})
    assert len(warned) == 2
    assert "slower: its logits differ by" in warned[0]
    assert "slower: RuntimeError: operation not permitted when stream is capturing\n" in warned[1]


def test_the_least_recently_used_cuda_graph_is_evicted_and_recaptured_after_repeated_use() -> None:
    recorder = Traced()
    slots = SimpleNamespace(n_slots=8, n_made=1, capacity=64)

    class Forward(SimpleNamespace):
        def __call__(self, ids_n1: Tensor, *others: Any) -> Tensor:
            return ids_n1.float() * torch.ones(3)

    forward = cast(FusedLlama, Forward(device=torch.device("cpu"), reserve=lambda reach: 0))
    kept = CudaGraphs(forward, cast(DenseCache, slots), dtype=torch.float32, recorder=recorder, n_seen=2, n_kept=2)

    def decode(n: int) -> Tensor | None:
        return kept.decode([5] * n, [3] * n, 0)

    for n in (1, 1, 2, 2, 1, 4, 4):  # 1 was used after 2, so 2 makes room for 4
        decode(n)
    assert recorder.n_recorded == 3
    assert decode(1) is not None
    assert recorder.n_recorded == 3
    assert decode(2) is None
    found = decode(2)
    assert found is not None
    assert found.tolist() == [[5.0] * 3] * 2
    assert recorder.n_recorded == 4


@pytest.mark.gpu
def test_a_recording_that_breaks_off_leaves_the_device_as_it_was() -> None:
    recorder, before = CudaRecorder(), torch.cuda.current_stream()
    ones = torch.ones(4, device="cuda")

    def reads() -> Tensor:
        return ones * ones.sum().item()  # no recording waits for the device

    with pytest.raises(RuntimeError):
        recorder(reads)
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    again = recorder(lambda: ones * 2)
    ones.fill_(3.0)
    assert again().tolist() == [6.0] * 4


@pytest.mark.gpu
def test_a_new_recording_replaces_earlier_ones() -> None:
    """Whatever torch takes back with an older one, and cuBLAS's workspace is of the stream that both were made on."""
    recorder, weight = CudaRecorder(), torch.randn(4096, 4096, device="cuda")
    x_nE = torch.randn(8, 4096, device="cuda")
    first = recorder(lambda: x_nE @ weight)
    second = recorder(lambda: x_nE @ weight.t())
    first()
    del first
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(8)]
    x_nE.normal_()
    torch.testing.assert_close(second(), x_nE @ weight.t())
    assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead_s", [0.0, 1e9])
def test_a_cuda_device_replays_its_steps(ahead_s: float) -> None:
    model, requests = qwen(0), mixed(60)
    recorder, n_recorded = CudaRecorder(), 0

    def counting(step: Step) -> Step:
        nonlocal n_recorded
        n_recorded += 1
        return recorder(step)

    running = engine(qwen(1).to("cuda"), *requests, n_slots=4, version=None, recorder=counting, ahead_s=ahead_s)
    running.update(0, {name: tensor.to("cuda") for name, tensor in weights(model).items()})
    assert_logps(requests, run_all(running), {0: model})
    assert n_recorded >= 2
