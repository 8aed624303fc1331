"""Calls the user's workflow and reward once on a row before a start: wrong names and missing fields cost a line.

No model is loaded: the completions are the row's own answer and a number. Agents are not called.
"""

import array
import json
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from actors.data.fields import SOURCE, UNREAD
from actors.data.loading import RowWithOrigin
from actors.engines.protocol import Completion
from actors.models.loading import load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.rewards.loading import WEIGHTED, all_options
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.rewards.protocol import NotApplicable
from actors.runtime.user_code import describe, known_fields, place_of
from actors.workflows.episode_runner import Asked, EpisodeRun
from actors.workflows.loading import close_workflow, load_workflow
from actors.workflows.protocol import Workflow
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config
from areal_bus.config.stages import sampling_of, smallest_group
from areal_bus.errors import ConfigError, PromptTooLong, WorkflowError
from areal_bus.messages import VerdictStatus

ANSWER_FIELDS = ("demonstration", "answer")
NUMBER = "1"
N_ROWS = 4  # code that fails for some rows passes
MAX_TURNS = 64  # a workflow may sample until an answer is right, which these never are
WAIT_S = 60.0  # for a workflow's own event


@dataclass(frozen=True, slots=True)
class TrialScore:
    """One completion that the function is called with before the start."""

    where: str  # of its row, for error texts
    prompt: str
    completion: str
    row: str  # a JSON object
    ids: bytes  # int32
    n_prompt: int


def is_tried(config: Config) -> bool:
    """Whether a workflow or a reward of the user is called."""
    rewards = (config.reward, *(config.reward.model_copy(update={"function": s.reward}) for s in config.data.source))
    return not config.workflow.uses_endpoint and (not config.has_plain_prompts or any(map(is_users_reward, rewards)))


def is_users_reward(reward: RewardConfig) -> bool:
    """Whether the function, a weighted term, reward.group or reward.check is the user's, and no judge is asked."""
    names = [term.function for term in reward.terms] if reward.function == WEIGHTED else [reward.function]
    return any(":" in name for name in (*names, reward.group, reward.check.function)) and "judge" not in names


def trials(config: Config, rows: Sequence[RowWithOrigin], model: str) -> Iterator[TrialScore]:
    """Samples of a few rows by the workflow; `model`: "" for scratch. Raises ConfigError if it failed for all."""
    workflow, tokenizer = load_workflow(config), tokenizer_of(config, model)
    failed, n_samples = "", 0
    try:
        for placed, text in ((one, text) for one in rows[:N_ROWS] for text in completions(one.row)):
            try:
                gconfig = sampling_of(config, str(placed.row.get(SOURCE, "")))
                found = sample(workflow, placed, tokenizer, text, gconfig)
            except (ConfigError, PromptTooLong):
                raise
            except Exception as error:  # noqa: BLE001  user code
                place = error.place if isinstance(error, WorkflowError) else place_of(error)
                hint = known_fields(error, placed.row, placed.row.get(UNREAD, {}))
                failed = failed or f"on {placed.where}: {describe(error, place)}{hint}"
                continue
            n_samples += 1
            if found is not None:
                yield found
    except PromptTooLong:
        return  # a row like others that are refunded
    finally:
        close_workflow(workflow)
    if failed and not n_samples:
        name = config.workflow.function
        raise ConfigError(f"workflow.function {name!r} failed in a trial before the start, {failed}")


def completions(row: Mapping[str, Any]) -> Iterator[str]:
    """A right answer where the row has one, then a number."""
    yield from [str(row[name]) for name in ANSWER_FIELDS if row.get(name) not in (None, "")][:1]
    yield NUMBER


def tokenizer_of(config: Config, model: str) -> Any:
    """The generators' tokenizer; `model`: "" for [model.scratch]."""
    if config.model.scratch is None:
        return load_tokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        write_scratch_folder(Path(folder), config.model.scratch)
        return load_tokenizer(folder)


