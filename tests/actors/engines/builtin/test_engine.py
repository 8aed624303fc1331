"""The builtin engine against plain forwards of the same models."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from actors.engines.builtin import engine as module
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Done, Request
from areal_bus.errors import EngineError
from areal_cpu.matmul import stepped

V = 40
STOP = frozenset({1})


def llama(seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=V, num_key_value_heads=2, max_position_embeddings=256, **shape, **more)
    return sharpen(LlamaForCausalLM(config))


def qwen(seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=V,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **shape,
        **more,
    )
    return sharpen(Qwen2ForCausalLM(config))


def sharpen(model: Any) -> Any:
    """Weights large enough that attention and context matter to the distribution."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return model.eval()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def request(
    uid: int, ids: list[int], *, sample: int = 0, n: int = 12, temperature: float = 1.0, **more: Any
) -> Request:
    key = ("", uid, 0, sample, 0)
    return Request(key, ids, (7, uid, sample), n, temperature, more.get("top_p", 1.0))


def engine(model: Any, *requests: Request, **more: Any) -> BuiltinEngine:
    """With these requests. `more`: options and arguments that differ."""
    names = {part.name for part in fields(EngineOptions)} & more.keys()
    options = EngineOptions(**{"n_slots": 8} | {name: more.pop(name) for name in names})
    made = BuiltinEngine(model, options, **{"stop_ids": STOP, "version": 0, **more})
    for one in requests:
        made.submit(one)
    return made


def run_all(running: BuiltinEngine) -> dict[int, Completion]:
    """By uid * 100 + sample."""
    done = {}
    while running.n_live:
        for completion in running.step():
            done[completion.key[1] * 100 + completion.key[3]] = completion
    return done


def fresh_logps(model: Any, ids: list[int], sampled: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each sampled token by one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    logp = torch.log_softmax(logits.float() / temperature, -1)
    return logp.gather(-1, torch.tensor(sampled)[:, None])[:, 0]


def assert_logps(requests: list[Request], done: dict[int, Completion], models: dict[int, Any]) -> None:
    """Every log-prob is that of a fresh forward of the version stamped on its token."""
    for r in requests:
        completion = done[r.key[1] * 100 + r.key[3]]
        assert sum(n for _, n in completion.spans) == len(completion.ids) == len(completion.logps) > 0
        at = 0
        for version, n in completion.spans:
            expected = fresh_logps(models[version], list(r.ids), completion.ids, r.temperature)[at : at + n]
            torch.testing.assert_close(torch.tensor(completion.logps[at : at + n]), expected, atol=1e-5, rtol=0)
            at += n


def mixed(n: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, V, (3 + 7 * i % 29,), generator=generator).tolist() for i in range(5)]
    return [
        request(i, ids, sample=s, n=n + 3 * i, temperature=0.7 + 0.2 * s)
        for i, ids in enumerate(prompts)
        for s in range(3)
    ]


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_the_first_weights_of_a_newer_term_may_be_older_and_recompute_all_keys(on_update: str) -> None:
    models = {v: llama(v) for v in (5, 6)}
    running = engine(llama(5), on_update=on_update, stop_ids=frozenset(), version=5)
    survivor = request(0, [5, 6, 7], n=10)
    running.submit(survivor)
    for _ in range(4):
        running.step()
    running.update(6, weights(models[6]))  # nothing is decoded with them
    other = llama(9)  # another model than version 5 was, so that its keys show
    running.update(5, weights(other), term=1)
    assert (running.version, running.n_live) == (5, 1)
    late = request(1, [5, 6, 7], n=10)  # the same prompt
    running.submit(late)
    done = run_all(running)
    assert done[0].spans == [[5, 10]]
    sampled = torch.tensor(done[0].logps)
    torch.testing.assert_close(sampled[:4], fresh_logps(models[5], [5, 6, 7], done[0].ids)[:4], atol=1e-5, rtol=0)
    torch.testing.assert_close(sampled[4:], fresh_logps(other, [5, 6, 7], done[0].ids)[4:], atol=1e-5, rtol=0)
    assert_logps([late], done, {5: other})


def steps(running: BuiltinEngine, n: int) -> None:
    for _ in range(n):
        running.step()


@pytest.mark.parametrize("build", [llama, qwen])
def test_a_request_that_another_engine_began_ends_as_the_unbroken_one_bit_for_bit(build: Callable[[int], Any]) -> None:
    """Both compute all keys anew at the swap at which it was reported: one because of new weights, one has none."""
    old, new, whole = build(0), build(1), request(0, [3, 4, 5], n=20)
    unbroken = engine(build(0), whole, stop_ids=frozenset())
    steps(unbroken, 7)
    unbroken.update(1, weights(new))
    done = unbroken.so_far(whole.key)
    assert done is not None
    assert done.spans == [[0, 7]]
    expected = run_all(unbroken)[0]

    other = engine(new, replace(whole, key=("", 0, 1, 0, 0), done=done), stop_ids=frozenset(), version=1)
    assert other.newest(("", 0, 1, 0, 0)) == 0  # before its first step, too
    got = run_all(other)[0]
    assert (got.ids, got.logps, got.spans) == (expected.ids, expected.logps, [[0, 7], [1, 13]])
    assert other.n_tokens == 13
    assert_logps([whole], {0: got}, {0: old, 1: new})


