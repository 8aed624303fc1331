"""Log-probs of the targets from hidden states, in chunks of tokens: no (tokens, vocabulary) matrix is kept.

Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk, whose logits the backward pass computes again, and
those of a teacher with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from actors.learner.algorithms.divergence import by_logit, classes, divergence
from areal_cpu import layer_kernels
from areal_cpu.linear import Linear

SCALED = ("logits_scaling", "logit_scale", "lm_head_multiplier")  # settings by which a model changes its logits itself
SOFT_CAP = "final_logit_softcapping"


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the head of another model reads at the same tokens, and how the policy diverges from it (`divergence.py`).

    Words that the policy lacks are left out: the teacher's probabilities are those among the policy's words.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    soft_cap: float | None
    beta: float
    top_k: int | None

    def read(self, chunk: slice, heat: float | Tensor, n_words: int) -> tuple[Tensor, Tensor | None]:
        """(C, B) log-probs of the classes, and the (C, K) words that are classes of their own."""
        logits_CV, _ = _logits(self.hidden_NH[chunk], self.weight_VH, self.bias_V, heat, self.soft_cap)
        log_p_CV = logits_CV[:, :n_words].log_softmax(1)
        if self.top_k is None or self.top_k >= n_words:
            return log_p_CV, None
        words_CK = log_p_CV.topk(self.top_k, dim=1).indices
        return classes(log_p_CV, words_CK), words_CK

    def part(self, tokens: slice) -> "Teacher":
        """The same of some tokens."""
        return replace(self, hidden_NH=self.hidden_NH[tokens])

    def filled(self, n: int) -> "Teacher":
        """The same of `n` tokens, the last ones without meaning."""
        return replace(self, hidden_NH=_filled(self.hidden_NH, n))


@dataclass(frozen=True, slots=True)
class GivenTeacher:
    """The same of a model elsewhere, at temperature 1: log-probs of its likeliest words and of all others."""

    log_p_NB: Tensor
    words_NK: Tensor
    beta: float

    def read(self, chunk: slice, heat: float | Tensor, n_words: int) -> tuple[Tensor, Tensor | None]:
        """As `Teacher.read`."""
        return self.log_p_NB[chunk], self.words_NK[chunk]

    def part(self, tokens: slice) -> "GivenTeacher":
        """The same of some tokens."""
        return replace(self, log_p_NB=self.log_p_NB[tokens], words_NK=self.words_NK[tokens])

    def filled(self, n: int) -> "GivenTeacher":
        """As `Teacher.filled`; the words of a row stay different."""
        more = self.words_NK[-1:].expand(n - len(self.words_NK), -1)
        return replace(self, log_p_NB=_filled(self.log_p_NB, n), words_NK=torch.cat([self.words_NK, more]))


def _filled(rows: Tensor, n: int) -> Tensor:
    return nn.functional.pad(rows, (0, 0, 0, n - len(rows)))


@dataclass(frozen=True, slots=True)
class HeadTask:
    """The output that a forward pass requests from the model's head instead of logits."""

    targets_N: Tensor
    temperature: float | Tensor  # of all targets, or (N, 1)
    n_chunk: int  # 0: what the head reads itself
    entropy_grad: bool = False
    soft_cap: float | None = None
    teacher: Teacher | GivenTeacher | None = None

    def heat(self, chunk: slice) -> float | Tensor:
        """The temperature of a chunk's targets, by which its logits are divided."""
        return self.temperature[chunk] if isinstance(self.temperature, Tensor) else self.temperature


class ChunkedHead(Linear):
    """The head of a causal LM. Returns logits or, with a task, (log-prob, entropy, divergence) of each target."""

    task: HeadTask | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., N, V) logits, or (..., N, 3) float32."""
        if self.task is None:
            return super().forward(x)
        if not self.task.n_chunk:
            return x
        flat_NH = x.reshape(-1, x.shape[-1])
        found_N3 = _ChunkedLogProbs.apply(flat_NH, self.weight, self.bias, self.task)  # type: ignore[no-untyped-call]
        return found_N3.view(*x.shape[:-1], 3)  # type: ignore[no-any-return]


def install(model: Any) -> ChunkedHead | None:
    """Let the model's head take tasks; its parameters stay. None for a model that treats its logits in another way."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    if not isinstance(head, nn.Linear) or any(getattr(config, name, None) not in (None, 1.0) for name in SCALED):
        return None
    head.__class__ = ChunkedHead
    return head  # type: ignore[return-value]


@contextmanager
def working(model: Any, head: ChunkedHead, task: HeadTask) -> Iterator[float | None]:
    """The head works on this task. A soft cap, which this gives, is applied by the head: the model must not cap
    log-probs.
    """
    config = model.config.get_text_config()
    cap = getattr(config, SOFT_CAP, None)
    head.task = replace(task, soft_cap=cap)
    try:
        if cap is not None:
            setattr(config, SOFT_CAP, None)
        yield cap
    finally:
        head.task = None
        if cap is not None:
            setattr(config, SOFT_CAP, cap)


