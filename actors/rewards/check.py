"""Tries the configured reward function in a worker process before a run begins."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from actors.rewards.loading import reward_options
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.rewards.protocol import NotApplicable
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import VerdictStatus


@dataclass(frozen=True, slots=True)
class TrialScore:
    """One completion that the function is called with before the start."""

    where: str  # of its row, for error texts
    prompt: str
    completion: str
    row: str  # a JSON object
    ids: bytes  # int32
    n_prompt: int


def check_reward(
    config: Config,
    config_folder: str | Path,
    fields: Collection[str] | None = None,
    *,
    trials: Iterable[TrialScore] = (),
) -> None:
    """Load the configured function in a worker process, and score the `trials` up to the first without an error.

    Raises ConfigError when it does not load, needs fields that the rows (`fields`) do not have, or fails in all trials.
    """
    with WorkerPool(
        WorkerOrder(config.reward.function, config_folder, fields, options=reward_options(config.reward)),
        n_workers=1,
        timeout_s=config.reward.timeout_s,
        max_failed_starts=1,
    ) as pool:
        while not pool.ready:
            pool.poll(timeout_s=1.0)
        error = try_scores(pool, trials)
    if error:
        raise ConfigError(f"reward.function {config.reward.function!r} failed in a trial before the start, {error}")


def try_scores(pool: WorkerPool, trials: Iterable[TrialScore]) -> str:
    """The first error, if each trial ends in one; else ""."""
    errors = []
    for one in trials:
        pool.submit(0, prompt=one.prompt, completion=one.completion, row=one.row, ids=one.ids, n_prompt=one.n_prompt)
        while not (verdicts := pool.poll(timeout_s=1.0)):
            pass
        if verdicts[0].status != VerdictStatus.ERROR or verdicts[0].error.startswith(NotApplicable.__name__):
            return ""
        errors.append(f"on {one.where}: {verdicts[0].error}")
    return errors[0] if errors else ""
