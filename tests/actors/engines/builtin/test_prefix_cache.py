"""The prefix cache: the same samples with and without, never across weights, within its bounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.builtin.prefix_cache import P, PrefixCache, States
from actors.engines.protocol import Completion, Request
from tests.actors.engines.builtin.test_engine import V, assert_logps, llama, weights

SYSTEM = [2 + at * 7 % 30 for at in range(37)]
N_VERSIONS = 3


def opened(model: Any, **options: Any) -> BuiltinEngine:
    made = EngineOptions(**{"n_slots": 4, "prefix_share": 2.0, "prefill_tokens": 60} | options)
    return BuiltinEngine(model, made, stop_ids=frozenset({1}), version=0)


def ask(uid: int, ids: list[int], *, turn: int = 0, sample: int = 0, n: int = 20) -> Request:
    return Request(("", uid, 0, sample, turn), ids, (7, uid, sample), n, 1.0, 1.0)


def answer(running: BuiltinEngine, request: Request) -> Completion:
    running.submit(request)
    done = []
    while running.n_live:
        done += running.step()
    (only,) = done
    return only


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=["kernels", "torch"],
)
def models(request: pytest.FixtureRequest) -> list[Any]:
    return [llama(seed).to(request.param) for seed in range(N_VERSIONS)]


def test_a_turn_computes_only_what_its_episode_has_added(models: list[Any]) -> None:
    """A first turn is kept only where an engine has seen a second one."""
    running, plain = opened(models[0]), opened(models[0], prefix_share=0)
    ids, requests, done, expected = list(SYSTEM), [], {}, {}
    for turn in range(4):
        one = ask(turn, ids, turn=turn)
        requests.append(one)
        done[turn * 100], expected[turn * 100] = answer(running, one), answer(plain, one)
        ids = [*ids, *done[turn * 100].ids, 5, 6, 7 + turn]
    assert_logps(requests, done, {0: models[0]})
    assert [one.ids for one in done.values()] == [one.ids for one in expected.values()]
    assert [one.n_reused for one in expected.values()] == [0] * 4
    lengths = [len(one.ids) for one in requests]
    known = [0, 0, *((n - 4) // P * P for n in lengths[2:])]
    assert [one.n_reused for one in done.values()] == known


def test_a_system_prompt_is_kept_when_it_comes_again_and_what_comes_once_takes_no_memory(models: list[Any]) -> None:
    running = opened(models[0])
    requests = [ask(uid, [*SYSTEM, *range(2 + uid, 22 + uid)]) for uid in range(4)]
    done = [answer(running, one) for one in requests]
    assert [one.n_reused for one in done] == [0, 0, 32, 32]
    assert running._prefixes.n_blocks == 2
    assert_logps(requests, {100 * uid: one for uid, one in enumerate(done)}, {0: models[0]})


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.parametrize(("version", "term"), [(1, 0), (0, 1)])
def test_nothing_is_reused_across_a_push(models: list[Any], on_update: str, version: int, term: int) -> None:
    """Nor from a sample that has keys of two versions. One whose keys were computed again is as good as a new one."""
    running = opened(models[0], on_update=on_update)
    ids = [*SYSTEM, *answer(running, ask(0, SYSTEM, turn=1)).ids, 5]
    running.submit(ask(1, ids, turn=2))
    running.step()
    running.update(version, weights(models[1]), term=term)
    across = next(one for _ in range(40) for one in running.step())
    assert (across.n_reused or 0) >= len(SYSTEM) // P * P
    late = [ask(2, [*ids, *across.ids], turn=3), ask(3, ids, turn=3)]
    done = {one.key[1] * 100: answer(running, one) for one in late}
    is_pure = on_update == "recompute" or term == 1
    assert bool(done[200].n_reused) == is_pure
    assert done[300].n_reused == len(ids) // P * P  # of the one before
    assert_logps(late, done, {version: models[1]})


moves = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("go on"), st.integers(0, 9), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("push"), st.integers(1, 2), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=40)
@given(plays=st.lists(moves, min_size=8, max_size=40), share=st.sampled_from([0.1, 0.5, 3.0]),
       on_update=st.sampled_from(["recompute", "keep"]))  # fmt: skip
def test_samples_are_those_of_an_engine_without_a_prefix_cache(
    models: list[Any], plays: list[tuple[str, int, int]], share: float, on_update: str
) -> None:
    """Whatever comes, goes on, is aborted or pushed, with evictions; log-probs to rounding."""
    cached = opened(models[0], prefix_share=share, on_update=on_update)
    plain = opened(models[0], prefix_share=0, on_update=on_update)
    live: dict[Any, Request] = {}
    ended: list[tuple[Request, Completion]] = []
    uid = version = longest = 0

    def submit(request: Request) -> None:
        nonlocal longest
        longest = max(longest, len(request.ids) + request.max_new_tokens)
        live[request.key] = request
        cached.submit(request)
        plain.submit(request)

    def same(got: list[Completion], expected: list[Completion]) -> None:
        assert [(one.key, one.ids, one.spans, one.finish) for one in got] == [
            (one.key, one.ids, one.spans, one.finish) for one in expected
        ]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.logps), torch.tensor(other.logps), atol=1e-5, rtol=0)
            ended.append((live.pop(one.key), one))

    for move, which, n in [*plays, ("step", 200, 0)]:
        if move == "begin":
            uid += 1
            submit(ask(uid, [*SYSTEM[: 12 * which], *(2 + (uid * 5 + at) % (V - 2) for at in range(n))], n=9))
        elif move == "go on" and ended:
            before, done = ended.pop(which % len(ended))
            ids = [*before.ids, *done.ids, *SYSTEM[:n], 3]
            if len(ids) < 200:
                submit(replace(before, ids=ids, key=(*before.key[:4], before.key[4] + 1)))
        elif move == "step":
            for _ in range(which):
                same(cached.step(), plain.step())
        elif move == "push":
            version += 1
            for engine in (cached, plain):
                engine.update(version, weights(models[(version + which) % N_VERSIONS]))
        elif move == "abort" and live:
            key = sorted(live)[which % len(live)]
            same(*([one] if (one := engine.abort(key)) else [] for engine in (cached, plain)))
        assert cached._prefixes.n_blocks <= int(4 * share * longest) // P
    assert not live


def test_the_least_recently_used_blocks_are_evicted_and_never_one_before_another() -> None:
    """Each block holds the hash of all tokens up to its end, so that a wrong one shows."""
    cache = PrefixCache()
    cache.allow(6 * P)

    def states(tokens: list[int]) -> Any:
        sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0)

        def read(begin: int, end: int) -> States:
            both = sums[begin:end, None, None, None].repeat(1, 2, 3, 4)
            return {0: both, 1: both[:, :, :1] + 0.5}

        return read

    def check(salt: tuple[int, int], tokens: list[int]) -> int:
        blocks = cache.find(salt, tokens)
        if blocks:
            found = cache.read(blocks)
            assert {index: tuple(state.shape) for index, state in found.items()} == {
                0: (len(blocks) * P, 2, 3, 4),
                1: (len(blocks) * P, 2, 1, 4),
            }
            for index, state in states(tokens)(0, len(blocks) * P).items():
                torch.testing.assert_close(found[index], state)
        return len(blocks)

    common, salt = list(range(2 * P)), (0, 0)
    texts = [[*common, *range(1000 * n, 1000 * n + 2 * P)] for n in range(1, 4)]
    for text in texts[:2]:
        cache.keep(salt, text, states(text), always=True)
    assert [check(salt, text) for text in texts] == [4, 4, 2]
    assert check((0, 1), texts[0]) == 0
    check(salt, texts[0])
    cache.keep(salt, texts[2], states(texts[2]), always=True)
    assert [check(salt, text) for text in texts] == [4, 2, 4]
    long = list(range(5000, 5000 + 9 * P))
    cache.keep(salt, long, states(long), always=True)
    assert check(salt, long) == 6
    assert check(salt, texts[0]) == 0
    cache.keep((0, 1), texts[1], states(texts[1]), always=True)
    cache.keep_only({(0, 1)})
    assert (check(salt, long), check((0, 1), texts[1]), cache.n_blocks) == (0, 4, 4)
