"""Stages of a run: settings that change at given versions, such as the context length. Pure: no I/O.

A prompt belongs to the stage in force at the version `born`, which its generator held at the first lease. `born` never
changes: all samples of a group have the limits of one stage, also after a lost lease or a resumed run.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """The settings in force from version `from_step` until the next stage begins."""

    from_step: int  # step s trains version s, so a stage begins with the prompts that are admitted at this version
    n_samples: int  # samples of a group
    max_new_tokens: int  # sampled tokens of a completion
    max_tokens_per_mb: int  # tokens of a micro-batch, by the version of the learner


def in_force(starts: Sequence[int], version: int) -> int:
    """Index of the last stage begun at `version` (>= 0). `starts` ascends from 0. Raises ValueError otherwise."""
    if version < 0 or not starts or starts[0] != 0:
        raise ValueError(f"stages begin at version 0, and versions count from 0; got {list(starts)} and {version}")
    return max(index for index, start in enumerate(starts) if start <= version)


def stage_at(stages: Sequence[Stage], version: int) -> Stage:
    return stages[in_force([stage.from_step for stage in stages], version)]
