"""Loads a reward function by its configured name, or several as one: their weighted sum, each reported by name."""

import copy
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.data.fields import SOURCE
from actors.environments.environment_code import GROUP, EnvironmentCode
from actors.rewards.binding.binding import AUTO, bind
from actors.rewards.binding.group import GroupFunction, bind_group
from actors.rewards.binding.values import read_value
from actors.rewards.protocol import NotApplicable, RewardFunction, Score
from actors.runtime.areal_stand_ins import import_module
from actors.runtime.user_code import add_user_folder, cause, check_not_hidden
from areal_bus.config.names.workflows import environment_of
from areal_bus.core.parts.reward_parts import ROLE
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described
from areal_bus.process.commands import install_command
from areal_bus.storage.machine import machine_folder

if TYPE_CHECKING:  # workers import this module without the settings
    from areal_bus.config.data import DataConfig
    from areal_bus.config.rewards import RewardConfig
    from areal_bus.config.sections import Config


class TermFailed(Exception):
    """One of the rewards has no value, so the sum has none: an error never counts as 0."""


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction


class WeightedReward:
    """A reward function: the sum over terms of weight * reward. `correct` is that of the first term that judges it."""

    def __init__(self, terms: Iterable[WeightedTerm]) -> None:
        self.terms = tuple(terms)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> Score:
        """Parts: the reward of each term before its weight, and the parts of a term as TERM/PART. Raises TermFailed.

        A term that does not apply to the row is left out, and one without rewards of roles counts for each role.
        Raises NotApplicable when none applies.
        """
        values, parts, correct = [], {}, None
        for term in self.terms:
            try:
                value = self._value(term, prompt, completion, row)
            except NotApplicable:
                continue
            values.append((term.weight, value["reward"], value.get("parts", {})))
            parts[term.name] = value["reward"]
            parts |= {f"{term.name}/{name}": part for name, part in value.get("parts", {}).items()}
            correct = value["correct"] if correct is None else correct
        if not values:
            raise NotApplicable("one of reward.terms must apply to each row: none applies to this one")
        for role in {name for *_, own in values for name in own if name.startswith(ROLE)}:
            parts[role] = math.fsum(weight * own.get(role, reward) for weight, reward, own in values)
        return Score(math.fsum(weight * reward for weight, reward, _ in values), correct, parts)

    @property
    def needs_token_ids(self) -> bool:
        return any(getattr(term.function, "needs_token_ids", False) for term in self.terms)

    def _value(self, term: WeightedTerm, prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return read_value(term.function(prompt, completion, copy.deepcopy(row)))  # a function may change its row
        except NotApplicable:
            raise
        except Exception as error:
            # with the traceback of the cause, which holds the place in the user's code
            failed = TermFailed(f"reward {term.name!r}: {described(error)}")
            raise failed.with_traceback(error.__traceback__) from error


BUILT_IN = {
    "exact": "actors.rewards.functions.builtin:exact_score",
    "sums": "actors.rewards.functions.builtin:sums_score",
    "reverse": "actors.rewards.functions.builtin:reverse_score",
    "math": "actors.rewards.functions.mathematics:score",
    "math_verify": "actors.rewards.functions.verified:score",
    "code": "areal_code.scoring:score",
    "code_share": "areal_code.scoring:score_share",
    "url": "actors.rewards.by_url:score",
    "model": "actors.rewards.functions.model:score",
    "format": "actors.rewards.functions.formats:score",
    "judge": "actors.rewards.judge:score",
    "reasoning_gym": "actors.rewards.functions.reasoning:score",
    "agent": "actors.rewards.functions.builtin:agent_score",
}
GROUP_BUILT_IN = {  # for reward.group
    "url": "actors.rewards.by_url:group_score",
    "model": "actors.rewards.functions.model:group_score",
    "verifiers": "actors.environments.group_rubric:score",
}
EXTRAS = {
    "url": f"it needs the extra judge: {install_command('judge')}",
    "judge": f"it needs the extra judge: {install_command('judge')}",
    "math_verify": f"it needs the extra math-verify: {install_command('math-verify')}",
    "reasoning_gym": f"it needs the extra reasoning-gym: {install_command('reasoning-gym')}",
}
KEY = "reward.function"
WEIGHTED = "weighted"  # the sum of reward.terms
BY_SOURCE = "by source"  # of runs with [[data.source]]: no name for a config
SPARE_S = 2.0  # of reward.timeout_s: tests of a program, and calls of a judge, end before the deadline of the score


def reward_name(config: "Config") -> str:
    """The name of the run's reward function for load_reward."""
    return BY_SOURCE if config.data.source else config.reward.function


def reward_options(
    reward: "RewardConfig", run_folder: Path | None = None, *, data: "DataConfig | None" = None
) -> dict[str, Any]:
    """Settings of the built-in functions, for workers, by name; `run_folder`: of a judge's replies and budget."""
    sources = {source.label: source.reward or reward.function for source in data.source} if data else {}
    has_store = run_folder and (reward.judge.url or reward.url)
    folder = str(machine_folder(run_folder.resolve() / "judge")) if run_folder and has_store else ""
    judge = {**reward.judge.model_dump(), "score_s": score_seconds(reward), "folder": folder}
    return {
        "code": code_options(reward),
        "format": reward.format.model_dump(),
        "model": reward.model.model_dump(),
        "judge": judge,
        "url": {**judge, "url": reward.url},
        "signature": reward.signature,
        "terms": [{"name": term.label, "function": term.function, "weight": term.weight} for term in reward.terms],
        "sources": {"": reward.function, **sources},
    }


def all_options(config: "Config", config_folder: str | Path, run_folder: Path | None = None) -> dict[str, Any]:
    """`reward_options` of a run, with the environment of `reward.group = "verifiers"`."""
    options = reward_options(config.reward, run_folder, data=config.data)
    if config.reward.group == GROUP:
        name = environment_of(config.workflow.function)
        options["environment"] = EnvironmentCode.of(config, name, config_folder).order()
    return options


def score_seconds(reward: "RewardConfig") -> float:
    """Seconds that a built-in function plans with, so that it ends before the deadline of its score."""
    return max(reward.timeout_s - SPARE_S, reward.timeout_s / 2)


def code_options(reward: "RewardConfig") -> dict[str, Any]:
    code, score_s = reward.code, score_seconds(reward)
    limits = {"test_s": min(code.test_timeout_s, score_s), "memory_mib": code.memory_mib, "score_s": score_s}
    return {**limits, "sandbox": reward.sandbox, "on_server": bool(reward.url)}


def load_reward(
    name: str,
    folder: str | Path,
    fields: Collection[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    key: str = KEY,
) -> RewardFunction:
    """The reward function: built-in, or "module:function" imported in this process, with `folder` last on sys.path.

    `fields`: of every row, if known; `options`: of `reward_options`, else defaults. Raises ConfigError.
    """
    if name == WEIGHTED:
        return load_weighted(folder, fields, options or {})
    if name == BY_SOURCE:
        return load_by_source(folder, options or {})
    function = import_function(name, folder, key=key)
    if options is not None:
        configure(name, options, fields)
    signature = (options or {}).get("signature", AUTO)
    return bind(function, name, fields, signature=AUTO if name in BUILT_IN else signature)


def load_group(name: str, folder: str | Path, *, options: Mapping[str, Any] | None = None) -> GroupFunction:
    """The group reward "module:function", "url", "model" or "verifiers". Raises ConfigError as `load_reward`."""
    function = import_function(name, folder, GROUP_BUILT_IN, key="reward.group")
    if options is not None:
        configure(name, options, None)
    return bind_group(function, name)


def import_function(
    name: str, folder: str | Path, built_in: Mapping[str, str] = BUILT_IN, *, key: str = KEY
) -> Callable[..., Any]:
    """The function of that name. Raises ConfigError with the module, the attribute and the cause."""
    module_name, separator, attribute = built_in.get(name, name).partition(":")
    if not (separator and module_name and attribute):
        known = ", ".join(f'"{known}"' for known in [*BUILT_IN, WEIGHTED])
        raise ConfigError(f'{key} must be {known} or "module:function": it is {name!r}')
    add_user_folder(folder)
    try:
        if name not in BUILT_IN:
            check_not_hidden(module_name)
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} {name!r} must import: module {module_name!r} did not ({cause(error)}); "
            + EXTRAS.get(name, f"looked in {folder} last")
        ) from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        found = "has no such name" if function is None else f"has a {type(function).__name__} there"
        raise ConfigError(f"{key} {name!r} must name a function: module {module_name!r} ({module.__file__}) {found}")
    return function


