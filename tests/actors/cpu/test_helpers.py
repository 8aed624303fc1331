"""Helpers take a part of what the learner's kernels compute, and nothing that they compute is another number for it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.cpu import build, fused_mlp_qkv
from actors.cpu.fused_mlp_qkv import CHUNK, Angles
from actors.cpu.helpers import Crew, Helped
from actors.cpu.layer_kernels import LayerKernels
from actors.models.packed_row import Sequences
from tests.actors.cpu.test_layer_kernels import drawn, families, grouped, rows_of, widths

pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine"),
    pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle policy on this system"),
]

EPSILON = 1e-5
NEAR = 1e-5  # of the largest: sums of some hundred rows in another order
PATIENCE_S = 60.0
HELPERS = st.sampled_from([1, 3])
COUNTS = st.sampled_from([1, 7, CHUNK // 4, CHUNK // 4 + 1, CHUNK - 1, CHUNK, 2 * CHUNK + 13, 5 * CHUNK + 50])
SEVERAL = [(30, [20, 9, 14]), (5, [31]), (17, [8, 8]), (1, [40, 2])] * 3

Found = tuple[list[Tensor], list[Tensor]]  # the same bit for bit; sums over rows, the same but for rounding
Compute = Callable[[], Found]


@contextmanager
def helpers(n: int) -> Iterator[Crew]:
    crew = Crew(n)
    try:
        yield crew
    finally:
        crew.close()


def is_same(found: Found, alone: Found) -> bool:
    exact = all(torch.equal(a, b) for a, b in zip(found[0], alone[0], strict=True))
    gaps = [
        float((a - b).abs().max()) / max(float(b.abs().max()), 1.0) for a, b in zip(found[1], alone[1], strict=True)
    ]
    return exact and max(gaps, default=0.0) <= NEAR


def projection(
    n: int, width: int, heads: tuple[int, int], head_width: int, *, has_bias: bool, seed: int = 0
) -> Compute:
    n_turned, n_out = sum(heads), (heads[0] + 2 * heads[1]) * head_width
    x, weight, scale = drawn(n, width, seed=seed), drawn(n_out, width), 1 + drawn(width) / 8
    bias, slope = drawn(n_out) if has_bias else None, drawn(n, n_out, seed=seed + 1)
    half = drawn(n, head_width // 2)
    angles = Angles(half.cos().repeat(1, 2), half.sin().repeat(1, 2), n_turned)

    def compute() -> Found:
        there = fused_mlp_qkv.projected(x, weight, scale, bias, angles, EPSILON)
        by_x, *by_weights = fused_mlp_qkv.projected_back(
            slope.clone(), there[1], there[2], weight, scale, angles, has_bias=has_bias
        )
        return [*there, by_x], [by for by in by_weights if by is not None]

    return compute


def feed_forward(n: int, width: int, n_seen: int, n_gates: int, *, seed: int = 0) -> Compute:
    x, seen, scale = drawn(n, width, seed=seed), drawn(n, n_seen, seed=seed), 1 + drawn(width) / 8
    out, gate_up, down = drawn(width, n_seen) / 8, drawn(2 * n_gates, width) / 8, drawn(width, n_gates) / 8
    slope = drawn(n, width, seed=seed + 1)

    def compute() -> Found:
        there, kept = fused_mlp_qkv.fed(x, seen, EPSILON, scale, out, gate_up, down)
        before = [part.clone() for part in kept]
        by_x, by_seen, *by_weights = fused_mlp_qkv.fed_back(slope, seen, kept, scale, out, gate_up, down)
        return [there, *before, by_x, by_seen], by_weights

    return compute


def attention(where: Sequences, heads: tuple[int, int], width: int) -> Compute:
    (n_query, n_key), kernels = heads, LayerKernels()
    qkv, slope = drawn(where.n_rows, (n_query + 2 * n_key) * width), drawn(where.n_rows, n_query * width)

    def compute() -> Found:
        seen, total = kernels.attention(qkv, where, n_query=n_query, n_key=n_key, scale=0.2)
        return [seen, total, kernels.attention_back(slope, qkv, seen, total, where, n_key=n_key, scale=0.2)], []

    return compute


WORKS: dict[str, Callable[[], Compute]] = {
    "projection": lambda: projection(700, 64, (4, 2), 16, has_bias=True),
    "feed-forward": lambda: feed_forward(700, 64, 64, 128),
    "attention": lambda: attention(rows_of(SEVERAL), (4, 2), 32),
}


def check_while(crew_of: int, compute: Compute, alone: Found, *, n_times: int = 3) -> None:
    """Until helpers have had a part so many times, all is as it was alone."""
    deadline, has_had = time.monotonic() + PATIENCE_S, 0
    with helpers(crew_of):
        while has_had < n_times:
            assert time.monotonic() < deadline, Helped.now()
            before = Helped.now().n_theirs
            assert is_same(compute(), alone)
            has_had += Helped.now().n_theirs > before


@pytest.mark.parametrize("n_helpers", [1, 3])
@pytest.mark.parametrize("work", WORKS)
def test_helpers_take_units_and_give_what_one_thread_does(work: str, n_helpers: int) -> None:
    compute = WORKS[work]()
    check_while(n_helpers, compute, compute(), n_times=10)


@settings(max_examples=30, deadline=None)
@given(
    n_helpers=HELPERS, n=COUNTS, width=st.sampled_from([5, 64, 72]), heads=grouped,
    head_width=st.sampled_from([2, 32]), has_bias=st.booleans(),
)  # fmt: skip
def test_projections_of_any_shape(
    n_helpers: int, n: int, width: int, heads: tuple[int, int], head_width: int, has_bias: bool
) -> None:
    check_few(n_helpers, projection(n, width, heads, head_width, has_bias=has_bias))


@settings(max_examples=30, deadline=None)
@given(
    n_helpers=HELPERS, n=COUNTS, width=st.sampled_from([5, 64, 72]), n_seen=st.sampled_from([2, 65]),
    n_gates=st.sampled_from([1, 70, 128]),
)  # fmt: skip
def test_feed_forwards_of_any_shape(n_helpers: int, n: int, width: int, n_seen: int, n_gates: int) -> None:
    check_few(n_helpers, feed_forward(n, width, n_seen, n_gates))


@settings(max_examples=30, deadline=None)
@given(n_helpers=HELPERS, lengths=families, heads=grouped, width=widths, share=st.booleans())
def test_attention_of_any_families(
    n_helpers: int, lengths: list[tuple[int, list[int]]], heads: tuple[int, int], width: int, share: bool
) -> None:
    check_few(n_helpers, attention(rows_of(lengths, share=share), heads, width))


def check_few(n_helpers: int, compute: Compute) -> None:
    alone = compute()
    with helpers(n_helpers):
        for _ in range(3):
            assert is_same(compute(), alone)


@given(lengths=families)
def test_families_that_share_their_prompt_are_a_part_each(lengths: list[tuple[int, list[int]]]) -> None:
    where, counts = rows_of(lengths), [len(owns) for _, owns in lengths]
    assert where.parts.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    alone = rows_of(lengths, share=False)
    assert alone.parts.tolist() == list(range(sum(counts) + 1))


@settings(max_examples=200)
@given(rows=st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=6), is_sorted=st.booleans())
def test_parts_have_no_row_in_common(rows: list[list[int]], is_sorted: bool) -> None:
    """In any order of rows; sequences without rows, and no sequence at all, included."""
    flat = [row for sequence in rows for row in sequence]
    if is_sorted:
        flat.sort()
    sizes = [len(sequence) for sequence in rows]
    where = Sequences(13, *(torch.tensor(part, dtype=torch.int64) for part in (sizes, [0] * len(sizes), flat)))
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = where.parts.tolist()
    assert (parts[0], parts[-1]) == (0, len(sizes))
    assert all(a < b for a, b in pairwise(parts)) or not sizes
    held = [set(flat[edges[a] : edges[b]]) for a, b in pairwise(parts)]
    assert sum(map(len, held)) == len(set(flat))
    for s in range(1, len(sizes)):
        before, behind = flat[: edges[s]], flat[edges[s] :]
        assert (s in parts) == (not before or not behind or max(before) < min(behind))


def test_two_threads_that_call_at_once_get_their_own() -> None:
    works = [feed_forward(200, 64, 64, 128, seed=seed) for seed in (3, 4)]
    alone, wrong = [compute() for compute in works], []

    def call(which: int) -> None:
        for _ in range(100):
            if not is_same(works[which](), alone[which]):
                wrong.append(which)

    with helpers(1):
        threads = [threading.Thread(target=call, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_crew_ends_and_another_begins() -> None:
    compute = WORKS["feed-forward"]()
    alone = compute()
    for n in (1, 3, 15, 2):
        with helpers(n) as crew:
            assert Helped.now().n_helpers == n
            assert is_same(compute(), alone)
            crew.close()
            assert Helped.now().n_helpers == 0
        before = Helped.now()
        assert is_same(compute(), alone)
        assert Helped.now() == before, "nothing is counted without a crew"


def test_a_second_crew_is_refused_and_the_first_stays() -> None:
    with helpers(1):
        with pytest.raises(RuntimeError, match="one crew a process"):
            Crew(1)
        assert Helped.now().n_helpers == 1


@pytest.mark.parametrize("n", [0, 16])
def test_a_crew_has_1_to_15_helpers(n: int) -> None:
    with pytest.raises(ValueError, match="1 to 15"):
        Crew(n)


@pytest.mark.parametrize("n_allowed", [0, 2])
def test_where_the_system_refuses_none_is_left(n_allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, n_asked, n_before = build.function, 0, threading.active_count()

    def function(name: str, *kinds: type) -> Callable[..., None]:
        nonlocal n_asked
        n_asked += name == "helper"
        refuses = name == "helper" and n_asked > n_allowed
        return (lambda found: None) if refuses else made(name, *kinds)

    monkeypatch.setattr(build, "function", function)
    with pytest.raises(RuntimeError, match="SCHED_IDLE"):
        Crew(3)
    assert (Helped.now().n_helpers, threading.active_count()) == (0, n_before)


def elsewhere(what: str) -> None:
    """One of the functions below, in a process of its own."""
    code = f"import tests.actors.cpu.test_helpers as t; t.torch.set_num_threads(1); t.{what}()"
    line = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(line, cwd=Path(__file__).parents[3], timeout=2 * PATIENCE_S, check=True)


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for make in WORKS.values():
        check_few(3, make())
    Crew(3)  # left open: the process ends while they sleep
    WORKS["feed-forward"]()()


def test_with_one_core_there_is_nobody_to_wait_for_and_the_process_ends() -> None:
    elsewhere("on_one_core")


def on_fewer_cores() -> None:
    """All threads lose all cores but one, with helpers under way."""
    compute = WORKS["feed-forward"]()
    alone, cores = compute(), os.sched_getaffinity(0)
    with helpers(3):
        for allowed in ({min(cores)}, cores, {max(cores)}, cores):
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):
                    os.sched_setaffinity(thread, allowed)
            for _ in range(20):
                assert is_same(compute(), alone)


def test_cores_may_go_and_come() -> None:
    elsewhere("on_fewer_cores")


def beside_others() -> None:
    """Every core has something else to do, so helpers are pushed aside within a piece."""
    burners: list[Any] = []
    compute = WORKS["feed-forward"]()
    alone = compute()
    try:
        for core in os.sched_getaffinity(0):
            burners.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setaffinity(burners[-1].pid, {core})
        check_while(1, compute, alone, n_times=2)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.skipif(os.cpu_count() == 1, reason="there is no other core")
def test_a_helper_that_is_pushed_aside_ends_its_piece() -> None:
    elsewhere("beside_others")


def forked() -> None:
    compute = WORKS["feed-forward"]()
    alone = compute()
    with helpers(2):
        assert is_same(compute(), alone)
        child = os.fork()
        if not child:
            assert Helped.now().n_helpers == 0
            assert is_same(compute(), alone)
            check_few(1, compute)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert Helped.now().n_helpers == 2
        assert is_same(compute(), alone)


def test_a_forked_process_has_no_helpers_and_may_have_its_own() -> None:
    elsewhere("forked")
