"""Small random models of each family, longer than their windows: engine, learner and export against a plain forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from actors.learner.checkpoint.model_part import stage_model
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.models.loading import load_model
from actors.models.packed_row import SequencePiece
from tests.support.learner_setup import NoTokenizer

V, WINDOW = 31, 8  # 31: padding, end of text, unknown and the characters of the tasks
SHAPE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
ROPE_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROPE_3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2 with windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SHAPE, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=WINDOW, sliding_window_pattern=2)
    ),
}


def saved(folder: Path, family: str, seed: int) -> str:
    """A folder as a user has it."""
    torch.manual_seed(seed)
    FAMILIES[family]().save_pretrained(folder)
    return str(folder)


def plain(folder: str) -> Any:
    """The model by transformers alone; eager attention, which alone knows Gemma 2's soft cap."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logps(model: Any, ids: list[int], n: int) -> Tensor:
    """Log-probs of the last n tokens by one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -n - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[-n:])[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_equals_a_plain_forward_beyond_the_attention_window(
    tmp_path: Path, family: str, on_update: str
) -> None:
    folder = saved(tmp_path / "a", family, 0)
    model = load_model(folder, "float32", "cpu")
    options = EngineOptions(n_slots=5, on_update=on_update, prefix_share=2.0)  # type: ignore[arg-type]
    engine = BuiltinEngine(model, options, stop_ids=frozenset(), version=0)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, V, (n,), generator=draw).tolist() for n in (1, 3, 9, 9, 20, 31)]
    for uid, ids in enumerate(prompts):
        for sample in range(2):  # two of a prompt share its prefill
            engine.submit(Request(("", uid, 0, sample, 1), ids, (7, uid, sample), 24, 1.0, 1.0))
    done, weights = [], {name: p.clone() for name, p in engine.parameters().items()}
    for step in range(200):
        done += engine.step()
        if step == 5:  # the same weights as a new version: recomputed, or kept
            engine.update(1, weights)
        if not engine.n_live:
            break
    assert len(done) == 12
    for completion in done[-4:]:  # their next turns
        prompts.append([*prompts[completion.key[1]], *completion.ids, 5])
        engine.submit(Request(("", len(prompts) - 1, 0, 0, 2), prompts[-1], (7, 9), 24, 1.0, 1.0))
    while engine.n_live:
        done += engine.step()
    assert any(completion.n_reused for completion in done[12:])
    reference = plain(folder)
    for completion in done:
        ids = [*prompts[completion.key[1]], *completion.ids]
        expected = logps(reference, ids, len(completion.ids))
        assert torch.allclose(torch.tensor(completion.logps), expected, atol=1e-5), family
    assert any(len(completion.spans) == 2 for completion in done)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_unpacked_learners_have_equal_log_probs_and_export_the_trained_weights(
    tmp_path: Path, family: str
) -> None:
    folder = saved(tmp_path / "a", family, 2)
    policy = Policy(load_model(folder, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0)
    assert policy.packed == (family in ("llama3", "qwen2", "qwen3"))
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, V, (n,), generator=draw).tolist() for n in (5, 12, 33, 12)]
    pieces = [SequencePiece(torch.tensor(ids), torch.arange(1, len(ids))) for ids in texts]
    found, _ = policy.logprobs(pieces)
    reference = plain(folder)
    assert torch.allclose(found, torch.cat([logps(reference, ids, len(ids) - 1) for ids in texts]), atol=1e-5)
    (-found.mean()).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in policy.parameters().values():
            assert parameter.grad is not None
            parameter -= 0.05 * parameter.grad
    again, _ = policy.logprobs(pieces)
    assert float((again - found).detach().abs().max()) > 1e-3
    (tmp_path / "b").mkdir()
    stage_model("b", policy, copies=False).write(tmp_path, NoTokenizer())
    exported = plain(str(tmp_path / "b"))
    assert torch.allclose(again, torch.cat([logps(exported, ids, len(ids) - 1) for ids in texts]), atol=1e-5)
