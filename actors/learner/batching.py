"""One rank's share of a batch: tensors, staleness mask, minibatches, micro-batches under a token budget.

Shapes: T tokens of a trajectory (given and sampled), K of them sampled.
"""

import json
import shutil
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
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
    """One sample. A masked token stays as context and enters no loss (I2). Trajectories of an episode are adjacent."""

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
    roles: tuple[str, ...] = ()  # of each trajectory; (): the item has one reward and one advantage
    rewards: tuple[float, ...] = ()  # of each trajectory, if they have roles
    source: str = ""  # name of the [[data.source]] of its row
    temperature: float | None = None  # of its log-probs; None: the policy's

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
            return [SequencePiece(self.ids_T, places_N, family=self.group, temperature=self.temperature)]
        firsts, counts = (0, *self.cuts), self.counts(places_N)
        ids = torch.split(
            self.ids_T, [end - first for first, end in zip(firsts, (*self.cuts, len(self.ids_T)), strict=True)]
        )
        found = zip(ids, torch.split(places_N, counts), firsts, strict=True)
        return [
            SequencePiece(ids_t, at_n - first, family=-1 - k if k else self.group, temperature=self.temperature)
            for k, (ids_t, at_n, first) in enumerate(found)
            if len(at_n)
        ]

    def by_reward(self, values_N: Tensor, places_N: Tensor) -> tuple[Tensor, ...]:
        """Values of these places, apart for each reward: of the whole item, or of each trajectory if it has roles."""
        return torch.split(values_N, self.counts(places_N)) if self.roles else (values_N,)

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
    shares: Sequence[Collection[int]] = ()  # groups of each rank, in a replay of several ranks; (): it is one's share
    advantages: Tensor | None = None  # (n_items,) float32
    signal: Tensor | None = (
        None  # (n_items,) bool: False where the gradient is 0, e.g. all rewards of the group are equal
    )
    computed: Tensor | None = None  # (n_items,) bool: items whose trained tokens enter the loss; by default `signal`
    left_out: Tensor | None = None  # (n_items,) bool: items that enter no loss and no denominator; None: none
    repeated: Tensor | None = None  # (n_items,) bool: of those, answers that repeat themselves; None: not looked for
    # by name: log-probs of models, the user's own (`add`), and what the advantage stage and a critic make
    streams: defaultdict[str, Stream] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, values: Mapping[int, Tensor | float]) -> None:
        """Add a user's stream: item index -> a number of each trained token, or one for all of them.

        Raises ConfigError for a name that is taken, numbers that are not finite, and a wrong count.
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
    n_samples: int | Callable[[int, str], int] | None = None,
    partial_groups: bool = False,
    temperatures: Mapping[str, float] = MappingProxyType({}),
) -> Batch:
    """The batch of a rank's share, in the order of (group, sample).

    `n_samples`: samples of a group, or a function of the version at which its prompt was admitted and of its source.
    `temperatures`: of sources whose log-probs have another one than the policy's.
    A group has all of them or, with `partial_groups`, two at least (that none is lost, ShardEnd.n_items shows).
    Raises ImpossibleEvent when an item contradicts itself (I5) or its policy (I2), or a group is not whole (I8).
    """
    ordered = sorted(shard, key=lambda item: (item.group, item.sample))
    items = [_item(item, clock=clock, eta=eta, policy=policy, temperatures=temperatures) for item in ordered]
    sizes = Counter(item.group for item in items)
    if n_samples is not None:
        whole = {one.group: n_samples(one.born, one.source) if callable(n_samples) else n_samples for one in items}
        _check_sizes(sizes, whole, step=step, partial_groups=partial_groups)
    return as_batch(items, step=step, clock=clock, n_groups=n_groups)


def _check_sizes(sizes: Counter[int], whole: dict[int, int], *, step: int, partial_groups: bool) -> None:
    """Raises ImpossibleEvent unless each group has all its samples, or with `partial_groups` two at least (I8)."""
    wrong = {g: n for g, n in sizes.items() if not (LEAST if partial_groups else whole[g]) <= n <= whole[g]}
    if wrong:
        short = f", or {LEAST} of them or more" if partial_groups else ""
        wanted = " or ".join(str(n) for n in sorted({whole[g] for g in wrong}))
        raise ImpossibleEvent(f"a rank trains whole groups of {wanted} samples{short}: step {step} brought {wrong}")


def _item(item: ShardItem, *, clock: int, eta: int, policy: StalenessPolicy, temperatures: Mapping[str, float]) -> Item:
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
        roles=tuple(item.roles.split()),
        rewards=tuple(item.rewards),
        source=item.source,
        temperature=temperatures.get(item.source),
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
    minibatch_of: dict[int, int] = {}
    for share, own in enumerate(batch.shares or [set(batch.groups)], start=first):
        dealt = sorted(own) if order is None else [group for group in order if group in own]
        minibatch_of |= {group: (i + share) % n for i, group in enumerate(dealt)}
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


def batch_shares(run: Path, step: int) -> list[Path]:
    """The folders in which journal.replay keeps the shares of a trained batch, in their order."""
    return sorted((run / "batches" / f"step-{step:06d}").glob("rank-*"), key=_number)


def _number(share: Path) -> int:
    return int(share.name.partition("-")[2])


def record_batch(run: Path, batch: Batch, *, share: int, n_shares: int) -> None:
    """Write a share for a replay. The first removes those of more ranks, which trained this step before a rollback."""
    for other in batch_shares(run, batch.step) if share == 0 else ():
        if _number(other) >= n_shares:
            shutil.rmtree(other)
    save_batch(run / "batches" / f"step-{batch.step:06d}" / f"rank-{share}", batch, reason="trained")


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
        tensors |= {f"{index}/{name}": values.clone() for index, values in stream.items()}  # two may share memory
    if batch.advantages is not None:
        tensors["advantages"] = batch.advantages.contiguous()
    save_file(tensors, str(folder / "batch.safetensors"))
    about = {"reason": reason, "step": batch.step, "clock": batch.clock, "n_groups": batch.n_groups, "items": records}
    (folder / "batch.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder


LONG = (0.25, 0.05)  # shares of the sequences, the longest ones, that are placed by best fit: fast, then thorough


def pack(lengths: Sequence[int], *, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Micro-batches as lists of indices, each index in exactly one, none empty, no total over `capacity`.

    Interface of the paper's Algorithm 1 (at least `k_min` micro-batches). The longest sequences are placed
    best-fit-decreasing: the longest first, into the fullest micro-batch that still holds it. Then each micro-batch is
    filled with short ones, to the last token where two are found that add up to its room: with many sequences there
    are as few micro-batches as the tokens ask for. No two of them could be one. A sequence longer than the budget is a
    micro-batch of its own: it cannot be cut. Raises ValueError when `k_min` micro-batches cannot be filled.
    """
    if capacity < 1 or any(n < 1 for n in lengths):
        raise ValueError(f"capacity and lengths must be 1 or more: {capacity}, shortest {min(lengths, default=1)}")
    if lengths and k_min > len(lengths):
        raise ValueError(f"a micro-batch holds at least one sequence: {len(lengths)} cannot fill k_min = {k_min}")
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    bins = _tight(order, int(LONG[0] * len(order)), lengths, capacity)
    if (len(bins) - 1) * capacity >= sum(lengths):  # the tokens would fit one fewer
        bins = min(bins, _tight(order, int(LONG[1] * len(order)), lengths, capacity), key=len)
    return bins if len(bins) >= k_min else _best_fit(order, lengths, capacity, k_min)


