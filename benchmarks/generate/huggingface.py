"""Hugging Face's side of the bench `generate`: `generate` batch by batch, and continuous batching."""

import time
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.generate.requests import LONGEST, N_GIVEN, SHAPE, CompletionRequest, requests
from benchmarks.harness.worker_main import serve

torch.set_num_threads(1)
torch.manual_seed(0)
configure: Any = GenerationConfig
PAGE = 32  # positions: the largest that leaves little of the longest request's last page unused
PATIENCE_S = 120.0
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


class EndsAtLength(StoppingCriteria):
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
def one_batch(asked: list[CompletionRequest]) -> None:
    """Padded on the left to the longest prompt, decoded until the last row has ended."""
    width, n_new = max(len(one.ids) for one in asked), [one.n_new for one in asked]
    ids = torch.tensor([[0] * (width - len(one.ids)) + one.ids for one in asked])
    mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in asked])
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(n_new),
        stopping_criteria=StoppingCriteriaList([EndsAtLength(width, n_new)]),
        return_dict_in_generate=True,
        output_logits=True,
        **SAMPLING,
    )
    logits = torch.stack(made.logits, dim=1)
    torch.log_softmax(logits, dim=-1).gather(-1, made.sequences[:, width:, None])


managers: dict[int, Any] = {}  # open, by batch


def manager(batch: int) -> Any:
    """Its continuous batching, open and warm, with room for `batch` of the longest requests at once, not for more."""
    if batch not in managers:
        managers[batch] = opened(batch)
        finish(managers[batch], [CompletionRequest([1], 2)])
    return managers[batch]


def opened(batch: int) -> Any:
    pages = -(-(N_GIVEN * 3 // 2 + LONGEST) // PAGE)
    sizes: dict[str, Any] = {
        "num_blocks": batch * pages,
        "max_requests_per_batch": batch,
        "max_batch_tokens": max(batch, PAGE),
    }
    config = ContinuousBatchingConfig(page_size=PAGE, return_logprobs=True, **sizes)
    running = model.init_continuous_batching(configure(max_new_tokens=LONGEST, **SAMPLING), config)
    running.start()
    return running


def continuous(batch: int, mixed: bool, seed: int) -> float:
    """CPU seconds a token of its continuous batching, all its threads together, log-probs on."""
    running = manager(batch)
    asked = requests(batch, mixed=mixed, seed=seed)
    began = time.process_time()
    finish(running, asked)
    return (time.process_time() - began) / sum(one.n_new for one in asked)


def finish(running: Any, asked: list[CompletionRequest]) -> None:
    """Every request to its end."""
    left = {running.add_request(one.ids, max_new_tokens=one.n_new): one.n_new for one in asked}
    while left:
        made = running.get_result(timeout=PATIENCE_S)
        if made is None or made.error is not None:
            raise RuntimeError(f"every request must end: {'none did' if made is None else made.error}")
        if made.is_finished():
            n_new = left.pop(made.request_id)
            if not n_new == len(made.generated_tokens) == len(made.logprobs):
                raise RuntimeError(f"{n_new} tokens were asked for; got {len(made.generated_tokens)}")


if __name__ == "__main__":
    try:
        serve({"generate": generate, "continuous": continuous})
    finally:  # their threads would outlive this process's work
        for one in managers.values():
            one.stop(block=True)
