"""Context parallelism: what each rank computes and sees of a packed row. Its results: test_fsdp.py."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from actors.learner.link.rendezvous import ContextGroup, LearnerRanks
from actors.learner.model.context_parallel import RowSplit, padded, rows_by_rank
from actors.learner.model.policy import Policy
from actors.models.packed_row import PackedRow, SequencePiece, lay_out
from areal_bus.errors import ConfigError

CPU = torch.device("cpu")


def seen_by_row(row: PackedRow) -> dict[int, list[int]]:
    """Row -> the rows that it sees, in order: causal attention within each whole sequence."""
    n = sum(row.lengths)
    expand = range(n) if row.expand_E is None else row.expand_E.tolist()
    keep = range(n) if row.keep_S is None else row.keep_S.tolist()
    start_of = [start for start, length in zip(starts(row.lengths), row.lengths, strict=True) for _ in range(length)]
    return {r: list(expand[start_of[place] : place + 1]) for r, place in enumerate(keep)}


def starts(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@st.composite
def batches(draw: st.DrawFn) -> list[SequencePiece]:
    """Families with a common prompt, and sequences of their own."""
    pieces = []
    for family in range(draw(st.integers(1, 3))):
        prompt = draw(st.integers(1, 6))
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            places = torch.arange(prompt, prompt + length)
            pieces.append(SequencePiece(torch.arange(prompt + length) + 10 * family, places, family=family))
    return pieces


@given(pieces=batches(), size=st.integers(2, 4))
def test_context_parallel_ranks_together_equal_one_rank(pieces: list[SequencePiece], size: int) -> None:
    row = lay_out(pieces, share=True)
    row = row.filled(padded(len(row.ids_S), size, CPU), len(row.wanted_N))
    shares = rows_by_rank(len(row.ids_S), size)
    assert torch.cat(shares).sort().values.tolist() == list(range(len(row.ids_S)))
    seen: dict[int, list[int]] = {}
    gathered = torch.cat(shares).tolist()  # the row at each place behind an all-gather
    wanted: list[int] = []
    for rank, own in enumerate(shares):
        split = RowSplit(row, ContextGroup(rank, size, None), CPU)
        assert split.part.ids_S.tolist() == row.ids_S[own].tolist()
        queries, keys = own[split._queries_R].tolist(), [gathered[place] for place in split._keys.tolist()]
        assert split._queries_R[split._back_R].tolist() == list(range(len(own)))
        for n_queries, n_keys in split._runs:
            run, keys_of_run = queries[:n_queries], keys[:n_keys]
            queries, keys = queries[n_queries:], keys[n_keys:]
            seen |= {row: keys_of_run[: n_keys - n_queries + i + 1] for i, row in enumerate(run)}
        wanted += own[split.part.wanted_N].tolist()
    assert seen == seen_by_row(row)
    assert [wanted[place] for place in split._places_N.tolist()] == row.wanted_N.tolist()


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 40), (40, 40), (700, 1500), (1100, 1200)])
def test_the_last_tokens_of_a_sequence_attend_to_all_before_them(n_queries: int, n_keys: int) -> None:
    """In blocks, with grouped key heads: as with a plain mask."""
    row = lay_out([SequencePiece(torch.zeros(1601, dtype=torch.int64), torch.arange(1, 1601))], share=True)
    split = RowSplit(row, ContextGroup(0, 2, None), CPU)
    torch.manual_seed(n_keys)
    q, k, v = torch.randn(1, 4, n_queries, 8), torch.randn(1, 2, n_keys, 8), torch.randn(1, 2, n_keys, 8)
    mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    plain = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    for _ in range(2):  # the mask is kept
        torch.testing.assert_close(split._attention(q, k, v, 0.3), plain, atol=1e-6, rtol=1e-5)


def test_a_model_with_windows_is_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=4))
    ranks = LearnerRanks(0, 2, context=ContextGroup(0, 2, None))
    with pytest.raises(ConfigError, match=r"needs plain causal attention in every layer, and mistral has sliding"):
        Policy(model, ranks=ranks, device="cpu", temperature=1.0)
