"""Published data sets by name (data.task = "gsm8k"): the settings that a name stands for, where they are not set.

`actors/data/tasks.py` reads the rows. Tasks of reasoning-gym have a prefix; the package is not imported here.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_bus.config.names import workflows
from areal_bus.errors import ConfigError

GYM_PREFIX = "reasoning-gym:"
GYM_HELD_OUT = 100  # problems of an evaluation
GYM_REFUSED = {
    "coin_flip": "its scorer calls 0 right in nearly every problem",
    "codeio": "a seed does not give the same problems again",
    "composite": "it is a mix of others: name one of them",
    "game_of_life_halting": "its scorer calls any answer right",
}


def gym_task(name: str) -> str:
    """NAME of "reasoning-gym:NAME"; "" for another task."""
    return name.removeprefix(GYM_PREFIX) if name.startswith(GYM_PREFIX) else ""


Key = str  # section.key
MATH_PROMPT = "{question}\nThink step by step, and put the final answer in \\boxed{{}}."
CODE_PROMPT = "{question}\nAnswer with one Python program in a ```python block."
REASONING_PROMPT = "{question}\nGive the final answer in <answer> and </answer> marks."
STDIN_PROMPT = CODE_PROMPT + " It reads standard input and prints to standard output."


@dataclass(frozen=True, slots=True)
class NamedTask:
    """A data set in its published form."""

    about: str
    hub: str  # Hugging Face id ("owner/name:subset"); "": a local file is needed
    split: str
    reward: str
    prompt: str
    max_new_tokens: int
    n_samples: int = 1  # of an evaluation, for each problem
    temperature: float = 0.0  # of an evaluation
    timeout_s: float = 10.0  # of a score
    memory_mib: int | None = None  # of a program

    def keys(self) -> dict[Key, Any]:
        memory = {} if self.memory_mib is None else {"reward.code.memory_mib": self.memory_mib}
        return {
            **memory,
            "data.path": self.hub,
            "data.split": self.split,
            "data.prompt": self.prompt,
            "data.max_prompt_tokens": 2048,
            "reward.function": self.reward,
            "reward.timeout_s": self.timeout_s,
            "gconfig.max_new_tokens": self.max_new_tokens,
            "evaluate.n_samples": self.n_samples,
            "evaluate.temperature": self.temperature,
        }

    @property
    def protocol(self) -> str:
        """Samples, temperature and metric of an evaluation."""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.n_samples} x {how}, {'pass@1' if self.n_samples == 1 else f'avg@{self.n_samples}'}"


def _math(about: str, hub: str, split: str, n_samples: int, max_new_tokens: int) -> NamedTask:
    temperature = 0.0 if n_samples == 1 else 0.6
    return NamedTask(about, hub, split, "math", MATH_PROMPT, max_new_tokens, n_samples, temperature)


def _code(
    about: str, hub: str, split: str, prompt: str, max_new_tokens: int, n_samples: int = 1, timeout_s: float = 30.0
) -> NamedTask:
    temperature = 0.0 if n_samples == 1 else 0.2
    return NamedTask(about, hub, split, "code", prompt, max_new_tokens, n_samples, temperature, timeout_s, 2048)


NAMED_TASKS: Mapping[str, NamedTask] = {
    "gsm8k": _math("grade school word problems", "openai/gsm8k:main", "train", 1, 512),
    "math500": _math("500 problems of MATH", "HuggingFaceH4/MATH-500", "test", 1, 2048),
    "aime24": _math("AIME 2024, 30 problems", "HuggingFaceH4/aime_2024", "train", 32, 16384),
    "aime25": _math("AIME 2025, 30 problems", "math-ai/aime25", "test", 32, 16384),
    "amc23": _math("AMC 2023, 40 problems", "math-ai/amc23", "test", 32, 16384),
    "deepscaler": _math("40,000 problems for training", "agentica-org/DeepScaleR-Preview-Dataset", "train", 1, 8192),
    "humaneval": _code("164 Python functions", "openai/openai_humaneval", "test", CODE_PROMPT, 1024),
    "mbpp": _code("Python functions, MBPP or MBPP+", "evalplus/mbppplus", "test", CODE_PROMPT, 1024, timeout_s=60.0),
    "livecodebench": _code("contest problems since 2023", "", "test", CODE_PROMPT, 8192, n_samples=10),
    "codecontests": _code("contest problems (AlphaCode)", "deepmind/code_contests", "train", STDIN_PROMPT, 8192),
    "codeforces": _code("Codeforces problems", "open-r1/codeforces:verifiable", "train", STDIN_PROMPT, 8192),
}
GENERATED = ("sums", "reverse")
WITH_TEST = ("gsm8k", "codecontests", "codeforces")  # published with a split "test" beside the one for training
ANSWER_REWARDS = ("exact", "sums", "reverse", "math", "code", "reasoning_gym")  # each needs its own form of answers
REASONING_GYM: Mapping[Key, Any] = {  # "reasoning-gym:NAME"
    "data.prompt": REASONING_PROMPT,
    "data.held_out": GYM_HELD_OUT,
    "data.max_prompt_tokens": 2048,
    "reward.function": "reasoning_gym",
    "gconfig.max_new_tokens": 512,
    "evaluate.n_samples": 1,
    "evaluate.temperature": 0.0,
}


def evaluation_split(path: str) -> str:
    """The split of the Hugging Face data set `path` that an evaluation reads: "test", or what a named task says."""
    own = (task.split for name, task in NAMED_TASKS.items() if task.hub == path and name not in WITH_TEST)
    return next(own, "test")


def is_scored_by(task: str, reward: str, *, is_set: bool) -> bool:
    """Whether this reward function of a run may score the named task. `is_set`: the user has set it."""
    ours = reward.removesuffix("_share")
    is_chosen = ours not in ANSWER_REWARDS or (ours == "exact" and is_set)
    return is_chosen or ours == NAMED_TASKS[task].reward


def is_generated(task: str) -> bool:
    """Whether the rows of a task come from code, instead of a file."""
    return task in GENERATED or bool(gym_task(task) or workflows.environment_of(task))


SHARED = ("data.max_prompt_tokens", "reward.timeout_s", "reward.code.memory_mib")  # by all sources of a run


def check_name(name: str) -> None:
    """Raises ConfigError for an unknown task, with the nearest name."""
    names = [*GENERATED, *NAMED_TASKS]
    if why := GYM_REFUSED.get(gym_task(name)):
        raise ConfigError(f"data.task = {name!r} cannot be trained on: {why}")
    if name and name not in names and not is_generated(name):
        near = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), names, 1, 0.5)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ConfigError(f"data.task must be one of {', '.join(names)} or {GYM_PREFIX}NAME: it is {name!r}{hint}")


def fill(tree: dict[str, Any]) -> None:
    """Set the keys of the tree's environment and named task that are not set. Raises ConfigError for unknown ones."""
    workflows.fill(tree)
    fill_sets(tree)
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    if isinstance(sources := data.get("source"), list):
        fill_sources(tree, [source for source in sources if isinstance(source, dict)])
    name = data.get("task")
    if not isinstance(name, str):
        return
    check_name(name)
    if name not in NAMED_TASKS and not gym_task(name):
        return
    has_path = bool(data.get("path"))  # with a split of its own
    for key, value in (NAMED_TASKS[name].keys() if name in NAMED_TASKS else REASONING_GYM).items():
        if not (key == "data.split" and has_path):
            workflows.set_default(tree, key, value)


