"""From the name of a workflow to the workflow; knows nothing of what it does."""

import importlib

from actors.workflows.protocol import Workflow
from actors.workflows.single_turn import SingleTurn
from areal_bus.config import Config
from areal_bus.errors import ConfigError


def load_workflow(config: Config) -> Workflow:
    """An instance of workflow.function, built with the config; a user's module is found on sys.path.

    Raises ConfigError with the module, the name and the cause.
    """
    function = config.workflow.function
    if function == "single_turn":
        return SingleTurn(config)
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        raise ConfigError(f'workflow.function must be "single_turn" or "module:Class": it is {function!r}')
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(
            f"workflow.function {function!r} must import: module {module_name!r} did not ({cause})"
        ) from error
    made = getattr(module, name, None)
    if not callable(made) or not callable(getattr(made, "episode", None)):
        found = "has no such name" if made is None else "has no class with an `episode` there"
        raise ConfigError(
            f"workflow.function {function!r} must name a class with `episode(row, ask)`: module {module_name!r} "
            f"({module.__file__}) {found}"
        )
    try:
        workflow: Workflow = made(config)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(
            f"workflow.function {function!r} must build from the config alone: {name}(config) of {module.__file__} "
            f"raised {cause}"
        ) from error
    return workflow
