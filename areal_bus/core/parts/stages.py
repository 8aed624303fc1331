"""Stages of a run: settings that change at given versions, such as the context length. Pure: no I/O.

A prompt belongs to the stage in force at the version `born`, which its generator held at the first lease. `born` never
changes: all samples of a group have the limits of one stage, also after a lost lease or a resumed run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """The limits of one source of a mix."""

    name: str
    weight: float  # share of the prompts
    n_samples: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The settings in force from version `from_step` until the next stage begins."""

    from_step: int  # step s trains version s, so a stage begins with the prompts that are admitted at this version
    n_samples: int  # samples of a group
    max_new_tokens: int  # sampled tokens of a completion
    max_tokens_per_mb: int  # tokens of a micro-batch, by the version of the learner
    sources: tuple[SourceLimits, ...] = ()  # all of a mix, if any has limits of its own

    def of(self, source: str) -> "Stage":
        """With the limits of a source; of one that has none, and of an evaluation set, those of the run."""
        own = next((one for one in self.sources if one.name == source), None)
        return self if own is None else replace(self, n_samples=own.n_samples, max_new_tokens=own.max_new_tokens)

    @property
    def group_sizes(self) -> list[int]:
        """Samples of a group, of each source."""
        return [one.n_samples for one in self.sources] or [self.n_samples]

    @property
    def mean_samples(self) -> float:
        """Samples of a group, over the prompts."""
        total = sum(one.weight for one in self.sources)
        return sum(one.weight * one.n_samples for one in self.sources) / total if total else self.n_samples


def in_force(starts: Sequence[int], version: int) -> int:
    """Index of the last stage begun at `version` (>= 0). `starts` ascends from 0. Raises ValueError otherwise."""
    if version < 0 or not starts or starts[0] != 0:
        raise ValueError(f"stages begin at version 0, and versions count from 0; got {list(starts)} and {version}")
    return max(index for index, start in enumerate(starts) if start <= version)


def stage_at(stages: Sequence[Stage], version: int, source: str = "") -> Stage:
    """The stage of a prompt that is admitted at `version`, with the limits of its source."""
    return stages[in_force([stage.from_step for stage in stages], version)].of(source)
