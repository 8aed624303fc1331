"""Loads a workflow by its configured name."""

from collections.abc import Callable

from actors.endpoint.agent_pool import AgentCode, check_agent
from actors.runtime.areal_stand_ins import import_module
from actors.runtime.user_code import cause, check_not_hidden
from actors.runtime.user_failures import Prints
from actors.workflows.agent import AgentWorkflow, do_nothing
from actors.workflows.areal_workflow import ArealWorkflow
from actors.workflows.protocol import Workflow
from actors.workflows.single_turn import SingleTurn
from areal_bus.config.names.workflows import EXTERNAL
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.errors import ConfigError


def load_workflow(config: Config, *, wake: Callable[[], None] = do_nothing, prints: Prints | None = None) -> Workflow:
    """Build workflow.function, from sys.path; end it by `close_workflow`. `prints`: receives the agents' output.

    `wake`: called from any thread when an episode that waited may continue. Raises ConfigError.
    """
    config = largest(config)
    function = config.workflow.function
    if function == "single_turn":
        return SingleTurn(config)
    if config.workflow.uses_endpoint:
        return AgentWorkflow(config, wake=wake, prints=prints)
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        known = '"single_turn", "multi_turn", "tools", "agent", "verifiers:NAME" or "module:Class"'
        raise ConfigError(f"unknown workflow.function {function!r}: it must be {known}")
    try:
        check_not_hidden(module_name)
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"workflow.function {function!r} must import: module {module_name!r} did not ({cause(error)})"
        ) from error
    made = getattr(module, name, None)
    if callable(getattr(made, "arun_episode", None)) and not hasattr(made, "episode"):
        return ArealWorkflow(made, config, wake=wake)
    if not callable(made) or not callable(getattr(made, "episode", None)):
        found = (
            "has no such name" if made is None else "has no class with an `episode` (or AReaL's `arun_episode`) there"
        )
        raise ConfigError(
            f"workflow.function {function!r} must name a class with `episode(row, ask)`: module {module_name!r} "
            f"({module.__file__}) {found}"
        )
    try:
        workflow: Workflow = made(config)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"workflow.function {function!r} must build from the config alone: {name}(config) of {module.__file__} "
            f"raised {cause(error)}"
        ) from error
    return workflow


def continues(workflow: Workflow) -> bool:
    """Whether another generator can continue an episode. One that runs code beside the loop cannot move."""
    return not isinstance(workflow, AgentWorkflow | ArealWorkflow)


def close_workflow(workflow: Workflow) -> None:
    """Stop server, processes and threads of the workflow."""
    if isinstance(workflow, AgentWorkflow | ArealWorkflow):
        workflow.close()


def check_workflow(config: Config) -> None:
    """Raises ConfigError when the workflow does not load. An agent's code is loaded in a worker process."""
    load_workflow(config)
    loads_code = not config.workflow.environment and config.workflow.agent.function != EXTERNAL
    if config.workflow.uses_endpoint and loads_code:
        check_agent(AgentCode.of(config))
