"""Tiny random models of the causal-LM families of the installed transformers, and what each computes by itself."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

V, MOST = 32, 256
LARGEST = 5_000_000  # parameters: a family whose configuration stays larger is left out
SIZES: dict[str, int] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], V),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"], 64),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_global_key_value_heads", "max_window_layers"], 2),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], MOST),
    **dict.fromkeys(["head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv"], 8),
    **dict.fromkeys(["sliding_window", "attention_window_size", "rotary_dim", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "qk_head_dim", "mamba_d_head", "mamba_head_dim"], 16),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "linear_num_key_heads", "expand"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "n_shared_experts"], 1),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"], 4),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["linear_value_head_dim", "mamba_n_groups"], 8),
    **dict.fromkeys(["num_kv_shared_layers", "num_nextn_predict_layers"], 0),
    "index_n_heads": 2,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str, **others: Any) -> Any:
    """A small configuration of the family, with each kind of its layers. Raises what the class raises."""
    given = CONFIG_MAPPING[name]().to_dict()  # type: ignore[no-untyped-call]
    sizes = _sizes(given)
    if isinstance(given.get("text_config"), dict):
        sizes["text_config"] = _sizes(given["text_config"])
    for key in ("layer_types", "mlp_layer_types"):
        if given.get(key):
            sizes[key] = (list(dict.fromkeys(given[key])) * 4)[:4]
    return CONFIG_MAPPING[name](**sizes | others)


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    unset = {key for key in ("sliding_window", "q_lora_rank", "head_dim") if given.get(key) is None}
    found: dict[str, Any] = {key: size for key, size in SIZES.items() if key in given and key not in unset}
    if "initializer_range" in given:
        found["initializer_range"] = 0.3
    if "kv_lora_rank" in given:  # every head has keys of its own
        found["num_key_value_heads"] = 4
        found.pop("head_dim", None)
    return found | TOKENS


def tiny(name: str, **others: Any) -> Any:
    """The random model, float32; None where it stays large. Raises what the class raises."""
    config = tiny_config(name, **others)
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())  # type: ignore[no-untyped-call]
    if n > LARGEST:
        return None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model.eval()  # type: ignore[no-any-return]


def plain_logps(model: Any, ids: list[int]) -> Tensor:
    """Log-probs of all tokens but the first, by one plain forward pass over this sequence alone."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]  # type: ignore[no-any-return]
