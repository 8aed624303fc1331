"""The packed forward: log-probs, gradients and entropy are those of sequences read alone."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model import policy as module
from actors.learner.model.policy import Policy
from actors.models.packed_row import SequencePiece, lay_out
from tests.support.learner_setup import VOCABULARY, save, tiny_actor, tiny_model

TEMPERATURE = 0.7


def pieces(seed: int = 0) -> list[SequencePiece]:
    """Sequences of many lengths, two of them equal, with one to all of their tokens wanted."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for n, first in [(5, 2), (9, 3), (9, 8), (33, 1), (2, 1), (17, 5)]:
        ids = torch.randint(0, VOCABULARY, (n,), generator=draw)
        places = torch.arange(first, n)
        made.append(SequencePiece(ids_T=ids, places_K=places[torch.rand(len(places), generator=draw) < 0.8]))
    return [piece for piece in made if len(piece.places_K)]


def policy_of(model: torch.nn.Module | None = None, *, temperature: float = TEMPERATURE, **how: Any) -> Policy:
    return Policy(model or tiny_model(), ranks=LearnerRanks(), device="cpu", temperature=temperature, **how)


def alone(model: torch.nn.Module, piece: SequencePiece) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by a plain forward of one sequence."""
    logits = model(input_ids=piece.ids_T.unsqueeze(0), use_cache=False).logits[0] / TEMPERATURE
    logp = logits.log_softmax(-1)[piece.places_K - 1]
    return logp.gather(1, piece.ids_T[piece.places_K].unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("way", ["packed", "shared prompts", "transformers"])
def test_packed_log_probs_and_gradients_are_those_of_each_sequence_alone(key_heads: int, way: str) -> None:
    policy, plain = policy_of(tiny_model(key_heads=key_heads)), tiny_model(key_heads=key_heads).eval()
    given = families() if way == "shared prompts" else pieces()
    assert policy.packed
    if way == "transformers":  # its own packed mask
        policy.model.set_attn_implementation("sdpa")
        policy.packed = False
    logp, entropy = policy.logprobs(given, entropy=True)
    assert not entropy.requires_grad
    theirs, entropies = (torch.cat(column) for column in zip(*(alone(plain, piece) for piece in given), strict=True))
    torch.testing.assert_close((logp, entropy), (theirs, entropies), atol=1e-5, rtol=1e-5)
    torch.autograd.backward([logp.square().sum()])
    torch.autograd.backward([theirs.square().sum()])
    check_gradients(policy.parameters().values(), plain.parameters())


def check_gradients(ours: Iterable[Tensor], theirs: Iterable[Tensor], within: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=within * float(b.grad.abs().max()) + 1e-9, rtol=max(within, 1e-4))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, saving = policy_of(), policy_of(gradient_checkpointing=True)
    for policy in (plain, saving):
        policy.logprobs(pieces())[0].sum().backward()
    assert saving.model.model.gradient_checkpointing
    for ours, theirs in zip(saving.parameters().values(), plain.parameters().values(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by Dynamo
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_layers_compute_the_same_and_are_compiled_once_for_rows_of_any_length(
    checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated as torch.compile does; kernels are not generated: test_rank_modes.py has these."""
    monkeypatch.setattr(module, "compile_layers", partial(module.compile_layers, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (policy_of(gradient_checkpointing=checkpoints, compile=compiles) for compiles in (False, True))
    n_graphs = []
    for given in (pieces(1), families(1), families(2), pieces(2)[:1], families(3)[:4]):
        for policy in (plain, compiled):
            for parameter in policy.parameters().values():
                parameter.grad = None
            logp, _ = policy.logprobs(given)
            logp.square().sum().backward()
        check_gradients(compiled.parameters().values(), plain.parameters().values())
        n_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < n_graphs[0] == n_graphs[-1]


def test_an_idle_pass_leaves_gradients_of_zero() -> None:
    policy = policy_of()
    policy.idle_pass()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters().values())


def families(seed: int = 1) -> list[SequencePiece]:
    """Two groups whose samples share a prompt, one of them twice the same sample, and one piece of no family."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for family, (n_prompt, lengths) in enumerate([(7, [4, 9, 4, 1]), (3, [6, 2, 6])]):
        prompt = torch.randint(0, VOCABULARY, (n_prompt,), generator=draw)
        for n in lengths:
            ids = torch.cat([prompt, torch.randint(0, VOCABULARY, (n,), generator=draw)])
            made.append(SequencePiece(ids, torch.arange(n_prompt, n_prompt + n), family=family))
    made[6] = made[4]
    return [made[i] for i in (1, 4, 0, 5, 2, 6, 3)] + [SequencePiece(torch.tensor([5, 6, 7]), torch.tensor([1, 2]))]


def told(sizes: list[int], _embedding: torch.nn.Module, given: tuple[Tensor]) -> None:
    """A forward's number of tokens."""
    sizes.append(given[0].numel())


@pytest.mark.parametrize("given", [pieces, families, lambda: families()[:1]])
def test_rows_that_are_filled_up_change_nothing(
    given: Callable[[], list[SequencePiece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as a product is compiled for: what is behind a row's tokens is read by nobody and trains nothing."""
    found = []
    for more in (0, 1, 150):
        monkeypatch.setattr(module, "stepped", lambda n, _device, more=more: n + more)
        policy = policy_of()
        sizes: list[int] = []
        policy.model.model.embed_tokens.register_forward_pre_hook(partial(told, sizes))
        logp, entropy = policy.logprobs(given(), entropy=True)
        assert sizes == [len(lay_out(given(), share=True).ids_S) + more]
        logp.square().sum().backward()
        found.append((logp, entropy, policy.parameters().values()))
    (logp, entropy, parameters), *others = found
    assert len(logp) == sum(len(piece.places_K) for piece in given()) == len(entropy)
    for other, other_entropy, others_own in others:
        torch.testing.assert_close((other, other_entropy), (logp, entropy), atol=1e-5, rtol=0)
        check_gradients(others_own, parameters)


# the head in chunks

FEW_MIB = 23 * 4 * 12 / 2**20  # a matrix of twelve tokens: chunks of one


def gemma2() -> Any:
    """A soft cap on its logits, tied embeddings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=64,
            final_logit_softcapping=0.7, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model(tied=True), gemma2], ids=["llama", "tied", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_of_the_head_give_the_log_probs_entropies_and_gradients_of_the_whole(
    make: Callable[[], Any], dtype: str
) -> None:
    found = []
    for limit in (512.0, FEW_MIB, 3.1 * FEW_MIB):
        policy = policy_of(make(), dtype=dtype, max_logits_mib=limit)
        cap = getattr(policy.model.config, "final_logit_softcapping", None)
        logp, entropy = policy.logprobs(pieces(), entropy=True, entropy_grad=True)
        (logp.square().sum() + 0.3 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
        assert getattr(policy.model.config, "final_logit_softcapping", None) == cap
        found.append((logp.detach(), entropy.detach(), policy.parameters().values()))
    within = 1e-5 if dtype == "float32" else 3e-2
    for *figures, parameters in found[1:]:
        torch.testing.assert_close(figures, list(found[0][:2]), atol=within, rtol=0)
        check_gradients(parameters, found[0][2], within)


def test_an_entropy_that_is_only_a_figure_has_no_gradient_in_chunks() -> None:
    policy = policy_of()
    policy._max_logits_mib = FEW_MIB
    logp, entropy = policy.logprobs(pieces(), entropy=True)
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_a_model_that_scales_its_logits_itself_keeps_its_head() -> None:
    model = tiny_model()
    model.config.logits_scaling = 8.0
    assert policy_of(model)._head is None


# model.dtype = "bfloat16": what is trained stays float32, what leaves is bfloat16


def test_compute_is_of_the_type_that_is_sampled_with() -> None:
    exact, rounded = (policy_of(dtype=dtype, gradient_checkpointing=True) for dtype in ("float32", "bfloat16"))
    pieces = [SequencePiece(torch.arange(2, 2 + n), torch.arange(1, n), family=0) for n in (5, 9, 9)]
    seen: list[torch.dtype] = []
    rounded.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    for policy in (exact, rounded):
        torch.autograd.backward([policy.logprobs(pieces)[0].sum()])
    assert set(seen) == {torch.bfloat16}
    for ours, theirs in zip(rounded.parameters().values(), exact.parameters().values(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.nn.functional.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.99
    logp_N = rounded.logprobs(pieces)[0]
    assert logp_N.dtype is torch.float32
    assert torch.allclose(logp_N, exact.logprobs(pieces)[0], atol=0.1)


def test_float32_weights_are_kept_once(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path), tmp_path / "checkpoints")
    assert set(load_file(str(folder / "shards" / "shard-00001-of-00001.safetensors"))) == {"rng/0"}


@pytest.mark.parametrize("limit", [512.0, FEW_MIB])
@pytest.mark.parametrize("share", [True, False])
def test_a_row_of_several_temperatures_gives_each_sequence_its_own(limit: float, share: bool) -> None:
    """Log-probs, entropies and gradients of a mixed row are those of each temperature alone, whole and in chunks."""
    heats = {None: TEMPERATURE, 0.3: 0.3, 1.0: 1.0}
    given = [replace(one, temperature=list(heats)[i % 3]) for i, one in enumerate(families())]
    mixed, *others = (policy_of(temperature=heat, max_logits_mib=limit) for heat in (TEMPERATURE, *heats.values()))
    within = 1e-6 if share else 1e-5
    if not share:  # transformers' own packed mask, which rounds more
        mixed.model.set_attn_implementation("sdpa")
        mixed.packed = False
    logp, entropy = mixed.logprobs(given, entropy=True, entropy_grad=True)
    assert entropy is not None
    (logp.square().sum() + entropy.sum()).backward()
    total = [torch.zeros_like(p) for p in mixed.parameters().values()]
    at_piece = torch.arange(len(given)).repeat_interleave(torch.tensor([len(one.places_K) for one in given]))
    for own, policy in zip(heats, others, strict=True):
        mine = [i for i, one in enumerate(given) if one.temperature == own]
        theirs = policy.logprobs([replace(given[i], temperature=None) for i in mine], entropy=True, entropy_grad=True)
        is_mine = torch.isin(at_piece, torch.tensor(mine))
        torch.testing.assert_close((logp[is_mine], entropy[is_mine]), theirs, atol=within, rtol=within)
        assert theirs[1] is not None
        (theirs[0].square().sum() + theirs[1].sum()).backward()
        for sum_, p in zip(total, policy.parameters().values(), strict=True):
            sum_ += p.grad
    for p, sum_ in zip(mixed.parameters().values(), total, strict=True):
        torch.testing.assert_close(p.grad, sum_, atol=1e-5 * float(sum_.abs().max()), rtol=1e-4)