def sample(
    workflow: Workflow, placed: RowWithOrigin, tokenizer: Any, text: str, gconfig: GenerationConfig
) -> TrialScore | None:
    """One episode whose completions are all `text`; None where it does not end. Raises what the workflow raises."""
    run = EpisodeRun(workflow, dict(placed.row), tokenizer, name="trial before the start", gconfig=gconfig)
    try:
        wish, deadline = run.start(), time.monotonic() + WAIT_S
        while wish is not None:
            if isinstance(wish, Asked) and run.n_turns <= MAX_TURNS:
                ids = token_ids(tokenizer, text, wish.max_new_tokens)
                n = len(ids)
                wish = run.answer(Completion(("", 0, 0, 0, run.n_turns - 1), ids, [0.0] * n, [[0, n]], "stop"))
            elif isinstance(wish, Asked) or time.monotonic() > deadline:
                return None
            elif wish.ready():
                wish = run.go_on()
            else:
                time.sleep(0.005)
    except WorkflowError as error:
        error.place = error.place or run.place
        raise
    finally:
        run.close()
    assert run.episode is not None
    row = {**placed.row, **run.episode.row}
    return TrialScore(
        where=placed.where,
        prompt=run.prompt_text(),
        completion=run.episode.text,
        row=json.dumps(row, default=str),
        ids=array.array("i", run.ids).tobytes(),
        n_prompt=run.segments[0][0],
    )


def token_ids(tokenizer: Any, text: str, most: int | None) -> list[int]:
    """A completion of at least one token, with the end token where there is room."""
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return [*ids, *end][:most] or [0]


def check_reward(
    config: Config,
    config_folder: str | Path,
    fields: Collection[str] | None = None,
    *,
    trials: Iterable[TrialScore] = (),
) -> None:
    """Score the `trials` in a worker up to the first success. Raises ConfigError when the function does not load, needs
    fields that the rows (`fields`) lack, or fails in all trials.
    """
    reward, options = config.reward, all_options(config, config_folder)
    check = reward.check.function
    order = WorkerOrder(reward.function, config_folder, fields, options=options, group=reward.group, check=check)
    with WorkerPool(order, n_workers=1, timeout_s=reward.timeout_s, max_failed_starts=1) as pool:
        while not pool.ready:
            pool.poll(timeout_s=1.0)
        trials = iter(trials)
        first = list(islice(trials, 1))
        error = try_scores(pool, chain(first, trials))
        is_compared = reward.group and first and not error
        is_checked = ":" in check and first and not error
        check_error = try_scores(pool, first, is_check=True) if is_checked else ""
        group_error = try_group(pool, first[0], smallest_group(config)) if is_compared else ""
    for key, name, why in (
        ("group", reward.group, group_error),
        ("check.function", check, check_error),
        ("function", reward.function, error),
    ):
        if why:
            raise ConfigError(f"reward.{key} {name!r} failed in a trial before the start, {why}")


def try_group(pool: WorkerPool, one: TrialScore, n: int) -> str:
    """The error of a group of n samples, the first with reward 1, the others with 0; "" for none."""
    samples = [{"sample": i, "completion": one.completion, "reward": float(not i), "correct": None} for i in range(n)]
    pool.submit_group(0, prompt=one.prompt, samples=json.dumps(samples), row=one.row)
    while not (verdicts := pool.poll(timeout_s=1.0)):
        pass
    return f"on {one.where}: {verdicts[0].error}" if verdicts[0].status == VerdictStatus.ERROR else ""


def try_scores(pool: WorkerPool, trials: Iterable[TrialScore], *, is_check: bool = False) -> str:
    """The first error, if each trial ends in one; else "". `is_check`: by reward.check."""
    errors = []
    for one in trials:
        given = {"prompt": one.prompt, "completion": one.completion, "row": one.row}
        pool.submit(0, **given, ids=one.ids, n_prompt=one.n_prompt, is_check=is_check)
        while not (verdicts := pool.poll(timeout_s=1.0)):
            pass
        if verdicts[0].status != VerdictStatus.ERROR or verdicts[0].error.startswith(NotApplicable.__name__):
            return ""
        errors.append(f"on {one.where}: {verdicts[0].error}")
    return errors[0] if errors else ""
