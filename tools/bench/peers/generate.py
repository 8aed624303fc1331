"""Hugging Face's half of the bench `generate`: `generate`, batch after batch, and its continuous batching."""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from tools.bench.completions import SHAPE, Asked, requests
from tools.bench.serving import serve

torch.set_num_threads(1)
torch.manual_seed(0)
configure: Any = GenerationConfig
model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
model.eval().set_attn_implementation("sdpa")
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "pad_token_id": 0,
    "eos_token_id": None,
}


class Lengths(StoppingCriteria):
    """Each row ends at its own number of tokens."""

    def __init__(self, n_given: int, n_new: list[int]) -> None:
        self._ends = torch.tensor(n_new) + n_given

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def generate(batch: int, mixed: bool, seed: int) -> float:
    """CPU seconds a wanted token, its log-prob included."""
    asked = requests(batch, mixed=mixed, seed=seed)
    began = time.process_time()
    for at in range(0, len(asked), batch):
        one_batch(asked[at : at + batch])
    return (time.process_time() - began) / sum(one.n_new for one in asked)


@torch.inference_mode()
def one_batch(asked: list[Asked]) -> None:
    """Padded on the left to the longest prompt, decoded until the last row has ended."""
    width, n_new = max(len(one.ids) for one in asked), [one.n_new for one in asked]
    ids = torch.tensor([[0] * (width - len(one.ids)) + one.ids for one in asked])
    mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in asked])
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(n_new),
        stopping_criteria=StoppingCriteriaList([Lengths(width, n_new)]),
        return_dict_in_generate=True,
        output_logits=True,
        **SAMPLING,
    )
    logits = torch.stack(made.logits, dim=1)
    torch.log_softmax(logits, dim=-1).gather(-1, made.sequences[:, width:, None])


def continuous(batch: int, seed: int) -> float:
    """CPU seconds a token of its continuous batching, equal lengths (it has one limit for all), log-probs on."""
    asked = requests(batch, mixed=False, seed=seed)
    config = configure(max_new_tokens=asked[0].n_new, **SAMPLING)
    began = time.process_time()
    made = model.generate_batch([one.ids for one in asked], generation_config=config, progress_bar=False)
    took = time.process_time() - began
    return took / sum(len(one.generated_tokens) for one in made.values())


if __name__ == "__main__":
    serve({"generate": generate, "continuous": continuous})