def configure(name: str, options: Mapping[str, Any], fields: Collection[str] | None) -> None:
    """Set the options of a built-in function in this process. Raises ConfigError where they cannot be used."""
    if name == "url" or (name in ("code", "code_share") and options["code"]["on_server"]):
        by_url = importlib.import_module("actors.rewards.by_url")
        by_url.configure(by_url.JudgeOptions(**options["url"]))
    if name in ("code", "code_share"):
        scoring = importlib.import_module("areal_code.scoring")
        scoring.configure(scoring.CodeOptions(**options["code"]))
    elif name == GROUP:
        importlib.import_module("actors.environments.group_rubric").configure(options["environment"])
    elif name == "model":
        model = importlib.import_module("actors.rewards.functions.model")
        model.configure(model.ModelOptions(**options["model"]))
    elif name == "format":
        formats = importlib.import_module("actors.rewards.functions.formats")
        formats.configure(formats.FormatOptions(**options["format"]))
    elif name == "judge":
        judge = importlib.import_module("actors.rewards.judge")
        judge.configure(judge.JudgeOptions(**options["judge"]), fields)


def load_weighted(folder: str | Path, fields: Collection[str] | None, options: Mapping[str, Any]) -> WeightedReward:
    terms = options.get("terms", [])
    functions = [load_reward(term["function"], folder, fields, options=options) for term in terms]
    return WeightedReward(
        WeightedTerm(term["name"], term["weight"], function) for term, function in zip(terms, functions, strict=True)
    )


