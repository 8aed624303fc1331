"""Tests with the first weights whether the engine's use of the model's class computes what the model computes."""

from typing import Any, Protocol

import torch
from torch import Tensor

from actors.engines.protocol import Completion, Request
from areal_bus.errors import ConfigError

PROMPTS, N_NEW = (12, 7), 6  # tokens of the prompts, and of each sample
LIMITS = {torch.float32: 5e-4}  # largest difference of a log-prob
ROUGH = 0.2  # mean difference, for bfloat16 and float16, whose rounding depends on the order of sums
REMEDY = 'choose another model, or rollout.engine = "vllm" or "sglang"'


class Steps(Protocol):
    """What is needed of the engine."""

    @property
    def n_live(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Completion]: ...


def check(engine: Steps, model: Any, *, most: int, n_words: int) -> None:
    """Compare samples of a fresh engine with plain forwards (`most` positions at most). Raises ConfigError."""
    if most <= max(PROMPTS) + N_NEW:
        return
    family = model.config.get_text_config().model_type
    prompts = [[(place + 1) * (7919 + uid) % n_words for place in range(n)] for uid, n in enumerate(PROMPTS)]
    try:
        for uid, sample in ((0, 0), (0, 1), (1, 0)):
            engine.submit(Request(("", uid, 0, sample, 0), prompts[uid], (7, uid, sample), N_NEW, 1.0, 1.0))
        done: list[Completion] = []
        while engine.n_live:
            done += engine.step()
        gaps = torch.cat([_gaps(model, prompts[one.key[1]], one) for one in done])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        brief = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model family refused: the builtin engine cannot run {family}: {type(error).__name__}: {brief}; {REMEDY}"
        ) from error
    dtype = next(model.parameters()).dtype
    gap, bound = (float(gaps.max()), LIMITS[dtype]) if dtype in LIMITS else (float(gaps.mean()), ROUGH)
    if not gap <= bound:  # NaN differs, too
        raise ConfigError(
            f"model family refused: log-probs of the builtin engine differ from the model's own by {gap:.2g} (at most "
            f"{bound:g}): {family} keeps a state or a mask that the engine does not know; {REMEDY}"
        )


@torch.inference_mode()
def _gaps(model: Any, prompt: list[int], done: Completion) -> Tensor:
    """Differences of the log-probs of a completion, by one plain forward."""
    ids_T = torch.tensor([*prompt, *done.ids], device=next(model.parameters()).device)
    n = len(done.ids)
    logits_nV = model(input_ids=ids_T[None], use_cache=False).logits[0, -n - 1 : -1].float()
    expected_n = logits_nV.log_softmax(-1).gather(1, ids_T[-n:, None])[:, 0].cpu()
    gaps_n: Tensor = (expected_n - torch.tensor(done.logps)).abs()
    return gaps_n
