"""Runs AReaL's workflows on an asyncio loop in a thread; `engine.agenerate` is answered by the generator's loop."""

import asyncio
import inspect
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.engines.protocol import SamplingControls
from actors.rewards.binding.values import columns_of
from actors.runtime.areal_stand_ins import GenerationHyperparameters, ModelRequest, ModelResponse, import_from_string
from actors.runtime.user_code import describe, place_of, trace_of
from actors.workflows.episode_runner import Awaited
from actors.workflows.prompts import prompt_of
from actors.workflows.protocol import Ask, Episode, Row, Turn
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError, WorkflowError
from areal_bus.messages import Finish
from areal_bus.process.loop_thread import LoopThread

GIVEN = ("gconfig", "tokenizer")  # arguments of a workflow's class that it gets without workflow.arguments


@dataclass(frozen=True, slots=True)
class EngineCall:
    """The workflow waits for a completion."""

    request: ModelRequest
    answer: "asyncio.Future[ModelResponse]"


@dataclass(frozen=True, slots=True)
class WorkflowEnded:
    """What `arun_episode` returned or raised."""

    returned: Any = None
    error: BaseException | None = None


class ArealEngine:
    """The `engine` of one episode. Its calls are queued for the generator's loop."""

    def __init__(self, wake: Callable[[], None], timeout_s: float) -> None:
        self.events: queue.SimpleQueue[EngineCall | WorkflowEnded] = queue.SimpleQueue()
        self._wake, self._timeout_s = wake, timeout_s
        self._task: asyncio.Task[Any] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_late = False
        self._in_call = False
        self._version = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """A completion of req.input_ids. Raises EngineError when it does not fit the model."""
        if self._in_call:
            raise RuntimeError("an episode is one sequence of tokens: await each agenerate before the next")
        self._in_call = True
        self._stop_clock()
        call = EngineCall(req, asyncio.get_running_loop().create_future())
        self._put(call)
        try:
            response = await call.answer
        except (EngineError, ValueError):  # refused: the workflow may go on
            self._resume()
            raise
        self._resume()
        self._version = response.output_versions[-1] if response.output_versions else self._version
        return response

    def get_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self._version

    async def run(self, workflow: Any, data: dict[str, Any]) -> None:
        """Run the episode to its end, within workflow.agent.timeout_s of its own time."""
        self._task = asyncio.current_task()
        self._start_clock()
        try:
            self._put(WorkflowEnded(await workflow.arun_episode(self, data)))
        except asyncio.CancelledError as error:
            text = f"it took more than workflow.agent.timeout_s = {self._timeout_s:g} s of its own"
            self._put(WorkflowEnded(error=TimeoutError(text) if self._is_late else error))
        except BaseException as error:  # noqa: BLE001  user code: the sample fails with the text
            self._put(WorkflowEnded(error=error))
        finally:
            self._stop_clock()

    def _resume(self) -> None:
        self._in_call = False
        self._start_clock()

    def _put(self, event: EngineCall | WorkflowEnded) -> None:
        self.events.put(event)
        self._wake()

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._end_late)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _end_late(self) -> None:
        self._is_late = True
        if self._task is not None:
            self._task.cancel()


class RecordedTokens:
    """The tokens of an episode so far, and which of them were sampled."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []  # 1: sampled
        self.n_given = 0  # before the last completion

    def continues(self, ids: list[int]) -> bool:
        return ids[: len(self.ids)] == self.ids

    def add(self, ids: list[int], turn: Turn, *, anew: bool) -> None:
        known = [] if anew else self.mask
        self.n_given = len(ids)
        self.mask = [*known, *[0] * (len(ids) - len(known)), *[1] * len(turn.ids)]
        self.ids = [*ids, *turn.ids]


class ArealWorkflow:
    """An AReaL workflow as a workflow of ours."""

    def __init__(self, made: Any, config: Config, *, wake: Callable[[], None]) -> None:
        """`made`: the class, or an object of it. Raises ConfigError for an argument that nothing gives."""
        self._made, self._config, self._wake = made, config, wake
        self._workflows: dict[GenerationConfig, Any] = {}  # by the settings of the samples
        self._thread: LoopThread | None = None
        check_arguments(made, config)

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """Raises WorkflowError when the workflow fails, or returns other tokens than those sampled."""
        engine, tokens = ArealEngine(self._wake, self._config.workflow.agent.timeout_s), RecordedTokens()
        data, last = self._data(row), Turn([], "", Finish.STOP)
        workflow = self._build(ask)
        running = self._start().run(engine.run(workflow, data))
        try:
            while True:
                await Awaited(lambda: not engine.events.empty())
                event = engine.events.get_nowait()
                if isinstance(event, WorkflowEnded):
                    return self._end(event, tokens, last, ask)
                last = await self._sample(event, tokens, ask) or last
        finally:
            running.cancel()

    def close(self) -> None:
        """End the thread. All episodes have ended by now."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _start(self) -> LoopThread:
        if self._thread is None:
            self._thread = LoopThread("areal workflows")
        return self._thread

    def _build(self, ask: Ask) -> Any:
        if not inspect.isclass(self._made):
            return self._made
        if ask.gconfig not in self._workflows:
            self._workflows[ask.gconfig] = build(self._made, self._config, ask.gconfig, ask.tokenizer)
        return self._workflows[ask.gconfig]

    def _data(self, row: Row) -> dict[str, Any]:
        """The row, with "messages" as AReaL's data sets have them."""
        data = columns_of(row)
        return data if "messages" in data else {**data, "messages": prompt_of(row, self._config.data).messages}

    async def _sample(self, call: EngineCall, tokens: RecordedTokens, ask: Ask) -> Turn | None:
        """Answer a call; None when the engine refuses it."""
        ids, gconfig = [int(one) for one in call.request.input_ids], call.request.gconfig
        anew = not tokens.continues(ids)
        most = min(gconfig.max_new_tokens, ask.gconfig.max_new_tokens)
        try:
            check_temperature(gconfig, self._config.gconfig.temperature, ask.temperature)
            controls = replace(
                SamplingControls(**ask.gconfig.controls()),
                stop=tuple(gconfig.stop or ()),
                min_new_tokens=min(gconfig.min_new_tokens, most),
            )
            turn = await ask(ids, max_new_tokens=most, anew=anew, controls=controls)
        except (EngineError, ValueError) as error:
            self._deliver(call, error)
            return None
        tokens.add(ids, turn, anew=anew)
        self._deliver(call, response_of(ids, turn, ask.tokenizer))
        return turn

    def _deliver(self, call: EngineCall, result: ModelResponse | Exception) -> None:
        def deliver() -> None:
            if not call.answer.done():
                if isinstance(result, Exception):
                    call.answer.set_exception(result)
                else:
                    call.answer.set_result(result)

        self._start().soon(deliver)

    def _end(self, ended: WorkflowEnded, tokens: RecordedTokens, last: Turn, ask: Ask) -> Episode:
        if ended.error is not None:
            raise WorkflowError(
                f"the AReaL workflow of {ask.name} failed: {describe(ended.error)}",
                place=place_of(ended.error),
                trace=trace_of(ended.error),
            )
        prompt = str(ask.tokenizer.decode(tokens.ids[: tokens.n_given]))
        returned = {"rejected": True} if ended.returned is None else {"reward": reward_of(ended.returned, tokens)}
        return Episode(text=last.text, prompt_text=prompt, row={"agent": returned})


