"""A shard as a batch: the staleness mask and what is refused."""

import array
import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.batching import Item, batch_shares, build, minibatches, pack, read_batch, record_batch, save_batch
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import ShardItem
from areal_bus.sample_fields import packed
from tests.support.learner_setup import batch_of, random_shard, shard_item


def test_a_batch_knows_where_its_sampled_tokens_lie() -> None:
    item = shard_item(
        sampled=[2, 3, 8, 9, 4, 1], logps=[-1.0] * 4, segments=[[3, 2], [2, 2]], spans=[[1, 1], [3, 3]], clock=3
    )
    (built,) = batch_of([item], clock=3).items
    assert built.places_K.tolist() == [3, 4, 7, 8]
    assert built.ids_T[built.places_K].tolist() == [2, 3, 4, 1]
    assert built.trained_K.tolist() == [False, True, True, True]
    assert built.lags_K.tolist() == [2, 0, 0, 0]
    assert built.n_trained == 3
    assert built.trained_places.tolist() == [4, 7, 8]


def test_a_batch_is_in_group_and_sample_order() -> None:
    shard = random_shard(1)
    batch = build(reversed(shard), step=0, clock=0, n_groups=3, eta=1, n_samples=4)
    assert [(i.group, i.sample) for i in batch.items] == [(g, s) for g in range(3) for s in range(4)]
    assert batch.groups == [0, 1, 2]


def test_a_group_is_whole_by_the_stage_of_its_prompt() -> None:
    shard = [replace(item, born=int(item.group == 2)) for item in random_shard(1) if item.group < 2 or item.sample < 3]
    batch = build(shard, step=0, clock=0, n_groups=3, eta=1, n_samples=lambda born, source: (4, 3)[born])
    assert [item.born for item in batch.items] == [0] * 8 + [1] * 3
    with pytest.raises(ImpossibleEvent, match=r"whole groups of 4 samples: .* \{2: 3\}"):
        build(shard, step=0, clock=0, n_groups=3, eta=1, n_samples=lambda born, source: 4)


@pytest.mark.parametrize(
    "wrong", [{"segments": [[3, 5]]}, {"spans": [[0, 3]]}, {"logps": [-1.0]}, {"segments": [[0, 4], [3, 0]]}]
)
def test_an_item_that_contradicts_itself_is_refused(wrong: dict[str, list[list[int]]]) -> None:
    with pytest.raises(ImpossibleEvent):
        batch_of([shard_item(**wrong)])  # type: ignore[arg-type]


def test_a_rank_trains_a_short_group_only_by_declared_policy_and_never_one_sample_alone() -> None:
    shard = random_shard(1)  # three groups of 4
    short = [item for item in shard if item.group or item.sample in (1, 3)]
    with pytest.raises(ImpossibleEvent, match=r"whole groups of 4 samples: step 0 brought \{0: 2\}"):
        build(short, step=0, clock=0, n_groups=3, eta=1, n_samples=4)
    batch = build(short, step=0, clock=0, n_groups=3, eta=1, n_samples=4, partial_groups=True)
    assert [item.sample for item in batch.items if item.group == 0] == [1, 3]
    alone = [item for item in shard if item.group or item.sample == 1]
    with pytest.raises(ImpossibleEvent, match=r"or 2 of them or more: .*\{0: 1\}"):
        build(alone, step=0, clock=0, n_groups=3, eta=1, n_samples=4, partial_groups=True)


def interleaved() -> list[ShardItem]:
    """An episode whose third call extends its first trajectory, and its two trajectories as samples of their own."""
    whole = shard_item(
        prompt=[5, 6, 7],  # segments: 3 given, 2 sampled; 1 given, 2 sampled; 1 given, 1 sampled
        sampled=[2, 3, 8, 9, 4, 10, 11],
        logps=[-1.0, -2.0, -3.0, -4.0, -5.0],
        segments=[[3, 2], [1, 2], [1, 1]],
        spans=[[1, 1], [2, 2], [3, 2]],
        clock=3,
    )
    first = shard_item(
        prompt=[5, 6, 7], sampled=[2, 3, 10, 11], logps=[-1.0, -2.0, -5.0], segments=[[3, 2], [1, 1]],
        spans=[[1, 1], [2, 1], [3, 1]], clock=3,
    )  # fmt: skip
    second = shard_item(
        prompt=[8], sampled=[9, 4], logps=[-3.0, -4.0], segments=[[1, 2]], spans=[[2, 1], [3, 1]], clock=3
    )
    fields = packed({"x": array.array("f", [0.0, 1.0, 2.0, 3.0, 4.0]).tobytes()})
    return [replace(whole, trajectories=[0, 1, 0], fields=fields), first, second]


