"""Several decode steps on end give what one at a time gives: the same tokens, log-probs and versions, at any point."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engines.builtin import engine as module
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Done, Request
from areal_cpu import build, fused_llama
from areal_cpu.decode_step import Draws
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.paged_cache import PagedCache
from tests.actors.engines.builtin.test_engine import V, llama, weights
from tests.areal_cpu.test_fused_llama import SHAPE

FOREVER = 1e9


pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(
        build.library() is None or not LayerKernels().attends, reason="no kernels that decode on this machine"
    ),
]


def engine(
    *requests: Request, ahead_s: float, stop_ids: frozenset[int] = frozenset(), model: Any = None,
    tokenizer: Any = None, **more: Any,
) -> BuiltinEngine:  # fmt: skip
    options = EngineOptions(n_slots=6, ahead_s=ahead_s, **more)
    made = BuiltinEngine(model or llama(0), options, stop_ids=stop_ids, tokenizer=tokenizer, version=0)
    for one in requests:
        made.submit(one)
    return made


def request(
    uid: int, *, n: int = 40, temperature: float = 1.0, top_p: float = 1.0, n_given: int = 5, prompt: int | None = None,
    n_done: int = 0,
) -> Request:  # fmt: skip
    draw = random.Random(uid if prompt is None else prompt)
    ids = [draw.randrange(V) for _ in range(n_given)]
    done = Done([1] * n_done, [-1.0] * n_done, [[0, n_done]]) if n_done else None
    return Request(("", uid, 0, 0, 0), ids, (7, uid), n, temperature, top_p, done)


def all_of(running: BuiltinEngine) -> tuple[dict[int, Completion], int]:
    """What came of each, and in how many calls."""
    found, n_calls = dict[int, Completion](), 0
    while running.n_live:
        n_calls += 1
        found |= {completion.key[1]: completion for completion in running.step()}
    return found, n_calls


asked = st.lists(
    st.tuples(
        st.integers(1, 40),  # tokens
        st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        st.sampled_from([1.0] * 4 + [0.8]),
        st.integers(1, 40),  # of its prompt
        st.integers(0, 2),  # which that is: samples of one have blocks in common
        st.sampled_from([0, 0, 0, 3]),  # tokens that it has already
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(asked, st.frozensets(st.integers(0, V - 1), max_size=3))
def test_on_end_as_one_at_a_time(
    several: list[tuple[int, float, float, int, int, int]], stop_ids: frozenset[int]
) -> None:
    found = []
    for ahead_s in (0.0, FOREVER):
        running = engine(ahead_s=ahead_s, stop_ids=stop_ids)
        for uid, (n, temperature, top_p, n_given, prompt, n_done) in enumerate(several):
            given = {"n": n + n_done, "n_given": n_given, "n_done": n_done}
            running.submit(request(uid, temperature=temperature, top_p=top_p, prompt=prompt, **given))
        found.append((all_of(running)[0], running.n_tokens))
    assert found[0] == found[1]


def test_a_row_that_ends_ends_the_call() -> None:
    probe = engine(*map(request, range(4)), ahead_s=0.0)
    ids = {uid: completion.ids for uid, completion in all_of(probe)[0].items()}
    stop = ids[2][9]  # some token of one of them
    running = engine(*map(request, range(4)), ahead_s=FOREVER, stop_ids=frozenset([stop]))
    first = min(of.index(stop) for of in ids.values() if stop in of)
    done = list[Completion]()
    while not done:
        done = running.step()
    assert {len(completion.ids) for completion in done} == {first + 1}
    live = [running.so_far(("", uid, 0, 0, 0)) for uid in range(4)]
    assert {len(so_far.ids) for so_far in live if so_far is not None} == {first + 1}  # nobody is ahead of the others


def counts(running: BuiltinEngine) -> list[int]:
    """Tokens per row of each call, until all have ended."""
    found = []
    while running.n_live:
        before, n_rows = running.n_tokens, running.n_live
        running.step()
        found.append((running.n_tokens - before) // n_rows)
    return found


def test_a_call_decodes_until_the_first_row_ends() -> None:
    ahead, single = engine(ahead_s=FOREVER), engine(ahead_s=0.0)
    for running in (ahead, single):
        for uid in range(3):
            running.submit(request(uid, n=40 + uid))
    # a prompt, one step to see how long one takes, all that fits, what is left of the shortest, then of the others
    assert counts(ahead) == [1, 1, module.MOST_AHEAD, module.MOST_AHEAD, 6, 1, 1]
    assert counts(single) == [1] * 42


class Clock:
    """A decode step of one token asks three times, at its begin, in its forward pass and at its end."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.003
        return self.now