def check_arguments(made: Any, config: Config) -> None:
    """Raises ConfigError unless workflow.arguments fit the class."""
    if not inspect.isclass(made):
        return
    parameters = inspect.signature(made).parameters.values()
    given, names = config.workflow.arguments, {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    what = f"workflow.function {config.workflow.function!r} ({made.__name__}{inspect.signature(made)})"
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if is_needed and parameter.name not in (*GIVEN, *given):
            raise ConfigError(f"{what} needs {parameter.name!r}: set workflow.arguments.{parameter.name}")
    unknown = [name for name in given if name not in names]
    if unknown and not takes_all:
        raise ConfigError(f"{what} takes no {unknown[0]!r}: remove workflow.arguments.{unknown[0]}")


def build(made: Any, config: Config, own: GenerationConfig, tokenizer: Any) -> Any:
    """An object of the class, with these generation settings, tokenizer and workflow.arguments as it takes them."""
    gconfig = GenerationHyperparameters(
        max_new_tokens=own.max_new_tokens,
        min_new_tokens=own.min_new_tokens,
        temperature=own.temperature,
        top_p=own.top_p,
        stop=list(own.stop),
        ignore_eos=own.ignore_eos,
    )
    names = inspect.signature(made).parameters
    offered = {"gconfig": gconfig, "tokenizer": tokenizer}
    given = {name: value for name, value in offered.items() if name in names} | dict(config.workflow.arguments)
    if isinstance(given.get("reward_fn"), str):
        given["reward_fn"] = import_from_string(str(given["reward_fn"]))
    try:
        return made(**given)
    except Exception as error:
        raise ConfigError(
            f"workflow.function {config.workflow.function!r} must build: {made.__name__} raised {describe(error)}"
        ) from error


def check_temperature(gconfig: GenerationHyperparameters, configured: float, sampled: float) -> None:
    """Raises ValueError for a temperature of the workflow's own: the loss needs all log-probs at one."""
    if gconfig.temperature not in (configured, sampled):
        raise ValueError(
            f"this run samples at temperature {sampled:g}, which its training needs: leave gconfig.temperature as it is"
        )


def response_of(ids: list[int], turn: Turn, tokenizer: Any) -> ModelResponse:
    versions = [version for version, n in turn.spans for _ in range(n)]
    reason = "length" if turn.finish == Finish.LENGTH else "stop"
    return ModelResponse(ids, list(turn.ids), list(turn.logps), versions, reason, tokenizer)


def reward_of(returned: Any, tokens: RecordedTokens) -> float:
    """The reward of a returned trajectory. Raises WorkflowError unless its tokens are those sampled here."""
    if not isinstance(returned, Mapping) or not {"input_ids", "loss_mask", "rewards"} <= returned.keys():
        raise WorkflowError(
            "invalid result of an AReaL workflow: "
            f"{sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned).__name__}; it must have "
            "input_ids, loss_mask and rewards (or be None); for one that uses a client of the OpenAI API, set "
            'workflow.function = "agent"'
        )
    ids, mask, n = flat(returned["input_ids"]), flat(returned["loss_mask"]), len(tokens.ids)
    if ids[:n] != tokens.ids:
        raise WorkflowError("input_ids of an AReaL workflow must begin with the tokens of its last call: they differ")
    if mask != [*tokens.mask, *[0] * (len(ids) - n)]:
        raise WorkflowError("loss_mask of an AReaL workflow must be 1 for the sampled tokens and 0 for all others")
    rewards = flat(returned["rewards"])
    if len(rewards) != 1:
        raise WorkflowError(f"rewards of an AReaL workflow must be one number: there are {len(rewards)}")
    return float(rewards[0])


def flat(values: Any) -> list[Any]:
    """A tensor, an array or a list, of any depth, as one list."""
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, list):
        return [found]
    return [one for part in found for one in flat(part)]