def test_I1_an_episode_of_two_trajectories_has_the_tokens_masks_and_lags_of_both() -> None:
    whole, *parts = [batch_of([item], clock=3).items[0] for item in interleaved()]
    for name in ("ids_T", "behav_K", "trained_K", "lags_K"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name
    assert whole.fields["x"].tolist() == [0.0, 1.0, 4.0, 2.0, 3.0]
    assert whole.n_trained == sum(part.n_trained for part in parts) == 4
    for piece, part in zip(whole.pieces(whole.trained_places), parts, strict=True):
        assert torch.equal(piece.ids_T, part.ids_T)
        assert torch.equal(piece.places_K, part.trained_places)
    assert whole.weights().tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_trajectory_without_a_trained_token_is_no_piece() -> None:
    (whole,) = batch_of([replace(interleaved()[0], spans=[[1, 4], [3, 1]])], clock=3).items
    (piece,) = whole.pieces(whole.trained_places)
    assert piece.ids_T[piece.places_K].tolist() == [11]
    assert [len(one.places_K) for one in whole.pieces(whole.places_K)] == [3, 2]


def test_a_saved_batch_is_read_as_it_was_built(tmp_path: Path) -> None:
    shard = [*random_shard(seed=5), replace(interleaved()[0], group=99, clock=3)]
    built = build(shard, step=3, clock=3, n_groups=100, eta=1)
    again = read_batch(save_batch(tmp_path, built, reason="trained"))
    assert (again.step, again.clock, again.n_groups) == (3, 3, 100)
    for one, other in zip(built.items, again.items, strict=True):
        for part in fields(Item):
            ours, theirs = getattr(one, part.name), getattr(other, part.name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else str(ours) == str(theirs), part.name
    assert [streams.keys() for streams in again.streams.values()] == [{len(built.items) - 1}]


def test_a_recorded_step_has_the_shares_of_its_last_training(tmp_path: Path) -> None:
    batch = build(random_shard(seed=5, clock=3), step=3, clock=3, n_groups=100, eta=1)
    for share in range(12):
        record_batch(tmp_path, batch, share=share, n_shares=12)
    assert [one.name for one in batch_shares(tmp_path, 3)] == [f"rank-{share}" for share in range(12)]
    record_batch(tmp_path, batch, share=0, n_shares=1)
    assert [one.name for one in batch_shares(tmp_path, 3)] == ["rank-0"]


@pytest.mark.parametrize("order", [None, [3, 0, 1, 2]])
def test_shares_of_several_ranks_together_have_the_minibatches_of_each(order: list[int] | None) -> None:
    shard = random_shard(seed=5, n_groups=4)
    whole, *alone = (
        build([one for one in shard if one.group in groups], step=0, clock=0, n_groups=4, eta=9)
        for groups in ({0, 1, 2, 3}, {0, 3}, {1, 2})
    )
    whole.shares = [{0, 3}, {1, 2}]
    for batch in (whole, *alone):
        batch.advantages, batch.signal = torch.ones(len(batch.items)), torch.ones(len(batch.items), dtype=torch.bool)
    parts = [
        [{batch.items[i].uid for i in part.members} for part in minibatches(batch, 2, first=first, order=order)]
        for batch, first in zip((whole, *alone), (0, 0, 1), strict=True)
    ]
    assert parts[0] == [one | other for one, other in zip(*parts[1:], strict=True)]


LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(LENGTHS, st.integers(1, 400), st.integers(1, 12))
def test_every_sequence_is_in_exactly_one_micro_batch_under_the_budget(
    lengths: list[int], capacity: int, k_min: int
) -> None:
    k_min = min(k_min, max(len(lengths), 1))
    parts = pack(lengths, capacity=capacity, k_min=k_min)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(parts)
    assert all(sum(lengths[i] for i in part) <= capacity for part in parts if len(part) > 1)
    assert len(parts) >= (k_min if lengths else 0)


@pytest.mark.parametrize(
    ("lengths", "packed"),
    [
        ([3, 50, 4], [[0, 2], [1]]),  # one over the budget is alone
        ([6, 5, 4, 3], [[0, 2], [1, 3]]),  # the fullest that holds it is taken
        ([9, 8, 7, 4, 3, 2, 2, 1, 4], [[0, 7], [1, 5], [2, 4], [3, 6, 8]]),  # two short ones fill it to the last token
    ],
)
def test_the_fullest_micro_batch_that_holds_a_sequence_is_taken(lengths: list[int], packed: list[list[int]]) -> None:
    assert sorted(map(sorted, pack(lengths, capacity=10))) == packed


def test_many_sequences_take_as_few_micro_batches_as_their_tokens_ask_for() -> None:
    for seed in range(3):
        draw = random.Random(seed)
        lengths = [min(int(draw.lognormvariate(7, 1)) + 1, 8192) for _ in range(2000)]
        assert len(pack(lengths, capacity=8192)) == math.ceil(sum(lengths) / 8192)


def test_more_micro_batches_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill k_min = 3"):
        pack([1, 2], capacity=10, k_min=3)
