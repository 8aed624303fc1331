"""Divides a batch into micro-batches and runs the passes that need no gradient: log-probs and values."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.learner.batching import Batch, pack
from actors.learner.model.critic import Critic
from actors.learner.model.frozen_model import FrozenModel, PolicyBase
from actors.learner.model.policy import PackedModel, Policy
from actors.learner.model.remote_teacher import RemoteTeacher
from actors.models.packed_row import SequencePiece, n_rows
from areal_bus.core.parts.stages import Stage, stage_at


class ForwardPasses:
    """Micro-batches under the token budget of a version's stage. Every rank calls each method equally often."""

    def __init__(self, policy: Policy, stages: Sequence[Stage], beat: Callable[[], None]) -> None:
        """`beat()` runs after each micro-batch."""
        self._policy = policy
        self._stages = stages
        self._beat = beat
        self._n_planned = 0  # tokens of the micro-batches since they were last counted

    def micro_batches(
        self, batch: Batch, members: list[int], version: int, *, model: PackedModel | None = None
    ) -> list[list[int]]:
        """Item indices by micro-batch, equally many on each rank (some empty); a group stays together if it fits."""
        reader = self._policy if model is None else model
        capacity = reader.row_tokens(stage_at(self._stages, version).max_tokens_per_mb)
        units: list[tuple[list[int], int]] = []  # (items, tokens)
        groups: dict[int, list[int]] = {}
        for i in members:
            groups.setdefault(batch.items[i].group, []).append(i)
        for together in groups.values():
            tokens = n_rows(pieces(batch, together))
            if reader.packed and tokens <= capacity:
                units.append((together, tokens))
            else:
                units += [([i], n_rows(pieces(batch, [i]))) for i in together]
        self._n_planned += sum(tokens for _, tokens in units)
        parts = pack([tokens for _, tokens in units], capacity=capacity)
        (most,) = self._policy.ranks.max([float(len(parts))])
        chosen = [sorted((i for unit in part for i in units[unit][0]), key=_longest_first(batch)) for part in parts]
        return chosen + [[] for _ in range(int(most) - len(parts))]

    def take_planned(self) -> int:
        """Tokens of the micro-batches since the last call; those of a critic count as the policy's."""
        n, self._n_planned = self._n_planned, 0
        return n

    def logprobs(
        self, model: PackedModel | PolicyBase | RemoteTeacher, batch: Batch, members: list[int], version: int
    ) -> dict[int, Tensor]:
        """Item index -> (n_trained,) log-probs of its trained tokens by this model, on the host."""
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            reader = model if isinstance(model, PackedModel) else None
            for indices in self.micro_batches(batch, members, version, model=reader):
                if not indices:
                    model.idle_pass()
                    continue
                logp_N, _ = model.logprobs(pieces(batch, indices))
                counts = [batch.items[i].n_trained for i in indices]
                found.update(zip(indices, torch.split(logp_N.cpu(), counts), strict=True))
                self._beat()
        if isinstance(model, FrozenModel | RemoteTeacher):
            model.free()
        return found

    def values(self, critic: Critic, batch: Batch, version: int) -> dict[int, Tensor]:
        """Item index -> the critic's values of its sampled tokens, of items with a trained token."""
        values: dict[int, Tensor] = {}
        members = [i for i, item in enumerate(batch.items) if item.n_trained]
        for indices in self.micro_batches(batch, members, version, model=critic.model):
            with torch.no_grad():
                if indices:
                    values |= critic.predict(batch, indices)
                else:
                    critic.model.idle_pass()
            self._beat()
        return values


def pieces(batch: Batch, indices: Sequence[int]) -> list[SequencePiece]:
    """The sequences of these items, with the places of their trained tokens."""
    items = [batch.items[i] for i in indices]
    return [piece for item in items for piece in item.pieces(item.trained_places)]


def _longest_first(batch: Batch) -> Callable[[int], int]:
    """Sort key: equal lengths are adjacent, so attention processes them in one call."""
    return lambda i: -len(batch.items[i].ids_T)
