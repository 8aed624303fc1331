"""The gradient of the head in chunks, against the true one."""

import torch

from actors.learner.model.chunked_head import HeadTask, _ChunkedLogProbs


def test_a_bfloat16_head_gets_the_whole_gradient_of_many_chunks() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=draw).abs().bfloat16()  # one direction: a sum that grows
    weight = (0.02 * torch.randn(64, 16, generator=draw)).bfloat16()
    bias, targets = torch.zeros(64).bfloat16(), torch.zeros(512, dtype=torch.int64)
    true = weight.double().requires_grad_()
    true_bias = bias.double().requires_grad_()
    logits = hidden.double() @ true.t() + true_bias
    logits.log_softmax(-1)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    for n_chunk in (512, 1):
        ours, our_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        found = _ChunkedLogProbs.apply(hidden, ours, our_bias, HeadTask(targets, 1.0, n_chunk))  # type: ignore[no-untyped-call]
        found[:, 0].sum().backward()
        for grad, expected in ((ours.grad, true.grad), (our_bias.grad, true_bias.grad)):
            assert grad.dtype is torch.bfloat16
            share = float((grad.double() * expected).sum() / expected.square().sum())
            assert abs(share - 1) < 0.01, n_chunk
