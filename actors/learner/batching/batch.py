"""One rank's share of a batch: builds its tensors, applies the staleness mask, divides it into minibatches, saves it.

Shapes: T tokens of a trajectory (given and sampled), K of them sampled.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from actors.models.packed_row import SequencePiece
from areal_bus.core.parts.ledger import LEAST
from areal_bus.core.parts.staleness import StalenessPolicy, runs_under
from areal_bus.errors import ConfigError, ImpossibleEvent
from areal_bus.messages import ShardItem
from areal_bus.sample_fields import TAKEN, unpacked
from areal_bus.trajectories import broken_rule, split, within

Numbers = NDArray[Any]
Stream = dict[int, Tensor]  # item index -> (n_trained,) numbers of its trained tokens, float32, detached, on the host


@dataclass(frozen=True, slots=True)
class Item:
    """One sample. A masked token stays as context and enters no loss (I2).

    The trajectories of an episode stand one behind the other. The model reads each by itself.
    """

    uid: int
    sample: int
    group: int  # index within the whole batch, over all ranks
    reward: float
    correct: bool | None
    finish: str
    text: str  # decoded, for the sample log
    ids_T: Tensor  # int64
    places_K: Tensor  # int64: positions of the sampled tokens in ids_T
    behav_K: Tensor  # float32: log-probs under the version stamped on each
    trained_K: Tensor  # bool: not masked
    lags_K: Tensor  # int64: clock - version
    n_trained: int  # of trained_K
    born: int = 0  # version at which its prompt was admitted
    cuts: tuple[int, ...] = ()  # positions in ids_T at which further trajectories begin
    fields: Mapping[str, Tensor] = field(default_factory=dict)  # of its workflow: (n_sampled,) float32 by name

    @property
    def n_sampled(self) -> int:
        return len(self.places_K)

    @property
    def trained_places(self) -> Tensor:
        """(n_trained,) positions of the trained tokens in ids_T."""
        return self.places_K if self.n_trained == self.n_sampled else self.places_K[self.trained_K]

    def pieces(self, places_N: Tensor) -> list[SequencePiece]:
        """The trajectories that have some of these places, in order: together they have them all."""
        if not self.cuts:
            return [SequencePiece(self.ids_T, places_N, family=self.group)]
        firsts, counts = (0, *self.cuts), self.counts(places_N)
        ids = torch.split(
            self.ids_T, [end - first for first, end in zip(firsts, (*self.cuts, len(self.ids_T)), strict=True)]
        )
        found = zip(ids, torch.split(places_N, counts), firsts, strict=True)
        return [
            SequencePiece(ids_t, at_n - first, family=-1 - k if k else self.group)
            for k, (ids_t, at_n, first) in enumerate(found)
            if len(at_n)
        ]

    def weights(self) -> Tensor:
        """(n_trained,) that add up to n_trained; all trajectories with a trained token weigh alike."""
        counts_P = torch.tensor([n for n in self.counts(self.trained_places) if n])
        return (self.n_trained / (len(counts_P) * counts_P)).repeat_interleave(counts_P)

    def counts(self, places_N: Tensor) -> list[int]:
        """How many of these places, ascending, each trajectory has."""
        bounds = torch.searchsorted(places_N, torch.tensor(self.cuts, dtype=torch.int64)).tolist()
        return [end - first for first, end in zip((0, *bounds), (*bounds, len(places_N)), strict=True)]


@dataclass(slots=True)
class Batch:
    """One rank's share: whole groups. Advantages and proximal log-probs are filled in later."""

    step: int
    clock: int  # c: updates finished when the batch was taken
    n_groups: int  # of the whole batch, over all ranks
    items: list[Item]
    advantages: Tensor | None = None  # (n_items,) float32
    signal: Tensor | None = (
        None  # (n_items,) bool: False where the gradient is 0, e.g. all rewards of the group are equal
    )
    computed: Tensor | None = None  # (n_items,) bool: items whose trained tokens enter the loss; by default `signal`
    left_out: Tensor | None = None  # (n_items,) bool: items that enter no loss and no denominator; None: none
    # by name: log-probs of models, the user's own (`add`), and what the advantage stage and a critic make
    streams: defaultdict[str, Stream] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, values: Mapping[int, Tensor | float]) -> None:
        """Add a stream of the user's own: item index -> a number of each trained token, or one for all of them.

        Raises ConfigError for a name that is taken, and for numbers that are not finite or too few or many.
        """
        if name in TAKEN:
            raise ConfigError(f"a stream {name!r} exists: the learner makes it; choose another name")
        for i, value in values.items():
            n = self.items[i].n_trained
            numbers_N = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
            if numbers_N.shape not in ((), (n,)) or not bool(numbers_N.isfinite().all()):
                raise ConfigError(
                    f"mismatch in the stream {name!r} of uid {self.items[i].uid}: {n} finite numbers are needed, one a "
                    f"trained token, or a single one; it has the shape {tuple(numbers_N.shape)}"
                )
            self.streams[name][i] = numbers_N.expand(n)

    def check_has(self, names: Iterable[str]) -> None:
        """Raises ConfigError unless each item with a trained token has these streams."""
        for name in names:
            if lacking := [item for i, item in enumerate(self.items) if item.n_trained and i not in self.streams[name]]:
                raise ConfigError(
                    f"missing stream {name!r} in {len(lacking)} of {len(self.items)} trajectories (first uid "
                    f"{lacking[0].uid}): a part of [actor] needs it; the workflow returns it in Episode.fields"
                )

    def advantages_of(self, index: int) -> Tensor:
        """(n_trained,) advantages of an item's trained tokens."""
        if index in self.streams["token_advantages"]:
            return self.streams["token_advantages"][index]
        if self.advantages is None:
            raise ValueError("missing advantages: call compute_advantages_and_returns first")
        return self.advantages[index].expand(self.items[index].n_trained)

    @property
    def groups(self) -> list[int]:
        """Indices of this rank's groups, ascending."""
        return sorted({item.group for item in self.items})


