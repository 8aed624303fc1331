"""The head's state at one version: what a new term needs beside the weights.

A head checkpoint (a "frontier" on disk) is captured when an update is finished or the run closes. Together with the
learner's checkpoint of the same version it resumes the run: no prompt is skipped, none is trained twice (I3, I4). A
savepoint (a "waypoint") is captured when a batch is sent. If the head dies, a surviving learner holds the matching
weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_bus.core.parts.ledger import LedgerEntry, PromptState
from areal_bus.core.rows import IssuedRow
from areal_bus.messages import Partial, Scored

Figures = dict[str, str | int | float | None]
RewardOf = Callable[[str, float], float | None]  # HeadRules.reward_of: status, reward -> what counts


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """One prompt that was neither trained nor refunded."""

    uid: int
    born: int
    n_samples: int
    attempt: int
    n_deaths: int
    issue: IssuedRow
    scored: tuple[Scored, ...]  # verdicts it had
    group: tuple[float, ...] | None = None  # rewards of a compared group


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """State of the data source, the ledger and the results at `version`."""

    version: int
    next_uid: int = 0
    position: int = 0  # rows drawn from the source
    again: tuple[IssuedRow, ...] = ()  # rows to be issued again
    open: tuple[OpenPrompt, ...] = ()
    results: dict[str, Figures] = field(default_factory=dict)  # figures by evaluation
    max_lag: int | None = None  # of trained tokens; None while there are none
    source: str = ""  # state of the data source beside its position (DataSource.state)
    first: dict[str, float] = field(default_factory=dict)  # figures with which the run began (CollapseForecast.first)


@dataclass(frozen=True, slots=True)
class HeadSavepoint:
    """The state after learner 0 (`root`) has trained the batch being sent, at `checkpoint.version`; no verdicts."""

    root: str
    checkpoint: HeadCheckpoint


START: Mapping[int, HeadCheckpoint] = {0: HeadCheckpoint(0)}  # before the first prompt


def revive(prompt: OpenPrompt, known: LedgerEntry | None, version: int, reward_of: RewardOf) -> LedgerEntry:
    """The ledger entry of a saved prompt in a term that begins at `version`. `known`: the head's entry until now.

    Verdicts whose tokens are all of versions <= `version` are kept; the lease only if all verdicts are.
    """
    entry = LedgerEntry(prompt.uid, prompt.born, prompt.n_samples, None, source=prompt.issue.drawn.source)
    entry.attempt, entry.n_deaths = prompt.attempt, prompt.n_deaths
    kept = {scored.sample: scored for scored in prompt.scored}
    if known is not None:
        entry.attempt, entry.n_deaths = known.attempt, known.n_deaths
        kept = {i: x for i, x in (kept | known.verdicts).items() if newest(x) <= version}
    for sample, scored in kept.items():
        has_reward = reward_of(scored.status, scored.reward) is not None
        (entry.scored if has_reward else entry.failed)[sample] = scored
    group = _group_of(prompt, known, kept)
    if group is not None:
        entry.compare(group)
    held = (PromptState.LEASED, PromptState.SCORING, PromptState.COMPARING)
    if known is not None and known.state in held and kept.keys() == known.verdicts.keys():
        entry.holder, entry.state, entry.alone = known.holder, known.state, known.alone
        entry.leased_at, entry.asked = known.leased_at, known.asked
        entry.sampled, entry.noted = known.sampled, known.noted
    return entry


def _group_of(prompt: OpenPrompt, known: LedgerEntry | None, kept: Mapping[int, Scored]) -> tuple[float, ...] | None:
    """The rewards of the group that compared just the samples that are kept; None if there are none."""
    attempts = {sample: scored.attempt for sample, scored in kept.items()}
    if known is not None and {i: x.attempt for i, x in known.verdicts.items()} == attempts and known.group is not None:
        return known.group
    return prompt.group if {x.sample: x.attempt for x in prompt.scored} == attempts else None


def newest(scored: Scored | Partial) -> int:
    """The newest version among its tokens; -1 when it has none."""
    return max((version for version, _ in scored.spans), default=-1)
