"""Hugging Face's side of the bench `smollm2`: `generate`, and a plain step padded to the longest sequence."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.harness.worker_main import serve
from benchmarks.smollm2 import inputs as work

sampling: list[Any] = []
training: list[tuple[Any, torch.optim.Optimizer]] = []


def load(model: str) -> None:
    for held in range(2):
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        loaded.eval()
        loaded.set_attn_implementation("sdpa")
        if held:
            sampling.append(loaded)
        else:
            rule = torch.optim.AdamW(
                loaded.parameters(), lr=work.LR, betas=work.BETAS, eps=work.EPS, weight_decay=work.DECAY
            )
            training.append((loaded, rule))


class StopsAtLength(StoppingCriteria):
    """Each row ends at its own number of tokens."""

    def __init__(self, n_given: int, n_new: list[int]) -> None:
        self._ends = torch.tensor(n_new) + n_given

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def generate(seed: int) -> dict[str, float]:
    """CPU seconds and tokens that were asked for; no log-probs."""
    return sampled(work.requests(seed, work.BATCH))


def generate_few(seed: int) -> dict[str, float]:
    """The same of few rows."""
    return sampled(work.requests(seed, work.FEW))


def sampled(asked: list[work.TimedRequest]) -> dict[str, float]:
    began = time.process_time()
    made = one_batch([one.ids for one in asked], [one.n_new for one in asked], do_sample=True)
    took = time.process_time() - began
    return {"seconds": took, "tokens": sum(min(made.shape[1] - work.N_GIVEN, one.n_new) for one in asked)}


def greedy(seed: int, n_new: int) -> list[list[int]]:
    asked = [one.ids for one in work.requests(seed, work.BATCH)]
    made = one_batch(asked, [n_new] * len(asked), do_sample=False)
    found: list[list[int]] = made[:, work.N_GIVEN :].tolist()
    return found


@torch.inference_mode()
def one_batch(prompts: list[list[int]], n_new: list[int], *, do_sample: bool) -> torch.Tensor:
    """Decoded until the last row has ended; all prompts are of one length."""
    ids = torch.tensor(prompts)
    how: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    made: torch.Tensor = sampling[0].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max(n_new),
        stopping_criteria=StoppingCriteriaList([StopsAtLength(ids.shape[1], n_new)]),
        do_sample=do_sample,
        pad_token_id=0,
        eos_token_id=None,
        **how,
    )
    return made


def update(seed: int) -> dict[str, float]:
    """CPU seconds of a step, the tokens it trained, loss and gradient norm.

    All samples in one batch, padded on the right; logits of the places before completion tokens only.
    """
    model, rule = training[0]
    samples = work.batch(seed)
    began = time.process_time()
    longest = max(len(one.ids) for one in samples)
    rows = [[*one.prompt, *one.ids, *[0] * (longest - len(one.ids))] for one in samples]
    ids = torch.tensor(rows)
    mask = torch.tensor([[1] * (work.N_GIVEN + len(one.ids)) + [0] * (longest - len(one.ids)) for one in samples])
    trained = mask[:, work.N_GIVEN :].float()
    gain = torch.tensor(work.advantages(samples))[:, None]
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    wanted = ids[:, work.N_GIVEN :, None]
    theta = logits.gather(-1, wanted)[..., 0] - torch.logsumexp(logits, dim=-1)
    ratio = torch.exp(theta - theta.detach())
    low, high = 1 - work.CLIP_RATIO, 1 + work.CLIP_RATIO
    loss: Any = -(torch.min(ratio * gain, ratio.clamp(low, high) * gain) * trained).sum() / trained.sum()
    rule.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP_NORM)
    rule.step()
    took = time.process_time() - began
    return {"seconds": took, "tokens": int(trained.sum()), "loss": float(loss.detach()), "norm": float(norm)}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"load": load, "generate": generate, "generate_few": generate_few, "greedy": greedy, "update": update})