def test_time_bounds_how_many_and_a_step_of_more_rows_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(request(0), ahead_s=0.02)
    monkeypatch.setattr(module.time, "perf_counter", Clock())
    found = []
    for n_steps in (3, 3):
        for _ in range(n_steps):
            before = running.n_tokens
            running.step()
            found.append((running.n_tokens - before) // running.n_live)
        if running.n_live == 1:
            running.submit(request(1))
    # 6 ms a step: three in 20 ms; then the other's prompt, one step of both, and three again
    assert found == [1, 1, 3, 1, 1, 3]


def test_on_hold_and_paused() -> None:
    running = engine(request(0), ahead_s=FOREVER, on_update="drain")
    for _ in range(2):
        running.step()
    assert running.hold()
    running.submit(request(1))
    running.step()
    assert running.n_tokens == 2 + module.MOST_AHEAD  # of the one that was begun
    running.pause()
    assert running.step() == []
    assert running.n_tokens == 2 + module.MOST_AHEAD


def test_up_to_the_last_position_of_the_model() -> None:
    found = [all_of(engine(request(0, n=251, n_given=5), ahead_s=ahead_s)) for ahead_s in (0.0, FOREVER)]
    assert found[0][0] == found[1][0]
    assert found[1][1] < 20 < found[0][1]


@pytest.mark.parametrize("family", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("is_copied", [True, False])
def test_other_families_and_weights_as_they_lie(family: type, is_copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_copied:
        monkeypatch.setattr(fused_llama, "MOST_PACKED", 0)
    torch.manual_seed(0)
    kind = {Qwen2Config: Qwen2ForCausalLM, Qwen3Config: Qwen3ForCausalLM}[family]
    made = kind(family(**SHAPE, head_dim=8)).eval()
    found = [all_of(engine(*map(request, range(5)), ahead_s=ahead_s, model=made)) for ahead_s in (0.0, FOREVER)]
    assert found[0][0] == found[1][0]
    assert found[1][1] < 10 < found[0][1]


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_between_two_calls(on_update: str) -> None:
    """Versions are stamped on the tokens that they sampled, and a token is a function of weights, seed and position."""
    ahead, single = (engine(ahead_s=ahead_s, on_update=on_update) for ahead_s in (FOREVER, 0.0))
    for running in (ahead, single):
        for uid in range(4):
            running.submit(request(uid, n=60))
    for version, calls in ((1, 3), (2, 1), (3, 2)):
        for _ in range(calls):
            ahead.step()
        while single.n_tokens < ahead.n_tokens:
            single.step()
        for running in (ahead, single):
            running.update(version, weights(llama(version)))
    found, n_calls = all_of(ahead)
    assert found == all_of(single)[0]
    assert all([version for version, _ in completion.spans] == [0, 1, 2, 3] for completion in found.values())
    assert n_calls < 10


def test_an_abort_between_two_calls_leaves_other_requests_unchanged() -> None:
    running, alone = engine(ahead_s=FOREVER), engine(ahead_s=0.0)
    for uid in range(4):
        running.submit(request(uid))
    for uid in (0, 2, 3):
        alone.submit(request(uid))
    for _ in range(3):
        running.step()
    gone = running.abort(("", 1, 0, 0, 0))
    assert gone is not None
    assert len(gone.ids) == 2 + module.MOST_AHEAD
    found, expected = all_of(running)[0], all_of(alone)[0]
    assert {uid: completion.ids for uid, completion in found.items()} == {
        uid: completion.ids for uid, completion in expected.items()
    }
    for uid, completion in found.items():  # their prompts were computed beside another one
        assert completion.logps == pytest.approx(expected[uid].logps, abs=1e-5)


def test_steps_have_room_and_numbers_for_all_rows() -> None:
    running = engine(*(request(uid, n_given=5) for uid in range(2)), ahead_s=FOREVER)
    running.step()
    slots, forward = running._cache, running._fused
    assert isinstance(slots, PagedCache)
    assert forward is not None
    slots.reserve([6, 6], 2)
    with pytest.raises(ValueError, match="in its own blocks"):
        slots.steps([5, 5], n_steps=12)  # a block has 16
    view = slots.steps([5, 5], n_steps=2)
    for draws in (
        Draws([1.0], [[0.5, 0.5]] * 2, ()),
        Draws([1.0, 1.0], [[0.5, 0.5], [0.5]], ()),
        Draws([1.0, 1.0], [[0.5, 0.5]] * 3, ()),
    ):
        with pytest.raises(ValueError, match="uniform numbers for each"):
            forward.decoded_on([1, 2], view, draws)
    with pytest.raises(ValueError, match="vocabulary"):
        forward.decoded_on([1, V], view, Draws([1.0, 1.0], [[0.5, 0.5]], ()))
    forward.decoded_on([1, 2], view, Draws([1.0, 1.0], [[0.5, 0.5]] * 2, ()))
    with pytest.raises(ValueError, match="and room"):  # that is used up
        forward.decoded_on([1, 2], view, Draws([1.0, 1.0], [[0.5, 0.5]], ()))


class FewWords:
    """Stands where a tokenizer does: the model's last rows only fill up its embedding."""

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(V // 2)}


def test_a_token_that_the_tokenizer_does_not_have_is_never_sampled() -> None:
    drawn = enumerate([(1.0, 1.0), (0.0, 1.0), (1.7, 0.8), (0.6, 1.0)])
    asked = [request(uid, temperature=temperature, top_p=top_p) for uid, (temperature, top_p) in drawn]
    own: dict[str, Any] = {"stop_ids": frozenset([V - 1]), "tokenizer": FewWords()}
    single, several = (all_of(engine(*asked, ahead_s=ahead_s, **own))[0] for ahead_s in (0.0, FOREVER))
    assert single == several
    tokens = {token for completion in single.values() for token in completion.ids}
    assert tokens <= {*range(V // 2), V - 1}  # the stop token of the model's own settings is left
    assert len(tokens) > 4