class _ChunkedLogProbs(torch.autograd.Function):
    """(N, 3): log-prob and entropy of each target, and the divergence from the teacher (0 without one) before it. The
    gradient is analytic, by chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask) -> Tensor:
        ctx.task, ctx.dtype = task, _compute_dtype(hidden_NH)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        cast_VH = weight_VH.to(ctx.dtype)
        found_N3 = hidden_NH.new_zeros(len(hidden_NH), 3, dtype=torch.float32)
        for at in range(0, len(hidden_NH), task.n_chunk):
            chunk = slice(at, at + task.n_chunk)
            logits_CV, _ = _logits(hidden_NH[chunk], cast_VH, bias_V, task.heat(chunk), task.soft_cap)
            if task.teacher is not None:
                found_N3[chunk, 2], _ = _divergence(logits_CV, task, chunk, by=None)
            found_N3[chunk, 0], found_N3[chunk, 1], _ = _read(logits_CV, task.targets_N[chunk])
        return found_N3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        task: HeadTask = ctx.task
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        cast_VH = weight_VH.to(ctx.dtype)
        by_hidden_NH = torch.empty_like(hidden_NH)
        by_weight_VH = _sum_like(weight_VH) if ctx.needs_input_grad[1] else None  # not of a frozen head
        by_bias_V = None if bias_V is None else _sum_like(bias_V)
        for at in range(0, len(hidden_NH), task.n_chunk):
            chunk = slice(at, at + task.n_chunk)
            logits_CV, slope_CV = _logits(hidden_NH[chunk], cast_VH, bias_V, task.heat(chunk), task.soft_cap)
            grad_CV = _gradient(logits_CV, gradients[0][chunk], task, chunk)
            if slope_CV is not None:
                grad_CV *= slope_CV
            grad_CV = grad_CV.to(ctx.dtype)
            by_hidden_NH[chunk] = torch.mm(grad_CV, cast_VH).to(hidden_NH.dtype)
            if by_weight_VH is None:
                pass
            elif by_weight_VH.dtype is ctx.dtype:
                by_weight_VH.addmm_(grad_CV.t(), hidden_NH[chunk].to(ctx.dtype))
            else:
                by_weight_VH += torch.mm(grad_CV.t(), hidden_NH[chunk].to(ctx.dtype))
            if by_bias_V is not None:
                by_bias_V += grad_CV.sum(0)
        return by_hidden_NH, _typed(by_weight_VH, weight_VH), _typed(by_bias_V, bias_V), None


def _sum_like(parameter: Tensor) -> Tensor:
    """Zeros to which the parts of all chunks are added: in float32 at least, or a bfloat16 sum would stop growing."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _typed(total: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if total is None or parameter is None else total.to(parameter.dtype)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, heat: float | Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """float32 logits at the temperature; their derivative by the product if a soft cap bends it (else a number)."""
    logits_CV = torch.mm(hidden_CH.to(weight_VH.dtype), weight_VH.t()).float()
    if bias_V is not None:
        logits_CV += bias_V
    if soft_cap is None:
        return (logits_CV / heat if isinstance(heat, Tensor) or heat != 1.0 else logits_CV), None
    bent_CV = torch.tanh(logits_CV / soft_cap)
    return bent_CV * (soft_cap / heat), 1.0 - bent_CV.square()


def _read(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, entropies, and all probabilities (written over the logits where torch computes)."""
    kernels = layer_kernels.found(logits_CV)
    if kernels is not None:
        return kernels.target_logprobs(logits_CV, targets_C)
    total_C = torch.logsumexp(logits_CV, dim=-1)
    logp_C = logits_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1) - total_C
    prob_CV = torch.sub(logits_CV, total_C.unsqueeze(1)).exp_()
    return logp_C, total_C - torch.einsum("cv,cv->c", prob_CV, logits_CV), prob_CV


def _divergence(logits_CV: Tensor, task: HeadTask, chunk: slice, by: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(C,) from the teacher; with `by`, (C, 1), also (C, V) that many times its gradient by the logits."""
    assert task.teacher is not None
    log_q_CV = logits_CV.log_softmax(1)
    log_p_CB, words_CK = task.teacher.read(chunk, task.heat(chunk), logits_CV.shape[1])
    value_C, slope_CB = divergence(log_p_CB, classes(log_q_CV, words_CK), task.teacher.beta)
    return value_C, None if by is None else by_logit(log_q_CV, words_CK, slope_CB * by)


def _gradient(logits_CV: Tensor, grad_C3: Tensor, task: HeadTask, chunk: slice) -> Tensor:
    """By the product of the head, before the bend of a soft cap: of the log-prob, target - p; of the entropy,
    -p (log p + entropy).
    """
    targets_C, heat = task.targets_N[chunk], task.heat(chunk)
    apart_CV = None if task.teacher is None else _divergence(logits_CV, task, chunk, by=grad_C3[:, 2:])[1]
    logp_C, entropy_C, prob_CV = _read(logits_CV, targets_C)
    by_logp_C1 = grad_C3[:, :1]
    weights_CV: Tensor | float = -by_logp_C1
    if task.entropy_grad:
        total_C = logits_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1) - logp_C
        log_p_CV = logits_CV - total_C.unsqueeze(1)
        weights_CV = weights_CV - grad_C3[:, 1:2] * (log_p_CV + entropy_C.unsqueeze(1))
    grad_CV = prob_CV.mul_(weights_CV).scatter_add_(1, targets_C.unsqueeze(1), by_logp_C1)
    if apart_CV is not None:
        grad_CV += apart_CV
    return grad_CV.div_(heat) if isinstance(heat, Tensor) or heat != 1.0 else grad_CV