@dataclass(frozen=True, slots=True)
class RewardBySource:
    """Scores a row by the reward of its source. A row without a source (a set in [[evaluate.sets]]) uses `default`."""

    functions: Mapping[str, RewardFunction]
    default: RewardFunction

    @property
    def needs_token_ids(self) -> bool:
        return any(getattr(one, "needs_token_ids", False) for one in (self.default, *self.functions.values()))

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> Score:
        """Parts: NAME (the reward), NAME/accuracy if the function judges, and parts of the function as NAME/PART."""
        name = str(row.get(SOURCE, ""))
        value = read_value(self.functions.get(name, self.default)(prompt, completion, row))
        reward, correct, parts = value["reward"], value["correct"], value.get("parts", {})
        if name in self.functions:
            judged = {} if correct is None else {f"{name}/accuracy": float(correct)}
            own = {part if part.startswith(ROLE) else f"{name}/{part}": number for part, number in parts.items()}
            parts = {name: reward, **judged, **own}
        return Score(reward, correct, parts)


def load_by_source(folder: str | Path, options: Mapping[str, Any]) -> RewardBySource:
    """The functions of options["sources"]. A row has the fields of its source, so that none is common to all."""
    names = options["sources"]
    loaded = {name: load_reward(name, folder, options=options) for name in sorted(set(names.values()))}
    functions = {source: loaded[function] for source, function in names.items()}
    return RewardBySource(functions, default=functions.pop(""))
