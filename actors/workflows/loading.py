"""Loads a workflow by its configured name."""

from collections.abc import Callable, Mapping

from actors.data.fields import SOURCE
from actors.endpoint.agent_pool import AgentCode, check_agent
from actors.runtime.areal_stand_ins import import_module
from actors.runtime.user_code import cause, check_not_hidden
from actors.runtime.user_failures import Prints
from actors.workflows.agent import AgentWorkflow, do_nothing
from actors.workflows.areal_workflow import ArealWorkflow
from actors.workflows.protocol import Ask, Episode, Row, Workflow
from actors.workflows.single_turn import SingleTurn
from areal_bus.config.names.workflows import EXTERNAL
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.errors import ConfigError


def load_workflow(config: Config, *, wake: Callable[[], None] = do_nothing, prints: Prints | None = None) -> Workflow:
    """Build workflow.function, from sys.path; end it by `close_workflow`. `prints`: receives the agents' output.

    `wake`: called from any thread when an episode that waited may continue. Raises ConfigError.
    """
    own = {label: function for label, function in config.workflows.items() if function != config.workflow.function}
    common = _load(largest(config), config.workflow.function, wake, prints)
    return (
        ByRow(common, {label: _load(largest(config), one, wake, prints) for label, one in own.items()})
        if own
        else common
    )


class ByRow:
    """The workflows of a run whose sources have some of their own: each row has that of its source."""

    def __init__(self, common: Workflow, own: Mapping[str, Workflow]) -> None:
        self._common, self._own, self.all = common, own, [common, *own.values()]

    async def episode(self, row: Row, ask: Ask) -> Episode:
        return await self._own.get(str(row.get(SOURCE, "")), self._common).episode(row, ask)


def _load(config: Config, function: str, wake: Callable[[], None], prints: Prints | None) -> Workflow:
    if function == "single_turn":
        return SingleTurn(config)
    if config.workflow.uses_endpoint and function == config.workflow.function:
        return AgentWorkflow(config, wake=wake, prints=prints)
    key = "workflow.function" if function == config.workflow.function else "workflow of a [[data.source]]"
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        known = '"single_turn", "multi_turn", "tools", "agent", "verifiers:NAME" or "module:Class"'
        raise ConfigError(f"unknown {key} {function!r}: it must be {known}")
    try:
        check_not_hidden(module_name)
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} {function!r} must import: module {module_name!r} did not ({cause(error)})") from error
    made = getattr(module, name, None)
    if callable(getattr(made, "arun_episode", None)) and not hasattr(made, "episode"):
        return ArealWorkflow(made, config, wake=wake)
    if not callable(made) or not callable(getattr(made, "episode", None)):
        found = (
            "has no such name" if made is None else "has no class with an `episode` (or AReaL's `arun_episode`) there"
        )
        raise ConfigError(
            f"{key} {function!r} must name a class with `episode(row, ask)`: module {module_name!r} "
            f"({module.__file__}) {found}"
        )
    try:
        workflow: Workflow = made(config)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} {function!r} must build from the config alone: {name}(config) of {module.__file__} "
            f"raised {cause(error)}"
        ) from error
    return workflow


def continues(workflow: Workflow) -> bool:
    """Whether another generator can continue an episode. One that runs code beside the loop cannot move."""
    if isinstance(workflow, ByRow):
        return all(map(continues, workflow.all))
    return not isinstance(workflow, AgentWorkflow | ArealWorkflow)


def close_workflow(workflow: Workflow) -> None:
    """Stop server, processes and threads of the workflow."""
    for one in workflow.all if isinstance(workflow, ByRow) else [workflow]:
        if isinstance(one, AgentWorkflow | ArealWorkflow):
            one.close()


def check_workflow(config: Config) -> None:
    """Raises ConfigError when the workflow does not load. An agent's code is loaded in a worker process."""
    load_workflow(config)
    loads_code = not config.workflow.environment and config.workflow.agent.function != EXTERNAL
    if config.workflow.uses_endpoint and loads_code:
        check_agent(AgentCode.of(config))
