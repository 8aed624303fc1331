"""Divergences of the policy from a teacher over the vocabulary, with their gradients. Pure: no I/O.

p is the teacher, q the policy (GKD, arXiv 2306.13649, section 3), and beta chooses the divergence of a position:

    beta = 0        KL(p, q) = sum p log(p / q)                 forward
    beta = 1        KL(q, p) = sum q log(q / p)                 reverse
    between         beta KL(p, m) + (1 - beta) KL(q, m)         generalised JSD, m = beta p + (1 - beta) q

The sum is over classes of words: each word is one, or with `top_k` each of the teacher's k likeliest words, and all
others together. Merging words never raises a divergence (data-processing inequality), so it grows with k up to the
value for the whole vocabulary, which k = V gives. It stays a divergence: never negative, 0 for equal classes.

Shapes: C tokens, V words, K likeliest words, B classes: V, or K + 1, the other words last.
"""

import math

import torch
from torch import Tensor


def classes(log_prob_CV: Tensor, words_CK: Tensor | None) -> Tensor:
    """(C, B) log-probs of the classes; `words_CK` None: each word is one."""
    if words_CK is None:
        return log_prob_CV
    others_C1 = _others(log_prob_CV, words_CK).logsumexp(1, keepdim=True)
    return torch.cat([log_prob_CV.gather(1, words_CK), others_C1], 1)


def divergence(log_p_CB: Tensor, log_q_CB: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(C,) the divergence D and (C, B) q dD/dq, up to a multiple of q, which has no influence on a logit."""
    p_CB, q_CB = log_p_CB.exp(), log_q_CB.exp()
    if beta == 0:
        return (p_CB * _log_ratio(log_p_CB, log_q_CB)).sum(1), -p_CB
    if beta == 1:
        terms_CB = q_CB * _log_ratio(log_q_CB, log_p_CB)
        return terms_CB.sum(1), terms_CB
    log_m_CB = torch.logaddexp(log_p_CB + math.log(beta), log_q_CB + math.log1p(-beta))
    ours_CB = (1 - beta) * q_CB * _log_ratio(log_q_CB, log_m_CB)
    return (beta * p_CB * _log_ratio(log_p_CB, log_m_CB) + ours_CB).sum(1), ours_CB


def by_logit(log_q_CV: Tensor, words_CK: Tensor | None, slope_CB: Tensor) -> Tensor:
    """(C, V) dD by the policy's logits, from `slope_CB` = q dD/dq of the classes: the others share by probability."""
    total_C1 = slope_CB.sum(1, keepdim=True)
    if words_CK is None:
        return slope_CB - log_q_CV.exp() * total_C1
    shared_CV = _others(log_q_CV, words_CK).softmax(1) * slope_CB[:, -1:]
    return shared_CV.scatter_(1, words_CK, slope_CB[:, :-1]).sub_(log_q_CV.exp() * total_C1)


def _others(log_prob_CV: Tensor, words_CK: Tensor) -> Tensor:
    return log_prob_CV.scatter(1, words_CK, -torch.inf)


def _log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a / b), and 0 where a is 0: its term is 0."""
    return torch.where(log_a == -torch.inf, 0.0, log_a - log_b)
