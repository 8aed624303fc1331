"""The learner's own decoder layers: loss and gradients of the plain ones, which stay where these do not apply."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from areal_bus.errors import ConfigError
from areal_cpu import build, fused_mlp_qkv, llama_layer, matmul
from areal_cpu.layer_kernels import LayerKernels, found
from areal_cpu.llama_layer import LlamaLayer, Norm
from tests.actors.learner.model.test_policy import families, pieces

pytestmark = pytest.mark.usefixtures("as_kernels_run")
needs_kernels = pytest.mark.skipif(
    build.library() is None or not LayerKernels().attends, reason="no kernels of layers on this machine"
)

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SCALED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, a key head for each": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "llama, wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)),
    "llama, scaled rotations": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
}


def made(name: str) -> Any:
    """A model whose norms and biases are not those of a new one."""
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def policy_of(model: Any, **others: Any) -> Policy:
    return Policy(model, ranks=LearnerRanks(), device="cpu", temperature=0.8, **others)


def is_fused(policy: Policy) -> bool:
    return any(isinstance(module, LlamaLayer) for module in policy.model.modules())


def trained(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and gradients of two rows, one with shared prompts, as two micro-batches of a step."""
    logps = []
    for row in (families(), pieces()):
        logp_N, _ = policy.logprobs(row)
        (logp_N * torch.linspace(-1.0, 2.0, len(logp_N))).sum().backward()
        logps.append(logp_N.detach())
    return torch.cat(logps), {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is said on the terminal."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    yield lines
    logger.remove(sink)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler is."""
    monkeypatch.setattr(build, "library", lambda: None)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("by", ["one pass", "kernels"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_the_plain_layers(
    name: str, by: str, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "IS_FASTER", by_onednn)
    if by == "kernels":
        monkeypatch.setattr(fused_mlp_qkv, "MOST", 0)
    fast = policy_of(made(name))
    assert is_fused(fast)
    assert isinstance(fast.model.model.norm, Norm)
    monkeypatch.setattr(llama_layer, "LAYERS", set())
    slow = policy_of(made(name))
    assert not is_fused(slow)
    (logp, gradients), (expected, theirs) = trained(fast), trained(slow)
    assert torch.allclose(logp, expected, atol=1e-5)
    assert gradients.keys() == theirs.keys() == dict(slow.model.named_parameters()).keys()
    for key, gradient in gradients.items():
        assert torch.allclose(gradient, theirs[key], rtol=1e-4, atol=1e-5 * float(theirs[key].abs().max())), key


@needs_kernels
@pytest.mark.parametrize("by_threads", [True, False])
def test_the_plain_layers_serve_where_no_kernels_apply(by_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a new policy stay as they are; those that are fused already compute as before."""
    fused = policy_of(made("llama"))
    if by_threads:
        torch.set_num_threads(2)
    else:
        without_kernels(monkeypatch)
    plain = policy_of(made("llama"))
    assert is_fused(fused)
    assert not is_fused(plain)
    assert not isinstance(plain.model.model.norm, Norm)
    (logp, gradients), (expected, theirs) = trained(fused), trained(plain)
    assert torch.equal(logp, expected)
    assert all(torch.equal(gradient, theirs[key]) for key, gradient in gradients.items())


def test_kernels_are_used_by_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(3, 4)
    assert (found(ones) is None) == (build.library() is None)
    assert found(ones.t()) is found(ones.double()) is None
    torch.set_num_threads(2)
    assert found(ones) is None
    torch.set_num_threads(1)
    without_kernels(monkeypatch)
    assert found(ones) is None


@pytest.mark.parametrize("by_kernels", [True, False])
def test_fused_layer_propagates_nan_to_log_probs_and_gradients(
    by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_kernels:
        without_kernels(monkeypatch)
    policy = policy_of(made("llama"))
    with torch.no_grad():
        policy.model.model.embed_tokens.weight[pieces()[0].ids_T[0]] = torch.nan
    logp, gradients = trained(policy)
    assert logp.isnan().any()
    assert all(gradients[key].isnan().any() for key in gradients if "layers.0" in key)


@needs_kernels
def test_recomputed_activations_and_none_give_the_same_numbers() -> None:
    kept, recomputed = (policy_of(made("llama"), gradient_checkpointing=which) for which in (False, True))
    assert is_fused(recomputed)
    assert recomputed.model.model.layers[0].gradient_checkpointing
    (logp, expected), (again, gradients) = trained(kept), trained(recomputed)
    assert torch.equal(logp, again)
    assert all(torch.equal(gradient, expected[key]) for key, gradient in gradients.items())
    with torch.no_grad():
        without, _ = kept.logprobs(families())
    assert torch.equal(without, logp[: len(without)])


@needs_kernels
def test_a_batch_that_is_not_packed_uses_the_unfused_forward() -> None:
    policy, plain = policy_of(made("llama")), made("llama").eval()
    policy.model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 23, (3, 9))
    assert is_fused(policy)
    assert torch.allclose(policy.model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)


def test_the_comparison_leaves_no_gradients_and_no_changed_weight() -> None:
    policy, before = policy_of(made("qwen2")), made("qwen2").state_dict()
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in policy.model.state_dict().items())


def test_layers_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    model = made("llama")
    norm = model.model.layers[1].post_attention_layernorm
    plain = type(norm).forward
    monkeypatch.setattr(type(norm), "forward", lambda self, x: plain(self, x) * (1.01 if self is norm else 1.0))
    policy = policy_of(model)
    assert not is_fused(policy)
    assert not isinstance(policy.model.model.norm, Norm)
    assert [line for line in told if "fused layers are not used, so training is slower" in line]
    logp, gradients = trained(policy)
    assert logp.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_policy_refuses_weights_that_are_not_finite() -> None:
    model = made("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="are not finite"):
        policy_of(model)


def test_other_layers_stay_as_they_are(told: list[str]) -> None:
    heads_are_normed = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))
    with_biases = LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True))
    another_gate = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    for model in (heads_are_normed, with_biases, another_gate):
        policy = policy_of(model)
        assert not is_fused(policy)
        assert trained(policy)[0].isfinite().all()
    assert not is_fused(policy_of(made("llama"), dtype="bfloat16"))
    assert not told