def test_continued_siblings_and_new_ones_of_a_group_are_right_together() -> None:
    model = llama(0)
    first = engine(model, stop_ids=frozenset())
    group = [request(0, [5, 6, 7], sample=s, n=16) for s in range(4)]
    for r in group:
        first.submit(r)
    steps(first, 5)
    done = [first.so_far(r.key) for r in group[:2]]
    expected = run_all(first)
    second = engine(model, stop_ids=frozenset(), n_slots=3)
    for r, had in zip(group, [*done, None, None], strict=True):
        second.submit(replace(r, done=had))
    assert second.so_far(group[0].key) == done[0]
    got = run_all(second)
    assert {key: c.ids for key, c in got.items()} == {key: c.ids for key, c in expected.items()}
    assert_logps(group, got, {0: model})


def test_a_request_with_invalid_finished_tokens_is_refused() -> None:
    running = engine(llama(0))
    for done, why in [
        (Done([2] * 12, [0.0] * 12, [[0, 12]]), "fewer than its budget: 12 of 12"),
        (Done([], [], []), "at least one token"),
        (Done([2, 3], [0.0], [[0, 2]]), "has a log-prob and a version: 2, 1, 2"),
        (Done([V], [0.0], [[0, 1]]), "token ids are below"),
    ]:
        with pytest.raises(EngineError, match=why):
            running.submit(replace(request(0, [3]), done=done))
    running.submit(replace(request(0, [3]), done=Done([2, 3], [0.0, -1.0], [[0, 2]])))
    aborted = running.abort(("", 0, 0, 0, 0))
    assert aborted is not None
    assert (aborted.ids, aborted.spans) == ([2, 3], [[0, 2]])


def test_a_sample_does_not_depend_on_other_samples_of_the_batch() -> None:
    model, requests = llama(2), mixed()
    many, few = run_all(engine(model, *requests)), run_all(engine(model, *reversed(requests), n_slots=1))
    assert {k: (c.ids, c.finish) for k, c in many.items()} == {k: (c.ids, c.finish) for k, c in few.items()}


def test_a_late_sibling_copies_the_prompt_and_changes_nothing() -> None:
    model = llama(4)
    prompt = list(range(2, 32))
    group = [request(0, prompt, sample=s) for s in range(4)]
    running = engine(model, stop_ids=frozenset())
    filled: list[int] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, ids: filled.append(ids[0].numel()))
    running.submit(group[0])
    running.step()
    for late in group[1:]:
        running.submit(late)
    done = run_all(running)
    hook.remove()
    assert filled[0] in (30, stepped(30, torch.device("cpu")))
    assert all(n <= 4 for n in filled[1:])  # decode steps, where torch does them
    assert [done[sample].n_reused for sample in range(4)] == [0, 29, 29, 29]
    assert_logps(group, done, {0: model})


@pytest.mark.parametrize("more", [1, 40])
def test_prompts_that_are_filled_up_change_nothing(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a product is compiled for; also where keys are computed anew, by branches of one prompt."""
    before, after, model = llama(0), llama(1), llama(0)
    sizes: list[int] = []

    def asked(n: int, _device: torch.device) -> int:
        sizes.append(n + more)
        return n + more

    monkeypatch.setattr(module, "stepped", asked)
    running = engine(model, n_slots=6)
    computed: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, ids: computed.append(ids[0].numel()))
    requests = mixed()
    for r in requests:
        running.submit(r)
    done = {}
    for _ in range(3):
        done |= {c.key[1] * 100 + c.key[3]: c for c in running.step()}
    running.update(1, weights(after))
    done |= run_all(running)
    assert_logps(requests, done, {0: before, 1: after})
    if not sizes:
        pytest.skip("nothing is filled up where no kernels attend")
    assert len(sizes) > 2
    assert set(sizes) <= set(computed)


def test_abort_between_update_and_step_leaves_the_others_right() -> None:
    models = {v: llama(v) for v in range(2)}
    running, requests = engine(llama(0), stop_ids=frozenset()), [request(i, [3 + i] * (i + 2)) for i in range(4)]
    for r in requests:
        running.submit(r)
    running.step()
    running.abort(requests[1].key)
    running.step()
    running.update(1, weights(models[1]))
    running.abort(requests[0].key)
    assert_logps(requests[2:], run_all(running), models)


def test_update_swaps_pointers_and_hands_back_the_old_tensors() -> None:
    model = qwen(0)
    running, new = engine(model), weights(qwen(1))
    before = {name: tensor.data_ptr() for name, tensor in running.parameters().items()}
    assert "lm_head.weight" not in before  # tied to the embedding: once
    old = running.update(1, new)
    assert {name: tensor.data_ptr() for name, tensor in old.items()} == before
    assert model.lm_head.weight.data_ptr() == new["model.embed_tokens.weight"].data_ptr()


def test_rope_that_changes_with_the_batch_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(EngineError, match="rotary"):
        engine(llama(0, rope_parameters=rope))


def test_a_turn_that_goes_on_with_an_episode_is_begun_before_other_episodes() -> None:
    running = engine(llama(0), n_slots=1)
    for uid, turn in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 2)):
        running.submit(replace(request(uid, [3, 4], n=1), key=("", uid, 0, 0, turn)))
    order = []
    while running.n_live:
        order += [completion.key[1] for completion in running.step()]
    assert order == [2, 4, 0, 1, 3]
