"""AReaL's request types and modules as stand-ins, so that a workflow or reward runs without AReaL; never over it."""

import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any, NoReturn

from areal_bus.errors import ConfigError

NAME = "areal"
MARK = "is_stand_in"
MATH = "actors.rewards.functions.mathematics"
MODELS = "actors.models.loading"


@dataclass
class GenerationHyperparameters:
    """Generation settings with AReaL's names."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int | None = None
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0

    def new(self, **changed: Any) -> "GenerationHyperparameters":
        return replace(copy.deepcopy(self), **changed)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> "GenerationHyperparameters":
        """A copy whose stop tokens include end-of-text and padding."""
        special = [one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None]
        return self.new(stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *special])))


@dataclass
class ModelRequest:
    """A prompt of token ids to complete."""

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] | None = None
    processor: Any = None

    def copy(self) -> "ModelRequest":
        return ModelRequest(**{one.name: copy.copy(getattr(self, one.name)) for one in fields(self)})


@dataclass
class ModelResponse:
    """A completion: its tokens, with log-prob and version of each."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"  # or "length"
    tokenizer: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def end_with_stop(self) -> bool:
        """The last token is end-of-text or padding."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stops

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The tokens before the end-of-text and padding tokens at the end."""
        n = len(self.output_tokens)
        while n and self.output_tokens[n - 1] in self._stops:
            n -= 1
        return self.output_tokens[:n]

    @property
    def _stops(self) -> set[int]:
        return {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}


class RolloutWorkflow:
    """Base class of a workflow: `async def arun_episode(self, engine, data)`."""


class InferenceEngine:
    """The type of `engine`, for annotations."""


class AsyncRewardWrapper:
    """Runs a reward function in a thread, with a deadline. A late or failing one raises: it is never a reward of 0."""

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        """`max_workers` and `max_retries` are accepted: a second try of the same call would end like the first."""
        self._function, self._timeout_s = reward_fn, timeout_seconds

    async def __call__(self, *values: Any, **given: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await asyncio.wait_for(self._function(*values, **given), self._timeout_s)
        call = functools.partial(self._function, *values, **given)
        return await asyncio.wait_for(asyncio.to_thread(call), self._timeout_s)


class StatsTracker:
    """Accepts figures of a workflow and drops them."""

    def scalar(self, **figures: Any) -> None:
        """A figure that nothing reads here."""


class MathVerifyWorker:
    """AReaL's checker of answers: the reward `math`."""

    def verify(self, response: str, ground_truth: str) -> float:
        score = importlib.import_module(MATH).score
        return float(score("", response, {"answer": ground_truth}).reward)


def same(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """A decorator that changes nothing."""
    return lambda function: function


@contextlib.asynccontextmanager
async def phase(*_: Any, **__: Any) -> AsyncIterator[None]:
    """A phase that is not traced."""
    yield


def apply_chat_template(tokenizer: Any, messages: Any, **given: Any) -> Any:
    """Token ids as a list, whatever the version of transformers."""
    return tokenizer.apply_chat_template(
        messages, **({"return_dict": False} if given.get("tokenize", True) else {}), **given
    )


def import_from_string(name: str) -> Any:
    """The object at "module.name" or "module:name"."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def load_hf_tokenizer(path: str, *_: Any, **__: Any) -> Any:
    return importlib.import_module(MODELS).load_tokenizer(path)


CONTENTS: dict[str, dict[str, Any]] = {
    "api.io_struct": {"ModelRequest": ModelRequest, "ModelResponse": ModelResponse},
    "api.workflow_api": {"RolloutWorkflow": RolloutWorkflow},
    "api.engine_api": {"InferenceEngine": InferenceEngine},
    "api.reward_api": {"AsyncRewardWrapper": AsyncRewardWrapper},
    "api.cli_args": {"GenerationHyperparameters": GenerationHyperparameters},
    "utils.logging": {"getLogger": logging.getLogger},
    "utils.stats_tracker": {"get": lambda scope="": StatsTracker(), "scalar": StatsTracker().scalar},
    "utils.hf_utils": {"apply_chat_template": apply_chat_template, "load_hf_tokenizer": load_hf_tokenizer},
    "utils.dynamic_import": {"import_from_string": import_from_string},
    "utils.perf_tracer": {
        "session_context": same,
        "trace_session": same,
        "trace_perf": same,
        "atrace_session_phase": phase,
        "atrace_scope": phase,
    },
    "workflow_context": {"stat_scope": lambda: "rollout"},
    "reward": {"get_math_verify_worker": MathVerifyWorker},
}


def import_module(name: str) -> ModuleType:
    """The user's module. Stand-ins are installed when it imports AReaL and AReaL is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            return refuse(name, error)
    install()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return refuse(name, error)


def refuse(name: str, error: ImportError) -> NoReturn:
    """Raises the error, or ConfigError when the module lacks a part of AReaL because the stand-ins are in its place."""
    if not hasattr(sys.modules.get(NAME), MARK) or NAME not in str(error):
        raise error
    raise ConfigError(
        f"module {name!r} imports a part of AReaL that has no stand-in here ({error}): install AReaL, or remove the "
        "import; actors/runtime/areal_stand_ins.py has the stand-ins"
    ) from error


def install() -> None:
    """Put the stand-ins into sys.modules."""
    modules = {"": ModuleType(NAME)}
    setattr(modules[""], MARK, True)
    for path in ("api", "utils", *CONTENTS):
        modules[path] = ModuleType(f"{NAME}.{path}")
        parent, _, last = path.rpartition(".")
        setattr(modules[parent], last, modules[path])
    for path, names in CONTENTS.items():
        vars(modules[path]).update(names)
        if path.startswith("api."):
            vars(modules["api"]).update(names)
    for path in ("", "api", "utils"):
        modules[path].__path__ = []
    for path, module in modules.items():
        sys.modules[f"{NAME}.{path}" if path else NAME] = module
