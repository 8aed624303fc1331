"""An environment of verifiers in this process: its rows and conversations, through this generator's endpoint.

Each reward function is wrapped: its exception is an error of the verdict (I10), not the package's reward of 0.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.utils.message_utils import normalize_messages

from actors.environments.environment_code import INPUT, EnvironmentCode, Row, row_of
from actors.runtime.user_code import describe
from areal_bus.config.names.workflows import PREFIX
from areal_bus.errors import ConfigError
from areal_bus.messages import MAX_PARTS

WRAPPED = "_records_failures"
PLURALS = ("states", "prompts", "completions", "answers", "tasks", "infos")  # arguments of a function of whole groups


class HostedEnvironment:
    """Called as an agent is: with a row, the URL of the endpoint and the key of the conversation."""

    def __init__(self, environment: Any, code: EnvironmentCode) -> None:
        """Raises ConfigError for an environment that cannot be run here."""
        self._environment, self._code = environment, code
        self._loop = asyncio.Runner()  # one loop for all conversations: the environment may keep connections
        self._failures: list[str] = []  # of reward functions, in this conversation
        check_group_rubric(environment, code)

    def problems(self) -> tuple[list[Row], list[Row] | None]:
        """(training rows, evaluation rows; None without a set of its own). Raises ConfigError."""
        environment = self._environment
        if environment.dataset is None and environment.dataset_source is None:
            raise ConfigError(f"missing dataset in the environment {self._code.name!r}: training needs one")
        train = list(self._rows(environment.get_dataset(), "dataset"))
        has_own = environment.eval_dataset is not None or environment.eval_dataset_source is not None
        return train, list(self._rows(environment.get_eval_dataset(), "eval_dataset")) if has_own else None

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one conversation and its rubric; fields for the reward "agent". Raises RuntimeError: it failed."""
        if INPUT not in row:
            raise ValueError(f"missing field {INPUT} in a row of an environment: it has {', '.join(row)}")
        return self._loop.run(self._play(row[INPUT], base_url, api_key))

    async def _play(self, given: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        environment, client = self._environment, connect(base_url, api_key)
        try:
            state = await environment.rollout(dict(given), client, self._code.model, {})
            self._check(state)
            for rubric in rubrics(environment.rubric):
                self._watch(rubric)
            self._failures.clear()
            await (self._score_alone(state) if self._code.is_grouped else environment.rubric.score_rollout(state))
            await environment.rubric.cleanup(state)
        finally:
            await client.close()
        return self._returned(state)

    async def _score_alone(self, state: Any) -> None:
        """The reward of one sample before its group is complete: without the functions that score whole groups."""
        state["reward"], state["metrics"] = 0.0, {}
        for rubric in rubrics(self._environment.rubric):
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                if not rubric._is_group_func(function):
                    value = await rubric._call_individual_reward_func(function, state)
                    state["metrics"][function.__name__] = value
                    state["reward"] += weight * value

    def score_group(self, given: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
        """The rubric's reward of each answer to the environment's row `given`. RuntimeError: a function failed."""
        return self._loop.run(self._score_group(given, completions))

    async def _score_group(self, given: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
        environment, client = self._environment, connect("http://127.0.0.1:9", "none")  # asked for nothing
        try:
            states = [await environment.init_state(dict(given), client, self._code.model) for _ in completions]
            for state, text in zip(states, completions, strict=True):
                state["completion"] = normalize_messages(
                    [{"role": "assistant", "content": text}], field_name="completion"
                )
            for rubric in rubrics(environment.rubric):
                self._watch(rubric)
            self._failures.clear()
            await environment.rubric.score_group(states)
        finally:
            await client.close()
        if self._failures:
            raise RuntimeError("; ".join(self._failures))
        return [float(state["reward"]) for state in states]

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises RuntimeError for a failed conversation. A tool error is the model's own: the rubric judges it."""
        error = state.get("error")
        if error is None or isinstance(error, verifiers.ToolError):
            return
        causes = []
        while error is not None:
            causes.append(describe(error))
            error = error.__cause__
        raise RuntimeError(f"the conversation failed: {' from '.join(causes)}")

    def _returned(self, state: Mapping[str, Any]) -> dict[str, Any]:
        ended = {"stop_condition": str(state.get("stop_condition")), "is_truncated": bool(state.get("is_truncated"))}
        if self._failures:
            return {"reward_error": "; ".join(self._failures), **ended}
        reward = state.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            return {"reward_error": f"the rubric's reward must be a finite number: it is {reward!r}", **ended}
        metrics = state.get("metrics") or {}
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        return {
            "reward": float(reward),
            "correct": float(reward) >= getattr(self._environment, "pass_threshold", 0.5),
            "parts": dict(list(finite.items())[:MAX_PARTS]),
            **ended,
        }

    def _watch(self, rubric: Any) -> None:
        """Wrap the reward functions of a rubric, also those that were added since the last conversation."""
        rubric.funcs[:] = [
            one if hasattr(one, WRAPPED) else self._recorded(one, of_group=rubric._is_group_func(one))
            for one in rubric.funcs
        ]

    def _recorded(self, function: Callable[..., Any], *, of_group: bool) -> Callable[..., Any]:
        """The function with the same name and signature; its failures are recorded before the package drops them."""

        @functools.wraps(function)
        async def recorded(*arguments: Any, **named: Any) -> Any:
            try:
                value = function(*arguments, **named)
                value = await value if inspect.isawaitable(value) else value
                scores = [float(one) for one in (value if of_group else [value])]
                n = next((len(named[name]) for name in PLURALS if name in named), len(scores))
                if len(scores) != n or not all(map(math.isfinite, scores)):
                    what = f"{n} finite numbers" if of_group else "a finite number"
                    raise ValueError(f"it must return {what}: it returned {value}")
            except Exception as error:
                self._failures.append(f"reward function {function.__name__}: {describe(error)}")
                raise
            return scores if of_group else scores[0]

        setattr(recorded, WRAPPED, True)
        return recorded

    def _rows(self, dataset: Any, name: str) -> Iterator[Row]:
        """Rows as a run needs them, with the environment's own row in one field. Raises ConfigError."""
        for number, given in enumerate(dataset.to_list()):
            yield row_of(given, given.get("prompt"), f"row {number} of {name} of {PREFIX + self._code.name!r}")


def check_group_rubric(environment: Any, code: EnvironmentCode) -> None:
    """Raises ConfigError for a rubric of whole groups that cannot be scored, or one that is missing."""
    is_grouped = bool(getattr(environment, "requires_group_rollouts", False))
    what = f"the environment {code.name!r}"
    if is_grouped and not code.is_grouped:
        raise ConfigError(f'{what} scores all samples of a group together: set reward.group = "verifiers"')
    if code.is_grouped and not is_grouped:
        raise ConfigError(f'{what} has no rubric of whole groups: remove reward.group = "verifiers"')
    if is_grouped and not isinstance(environment, verifiers.SingleTurnEnv):
        raise ConfigError(
            f"{what} scores groups of conversations: a group rubric gets the last answers only, so it needs "
            "a SingleTurnEnv"
        )


def rubrics(rubric: Any) -> Iterator[Any]:
    """A rubric with all that it is made of."""
    yield rubric
    for inner in getattr(rubric, "rubrics", []):
        yield from rubrics(inner)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from rubrics(environment.rubric)


class EndpointClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """The package's own client, but an empty answer is an answer: the policy sampled it, and it is trained."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing: the endpoint's responses are complete, and the package would refuse empty ones."""

    async def from_native_response(self, response: Any) -> Any:
        read = await super().from_native_response(response)
        if read.message.content is None and not read.message.tool_calls:
            read.message.content = ""
        return read


def connect(base_url: str, api_key: str) -> EndpointClient:
    """A client without time limits: the pool counts only the environment's own time."""
    transport = httpx.AsyncClient(verify=False, trust_env=False, timeout=None)  # HTTP on 127.0.0.1
    return EndpointClient(AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=transport))