def build(
    shard: Iterable[ShardItem],
    *,
    step: int,
    clock: int,
    n_groups: int,
    eta: int,
    policy: StalenessPolicy = StalenessPolicy.MASK,
    n_samples: int | Callable[[int], int] | None = None,
    partial_groups: bool = False,
) -> Batch:
    """The batch of a rank's share, in the order of (group, sample).

    `n_samples`: samples of a group, or a function of the version at which its prompt was admitted.
    A group has all of them or, with `partial_groups`, two at least (that none is lost, ShardEnd.n_items shows).
    Raises ImpossibleEvent when an item contradicts itself (I5) or its policy (I2), or a group is not whole (I8).
    """
    ordered = sorted(shard, key=lambda item: (item.group, item.sample))
    items = [_item(item, clock=clock, eta=eta, policy=policy) for item in ordered]
    sizes = Counter(item.group for item in items)
    if n_samples is not None:
        whole = {item.group: n_samples(item.born) if callable(n_samples) else n_samples for item in items}
        _check_sizes(sizes, whole, step=step, partial_groups=partial_groups)
    batch = Batch(step=step, clock=clock, n_groups=n_groups, items=items)
    for index, made in enumerate(items):
        for name, values_K in made.fields.items():
            batch.streams[name][index] = values_K[made.trained_K]
    return batch


def _check_sizes(sizes: Counter[int], whole: dict[int, int], *, step: int, partial_groups: bool) -> None:
    """Raises ImpossibleEvent unless each group has all its samples, or with `partial_groups` two at least (I8)."""
    wrong = {g: n for g, n in sizes.items() if not (LEAST if partial_groups else whole[g]) <= n <= whole[g]}
    if wrong:
        short = f", or {LEAST} of them or more" if partial_groups else ""
        wanted = " or ".join(str(n) for n in sorted({whole[g] for g in wrong}))
        raise ImpossibleEvent(f"a rank trains whole groups of {wanted} samples{short}: step {step} brought {wrong}")


def _item(item: ShardItem, *, clock: int, eta: int, policy: StalenessPolicy) -> Item:
    ids = numbers("i", item.ids)
    cuts: tuple[int, ...] = ()
    try:
        runs = runs_under(policy, item.spans, clock, eta)
    except ValueError as error:
        raise ImpossibleEvent(f"uid {item.uid} sample {item.sample}: {error}") from None
    behav = numbers("f", item.logps)
    n_sampled = sum(sampled for _, sampled in item.segments)
    n_given = sum(given for given, _ in item.segments)
    if not n_sampled == len(behav) == sum(n for n, _ in runs) or len(ids) != n_given + n_sampled:
        raise ImpossibleEvent(
            f"segments, spans, ids and log-probs must agree: uid {item.uid} sample {item.sample} has {n_sampled} "
            f"sampled tokens in segments, {sum(n for n, _ in runs)} in spans, {len(behav)} log-probs, {len(ids)} ids"
        )
    places = _places(item.segments)
    trained_K = _repeated([(trained, n) for n, trained in runs], np.bool_)
    lags_K = _repeated([(clock - version, n) for version, n in item.spans], np.int64)
    fields_K = _fields(item, n_sampled)
    if item.trajectories:
        order_T, order_K, places, cuts = _one_by_one(item)
        ids, behav, trained_K, lags_K = ids[order_T], behav[order_K], trained_K[order_K], lags_K[order_K]
        fields_K = {name: values_K[torch.from_numpy(order_K)] for name, values_K in fields_K.items()}
    if len(places) and places[0] == 0:
        raise ImpossibleEvent(f"missing prompt: uid {item.uid} sample {item.sample} begins with a sampled token")
    return Item(
        uid=item.uid,
        sample=item.sample,
        group=item.group,
        reward=item.reward,
        correct=item.correct,
        finish=item.finish,
        text=item.text,
        ids_T=torch.from_numpy(ids.astype(np.int64)),
        places_K=torch.from_numpy(places),
        behav_K=torch.from_numpy(behav.astype(np.float32)),
        trained_K=torch.from_numpy(trained_K),
        lags_K=torch.from_numpy(lags_K),
        n_trained=sum(n for n, trained in runs if trained),
        born=item.born,
        cuts=cuts,
        fields=fields_K,
    )