def _tight(order: Sequence[int], n_long: int, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit for the first `n_long` sequences, the longest ones; the others fill the gaps."""
    bins = _best_fit(order[:n_long], lengths, capacity, 1)
    _fill(bins, order[n_long:], lengths, capacity)
    return bins


def _best_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, k_min: int) -> list[list[int]]:
    """One after the other into the fullest micro-batch that holds it, once k_min are open."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in order:
        n = lengths[index]
        at = bisect_left(free, (n, -1))
        if len(bins) < k_min or at == len(free):
            room, place = capacity, len(bins)
            bins.append([])
        else:
            room, place = free.pop(at)
        bins[place].append(index)
        if room > n:
            insort(free, (room - n, place))
    return bins


def _fill(bins: list[list[int]], short: Sequence[int], lengths: Sequence[int], capacity: int) -> None:
    """All of `short` into the rooms of `bins`, then new ones, in place: two that fill one, or the longest that fits."""
    shelf = _Shelf(short, lengths)
    rooms = [capacity - sum([lengths[index] for index in part]) for part in bins]  # noqa: C419  a list is faster
    place = 0
    while shelf.up:
        if place == len(bins):
            bins.append([])
            rooms.append(capacity)
        part, room = bins[place], rooms[place]
        place += 1
        while room > 0:
            shorter = shelf.shorter_of_two(room)
            if shorter:
                part += [shelf.take(room - shorter), shelf.take(shorter)]
                break
            longest = shelf.longest(room)
            if not longest:
                break
            part.append(shelf.take(longest))
            room -= longest
        if not part:  # longer than the budget
            part.append(shelf.take(shelf.up.bit_length() - 1))


class _Shelf:
    """Sequences by length, as bits of two numbers: finds the longest that fits, or two that add up to a sum."""

    def __init__(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """`order`: indices, longest first."""
        self._indices: dict[int, list[int]] = {}  # of each length
        for index in reversed(order):
            self._indices.setdefault(lengths[index], []).append(index)
        self._top = lengths[order[0]] if order else 0
        self.up = sum(1 << n for n in self._indices)  # bit n: there is one of length n
        self._down = sum(1 << self._top - n for n in self._indices)  # bit top - n: the same

    def longest(self, room: int) -> int:
        """Length of the longest that fits; 0 when none does."""
        return max((self.up & (2 << min(room, self._top)) - 1).bit_length() - 1, 0)

    def shorter_of_two(self, room: int) -> int:
        """Length of the shorter one of two that fill the room, the longest such; 0 when no two do."""
        shift = room - self._top
        if shift > self._top:
            return 0
        partners = self._down << shift if shift > 0 else self._down >> -shift
        pairs = self.up & partners & (2 << room // 2) - 1
        shorter = max(pairs.bit_length() - 1, 0)
        if shorter and 2 * shorter == room and len(self._indices[shorter]) < 2:
            shorter = max((pairs ^ 1 << shorter).bit_length() - 1, 0)
        return shorter

    def take(self, n: int) -> int:
        """Remove a sequence of this length and return its index."""
        indices = self._indices[n]
        index = indices.pop()
        if not indices:
            self.up ^= 1 << n
            self._down ^= 1 << self._top - n
        return index


def read_batch(folder: Path) -> Batch:
    """The share that `save_batch` has written, as `build` made it: without advantages and what is made before them."""
    about = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
    tensors = load_file(str(folder / "batch.safetensors"))
    names = [part.name for part in fields(Item) if part.type is Tensor]
    items = []
    for index, record in enumerate(about["items"]):
        prefix = f"{index}/fields/"
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        held: dict[str, Any] = {name: tensors[f"{index}/{name}"] for name in names}
        pairs = {name: tuple(record.get(name, ())) for name in ("cuts", "roles", "rewards")}
        items.append(Item(**record | held | pairs | {"fields": own}))
    return as_batch(items, step=about["step"], clock=about["clock"], n_groups=about["n_groups"])


def as_batch(items: list[Item], *, step: int, clock: int, n_groups: int) -> Batch:
    """The batch of these items, with the fields of their workflow as its first streams."""
    batch = Batch(step=step, clock=clock, n_groups=n_groups, items=items)
    for index, item in enumerate(items):
        for name, values_K in item.fields.items():
            batch.streams[name][index] = values_K[item.trained_K]
    return batch
