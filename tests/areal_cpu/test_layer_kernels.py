"""The learner's C kernels: what the operations of torch give in float64, and nothing beyond their tensors.

Shapes: S rows, E tokens of all sequences, A channels of a row, H query heads, D head width.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.models.packed_row import SequencePiece, lay_out
from areal_cpu import build
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.sequences import Sequences

pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(build.library() is None, reason="no C compiler"),
]
NEAR = 4e-6  # of the largest

counts = st.integers(1, 70)
families = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1, max_size=4
)
grouped = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)])
widths = st.sampled_from([2, 16, 24, 32, 64, 80, 128])


@pytest.fixture(scope="module")
def kernels() -> LayerKernels:
    return LayerKernels()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def is_near(got: Tensor, expected: Tensor, *, least: float = 1e-3, times: float = 1.0) -> bool:
    return bool((got - expected).abs().max() <= times * NEAR * expected.abs().max().clamp_min(least))


def rows_of(drawn_families: list[tuple[int, list[int]]], *, share: bool = True) -> Sequences:
    """Sequences whose families share a prompt, as the learner lays them out."""
    laid = [
        SequencePiece(
            torch.cat([torch.full((prompt,), family), torch.arange(own) + 100 * (i + 1)]),
            torch.arange(1, prompt + own),
            family,
        )
        for family, (prompt, owns) in enumerate(drawn_families)
        for i, own in enumerate(owns)
    ]
    row = lay_out(laid, share=share)
    made = Sequences.of(row.lengths, row.expand_E, row.keep_S)
    assert made is not None
    assert made.n_rows == len(row.ids_S)
    return made


def attention(qkv_SA: Tensor, where: Sequences, n_query: int, n_key: int, scale: float) -> Tensor:
    """Each sequence on its own, by its definition."""
    heads_SAD = qkv_SA.view(len(qkv_SA), n_query + 2 * n_key, -1)
    attn = torch.zeros(len(qkv_SA), n_query, heads_SAD.shape[-1], dtype=qkv_SA.dtype)
    for rows, first in zip(where.rows.split(where.lengths.tolist()), where.firsts.tolist(), strict=True):
        query, key, value = heads_SAD[rows].transpose(0, 1).split([n_query, n_key, n_key])
        key, value = (part.repeat_interleave(n_query // n_key, 0) for part in (key, value))
        later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        share = (scale * query @ key.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1)
        attn = attn.index_copy(0, rows[first:], (share @ value).transpose(0, 1)[first:])
    return attn.flatten(1)


@settings(max_examples=60)
@given(lengths=families, heads=grouped, width=widths, share=st.booleans(), size=st.sampled_from([0.3, 1.0, 3.0]))
def test_packed_attention_and_its_gradients(
    lengths: list[tuple[int, list[int]]], heads: tuple[int, int], width: int, share: bool, size: float
) -> None:
    kernels, where, (n_query, n_key) = LayerKernels(), rows_of(lengths, share=share), heads
    qkv, grad = size * drawn(where.n_rows, (n_query + 2 * n_key) * width), drawn(where.n_rows, n_query * width)
    scale = width**-0.5
    attn, total = kernels.attention(qkv, where, n_query=n_query, n_key=n_key, scale=scale)
    back = kernels.attention_back(grad, qkv, attn, total, where, n_key=n_key, scale=scale)
    exact = qkv.double().requires_grad_()
    expected = attention(exact, where, n_query, n_key, scale)
    expected.backward(grad.double())  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    rounding = max(1.0, size * size)  # of scores, which grow with the square
    assert is_near(attn, expected.detach(), times=rounding)
    assert is_near(back, exact.grad, least=rounding, times=rounding)
    again, _ = kernels.attention(qkv, where, n_query=n_query, n_key=n_key, scale=scale)
    assert torch.equal(again, attn)
    assert torch.equal(kernels.attention_back(grad, qkv, attn, total, where, n_key=n_key, scale=scale), back)


def test_a_long_sequence_and_large_scores(kernels: LayerKernels) -> None:
    where = Sequences.of((700,), None, None)
    assert where is not None
    qkv, grad = 20.0 * drawn(700, 3 * 64), drawn(700, 64)
    attn, total = kernels.attention(qkv, where, n_query=1, n_key=1, scale=0.125)
    back = kernels.attention_back(grad, qkv, attn, total, where, n_key=1, scale=0.125)
    query, key, value = (part.unsqueeze(0).requires_grad_() for part in qkv.double().split(64, dim=1))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.125)
    expected.backward(grad.double().unsqueeze(0))  # type: ignore[no-untyped-call]
    exact = torch.cat([part.grad[0] for part in (query, key, value) if part.grad is not None], 1)
    assert is_near(attn, expected[0].detach(), times=250.0)  # scores of some thousands, whose rounding shows
    assert is_near(back, exact, times=250.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_attention_kernel_keeps_nan_within_its_sequence(kernels: LayerKernels, bad: float) -> None:
    where = rows_of([(3, [20, 20]), (4, [9])], share=False)
    n = where.lengths.tolist()
    qkv = drawn(where.n_rows, 3 * 32)
    qkv[n[0] + 5] = bad
    attn, total = kernels.attention(qkv, where, n_query=1, n_key=1, scale=0.2)
    back = kernels.attention_back(torch.ones_like(attn), qkv, attn, total, where, n_key=1, scale=0.2)
    for parts in (attn.split(n), back.split(n)):
        assert parts[0].isfinite().all()
        assert parts[2].isfinite().all()
    assert attn[n[0] + 5 : n[0] + n[1]].isnan().all()
    assert back[n[0] + 5 : n[0] + n[1]].isnan().any(1).all()


def test_attention_kernel_reads_and_writes_within_its_own_rows(kernels: LayerKernels) -> None:
    """Between other numbers, and with those that nobody has set in the rest of its memory."""
    where = rows_of([(13, [5, 6, 7]), (2, [1, 1])])
    around = torch.full((where.n_rows + 4, 4 * 24), torch.nan)
    qkv = around[2:-2]
    qkv.copy_(drawn(where.n_rows, 4 * 24))
    attn, total = kernels.attention(qkv, where, n_query=2, n_key=1, scale=0.2)
    back = kernels.attention_back(drawn(where.n_rows, 48), qkv, attn, total, where, n_key=1, scale=0.2)
    assert attn.isfinite().all()
    assert back.isfinite().all()
    assert around[:2].isnan().all()
    assert around[-2:].isnan().all()


def test_rows_that_are_not_as_laid_out_are_left_to_others() -> None:
    expand, keep = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([0, 1, 2, 5])
    made = Sequences.of((3, 3), expand, keep)
    assert made is not None
    assert made.firsts.tolist() == [0, 2]
    assert Sequences.of((3, 3), expand, torch.tensor([3, 1, 2, 5])) is None  # a later place
    assert (
        Sequences.of((2, 1, 3), torch.tensor([0, 1, 2, 3, 1, 4]), torch.tensor([0, 1, 2, 3, 5])) is None
    )  # in between


def test_sequences_beyond_their_rows_are_none() -> None:
    made = rows_of([(3, [2, 2])])
    for wrong in (
        {"n_rows": made.n_rows - 1}, {"lengths": made.lengths + 1}, {"firsts": made.firsts + 9},
        {"firsts": made.firsts[:1]}, {"rows": made.rows - 1}, {"rows": made.rows.int()},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"sequence|rows|int64|earlier"):
            Sequences(
                **{name: wrong.get(name, getattr(made, name)) for name in ("n_rows", "lengths", "firsts", "rows")}
            )


@given(n=counts, width=st.sampled_from([1, 15, 16, 17, 70, 512, 513, 1100]), size=st.sampled_from([1.0, 30.0, 300.0]))
def test_gates_and_their_gradients(n: int, width: int, size: float) -> None:
    kernels, both, grad = LayerKernels(), size * drawn(n, 2 * width), drawn(n, width)
    exact = both.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    gated = F.silu(gate) * up
    gated.backward(grad.double())  # type: ignore[no-untyped-call]
    assert is_near(kernels.gate(both), gated.detach())
    kernels.gate_back(both, grad)
    assert exact.grad is not None
    assert is_near(both, exact.grad)
    assert is_near(grad, gated.detach())


def test_gates_without_a_number_give_none(kernels: LayerKernels) -> None:
    both = torch.ones(6, 8)
    both[:3, 1], both[3:, 5] = torch.nan, torch.nan
    both[0, 0], both[0, 2] = torch.inf, -100.0
    gated = kernels.gate(both)
    assert torch.equal(gated.isnan(), torch.tensor([False, True, False, False]).expand(6, 4))
    assert gated[0, 0] == torch.inf
    assert abs(float(gated[0, 2])) < 1e-30
    grad = torch.ones(6, 4)
    kernels.gate_back(both, grad)
    assert both[:, [1, 5]].isnan().any(1).all()
    assert both[1:, [0, 2, 3, 4, 6, 7]].isfinite().all()


@given(n=counts, words=st.sampled_from([1, 2, 15, 16, 17, 33, 512, 1003]), size=st.sampled_from([0.1, 3.0, 40.0]))
def test_log_probs_entropies_and_probabilities(n: int, words: int, size: float) -> None:
    kernels, logits, targets = LayerKernels(), size * drawn(n, words), torch.arange(n) * 7 % words
    logp, entropy, share = kernels.target_logprobs(logits, targets)
    exact = logits.double().log_softmax(-1)
    assert is_near(logp, exact.gather(1, targets[:, None])[:, 0], least=1.0)
    assert is_near(entropy, -(exact.exp() * exact).sum(-1), least=1.0)
    assert is_near(share, exact.exp(), least=1.0)


def test_log_probs_of_logits_with_nan_or_infinity_are_not_finite(kernels: LayerKernels) -> None:
    logits = torch.zeros(5, 20)
    logits[0, 3], logits[1, 19], logits[2, 0] = torch.nan, torch.nan, torch.inf
    logits[3, 1] = -torch.inf
    logp, _, share = kernels.target_logprobs(logits, torch.full((5,), 7))
    assert logp.isfinite().tolist() == [False, False, False, True, True]
    assert share.isfinite().all(1).tolist() == [False, False, False, True, True]
    assert torch.allclose(share[3:].sum(1), torch.ones(2))


def test_other_shapes_and_types_are_refused(kernels: LayerKernels) -> None:
    where = rows_of([(3, [2, 2])])
    qkv, ones = torch.ones(where.n_rows, 12), torch.ones(4, 6)
    for call in (
        lambda: kernels.attention(qkv[1:], where, n_query=1, n_key=1, scale=1.0),
        lambda: kernels.attention(torch.ones(where.n_rows, 13), where, n_query=1, n_key=1, scale=1.0),
        lambda: kernels.attention(torch.ones(where.n_rows, 14), where, n_query=3, n_key=2, scale=1.0),
        lambda: kernels.attention(qkv.double(), where, n_query=1, n_key=1, scale=1.0),
        lambda: kernels.attention_back(torch.ones(1, 4), qkv, qkv[:, :4], qkv[:, :1], where, n_key=1, scale=1.0),
        lambda: kernels.norm(ones.t(), 1e-5),
        lambda: kernels.norm_back(ones, ones[1:], ones[:, :1].contiguous()),
        lambda: kernels.norm_back(ones, ones, torch.ones(4)),
        lambda: kernels.gate(torch.ones(4, 5)),
        lambda: kernels.gate_back(ones, ones),
        lambda: kernels.rope(ones, ones, ones, n_heads=2, width=6),
        lambda: kernels.rope(ones, ones[:, :3].contiguous(), ones[:, :3].contiguous(), n_heads=2, width=3),
        lambda: kernels.rope(ones, ones[:3], ones, n_heads=1, width=6),
        lambda: kernels.transposed(ones.int()),
        lambda: kernels.scale_back(ones, ones, torch.ones(5)),
        lambda: kernels.target_logprobs(ones, torch.zeros(3, dtype=torch.int64)),
        lambda: kernels.target_logprobs(ones, torch.zeros(4)),
    ):
        with pytest.raises(ValueError, match=r"kernel|turn|query heads|halves"):
            call()
    for beyond in (-1, 6):
        with pytest.raises(IndexError, match="ids below 6"):
            kernels.target_logprobs(ones, torch.full((4,), beyond))


def test_gate_backward_increments_the_version_of_its_saved_tensor(kernels: LayerKernels) -> None:
    """torch refuses a second backward by the version of what was saved."""
    both, grad = drawn(3, 8), drawn(3, 4)
    before = both._version
    kernels.gate_back(both, grad)
    assert both._version > before