def fill_sets(tree: dict[str, Any]) -> None:
    """File and protocol of the sets in [[evaluate.sets]] that name a task."""
    evaluate = tree.get("evaluate")
    sets = evaluate.get("sets") if isinstance(evaluate, dict) else None
    for problems in sets if isinstance(sets, list) else []:
        name = problems.get("task") if isinstance(problems, dict) else None
        if not name or not isinstance(name, str):
            continue
        check_name(name)
        if name not in NAMED_TASKS:
            raise ConfigError(f"a set of [[evaluate.sets]] is read from a file: its task {name!r} is generated")
        task = NAMED_TASKS[name]
        for key, value in (("path", task.hub), ("n_samples", task.n_samples), ("temperature", task.temperature)):
            problems.setdefault(key, value)


def fill_sources(tree: dict[str, Any], sources: list[dict[str, Any]]) -> None:
    """The same for [[data.source]]: path, split, prompt, reward, length of each; of shared keys the largest value."""
    tasks: list[Mapping[Key, Any]] = []
    is_bounded = "max_new_tokens" in workflows.section_of(tree, ["gconfig"])
    for source in sources:
        name = source.get("task")
        if not isinstance(name, str):
            continue
        check_name(name)
        if name in NAMED_TASKS or gym_task(name):
            tasks.append(NAMED_TASKS[name].keys() if name in NAMED_TASKS else REASONING_GYM)
            _fill_source(source, tasks[-1])
            own = source.setdefault("gconfig", {})
            if not is_bounded and isinstance(own, dict):
                own.setdefault("max_new_tokens", tasks[-1]["gconfig.max_new_tokens"])
    for key in SHARED:
        if values := [keys[key] for keys in tasks if key in keys]:
            workflows.set_default(tree, key, max(values))


def _fill_source(source: dict[str, Any], keys: Mapping[Key, Any]) -> None:
    if "data.path" in keys and not source.get("path"):
        source |= {"path": keys["data.path"], "split": source.get("split", keys["data.split"])}
    if "data.held_out" in keys:
        source.setdefault("held_out", keys["data.held_out"])
    source.setdefault("prompt", keys["data.prompt"])
    source.setdefault("reward", keys["reward.function"])