def _one_by_one(item: ShardItem) -> tuple[Numbers, Numbers, Numbers, tuple[int, ...]]:
    """The order of all tokens and of the sampled ones by trajectory; the places of the latter and the cuts in it."""
    if broken := broken_rule(item.segments, item.trajectories):
        raise ImpossibleEvent(f"uid {item.uid} sample {item.sample}: {broken}")
    found = split(item.segments, item.trajectories)
    firsts = [0, *np.cumsum([one.n for one in found]).tolist()][:-1]
    orders = ([i for one in found for i in within(one.tokens)], [i for one in found for i in within(one.sampled)])
    places = [first + i for one, first in zip(found, firsts, strict=True) for i in within(one.places)]
    order_T, order_K = (np.array(order, dtype=np.int64) for order in orders)
    return order_T, order_K, np.array(places, dtype=np.int64), tuple(firsts[1:])


def _fields(item: ShardItem, n_sampled: int) -> dict[str, Tensor]:
    """The numbers of each name, one for each sampled token; the codec has checked how many there are."""
    if not item.fields:
        return {}
    names, values = unpacked(item.fields)
    return dict(
        zip(names, torch.split(torch.from_numpy(numbers("f", values).astype(np.float32)), n_sampled), strict=True)
    )


def _places(segments: Sequence[Sequence[int]]) -> Numbers:
    """The positions of the sampled tokens."""
    places: list[Numbers] = []
    at = 0
    for n_given, n_sampled in segments:
        places.append(np.arange(at + n_given, at + n_given + n_sampled, dtype=np.int64))
        at += n_given + n_sampled
    return places[0] if len(places) == 1 else np.concatenate([np.empty(0, np.int64), *places])


def _repeated(runs: Sequence[tuple[int, int]], kind: type[np.generic]) -> Numbers:
    """Each value repeated by its count."""
    made, at = np.empty(sum(n for _, n in runs), dtype=kind), 0
    for value, n in runs:
        made[at : at + n] = value
        at += n
    return made


def numbers(kind: str, raw: bytes) -> Numbers:
    """Little-endian int32 ("i") or float32 ("f") bytes as numbers; not to be written to."""
    return np.frombuffer(raw, dtype=f"<{kind}4")


@dataclass(slots=True)
class Minibatch:
    """A rank's share of the data of one optimizer step."""

    members: list[int] = field(default_factory=list)  # indices of the items to compute
    n_tokens: int = 0  # not masked, with or without signal
    n_signal_tokens: int = 0  # of those, in items that are computed
    n_sequences: int = 0  # items with a token that is not masked


def minibatches(batch: Batch, n: int, *, first: int, order: Sequence[int] | None = None) -> list[Minibatch]:
    """Whole groups, dealt round-robin over n minibatches from number `first` on, in the order of all groups of the
    batch. Items without a trained token or signal are counted, not computed; those left out are not counted. Raises
    ValueError before advantages are computed.
    """
    if batch.advantages is None or batch.signal is None:
        raise ValueError("ppo_update needs advantages: call compute_advantages_and_returns first")
    own = set(batch.groups)
    dealt = batch.groups if order is None else [group for group in order if group in own]
    minibatch_of = {group: (i + first) % n for i, group in enumerate(dealt)}
    parts = [Minibatch() for _ in range(n)]
    computed = batch.signal if batch.computed is None else batch.computed
    left_out = set() if batch.left_out is None else set(batch.left_out.nonzero()[:, 0].tolist())
    for index, (item, is_computed) in enumerate(zip(batch.items, computed.tolist(), strict=True)):
        if index in left_out:
            continue
        part = parts[minibatch_of[item.group]]
        part.n_tokens += item.n_trained
        part.n_sequences += item.n_trained > 0
        if is_computed and item.n_trained:
            part.members.append(index)
            part.n_signal_tokens += item.n_trained
    return parts


def save_batch(folder: Path, batch: Batch, *, reason: str) -> Path:
    """Write a rank's share as batch.safetensors (tensors by item) and batch.json (the rest); returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    records = []
    for index, item in enumerate(batch.items):
        record = {}
        for part in fields(Item):
            value = getattr(item, part.name)
            if isinstance(value, Tensor):
                tensors[f"{index}/{part.name}"] = value.contiguous()
            elif part.name == "fields":
                tensors |= {f"{index}/fields/{name}": values.contiguous() for name, values in value.items()}
            else:
                record[part.name] = value
        records.append(record)
    for name, stream in batch.streams.items():
        tensors |= {f"{index}/{name}": values.contiguous() for index, values in stream.items()}
    if batch.advantages is not None:
        tensors["advantages"] = batch.advantages.contiguous()
    save_file(tensors, str(folder / "batch.safetensors"))
    about = {"reason": reason, "step": batch.step, "clock": batch.clock, "n_groups": batch.n_groups, "items": records}
    (folder / "batch.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder
