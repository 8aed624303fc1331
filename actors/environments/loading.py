"""Finds and loads an environment by its name. Error texts name the nearest installed one."""

import difflib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from actors.environments.environment_code import EnvironmentCode, Row
from actors.runtime.user_code import add_user_folder, cause, import_user_module
from areal_bus.config.names.workflows import PREFIX
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

PACKAGE = "verifiers"
EXTRA = f"it needs the extra envs: {install_command('envs')}"
LOADER, TASKSET = "load_environment", "the taskset"
# a requirement of an extra, as this project has one, makes no environment
REQUIRES = re.compile(rf"{PACKAGE}\b(?!-)(?!.*\bextra\b)", re.IGNORECASE)


class Hosted(Protocol):
    """A loaded environment: its rows, and its conversations one at a time."""

    def problems(self) -> tuple[list[Row], list[Row] | None]:
        """(training rows, evaluation rows; None without a set of its own). Raises ConfigError."""

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Hold the conversation of a row. Returns the fields for the reward function "agent"."""

    def score_group(self, given: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
        """With `is_grouped`: the reward of each answer to the environment's row `given`."""


def load(code: EnvironmentCode) -> Hosted:
    """The environment, loaded in this process. Raises ConfigError with the name and the cause."""
    what = f"workflow.function = {PREFIX + code.name!r}"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when `datasets` is imported
    try:
        package: Any = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError(f"missing package {PACKAGE} for {what}: {EXTRA} ({error})") from error
    if code.folder:
        add_user_folder(code.folder)
    module_name = module_of(code.name)
    if importlib.util.find_spec(module_name) is None:
        raise ConfigError(f"cannot find {what}: it must be installed, or next to the config: {missing(code)}")
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} must import: module {module_name!r} did not ({cause(error)})") from error
    kind = kind_of(module)
    if not kind:
        raise ConfigError(
            f"{what} must have a function {LOADER}, or a taskset in __all__: module {module_name!r} "
            f"({module.__file__}) has neither"
        )
    try:
        if kind == TASKSET and code.is_grouped:
            raise ConfigError(f"{what} is a taskset of {PACKAGE}.v1, which has no group rubrics: remove reward.group")
        if kind == TASKSET:
            return taskset(code)
        if not hasattr(package, LOADER):
            raise ConfigError(
                f"{what} has the classic API, which {PACKAGE} {package.__version__} lacks: pip install 'verifiers<0.4'"
            )
        environment = package.load_environment(code.name, **json.loads(code.arguments))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the package wraps the environment's own error
        raise ConfigError(f"{what} must load: {kind} raised {cause(error.__cause__ or error)}") from error
    from actors.environments.hosted import HostedEnvironment  # imports the package

    return HostedEnvironment(environment, code)


def kind_of(module: ModuleType) -> str:
    """Whether a module is an environment of the classic API, or a taskset of verifiers.v1; "": neither."""
    if callable(getattr(module, LOADER, None)):
        return LOADER
    names = getattr(module, "__all__", ())
    bases = [base for name in names for base in getattr(getattr(module, name, None), "__mro__", ())]
    return TASKSET if any(base.__module__.startswith(f"{PACKAGE}.v1.") for base in bases) else ""


def taskset(code: EnvironmentCode) -> Hosted:
    from actors.environments.tasksets import HostedTaskset  # imports the package

    return HostedTaskset(code)


def module_of(name: str) -> str:
    """The module of an environment: the package's rule for "owner/my-env"."""
    return name.rpartition("/")[2].replace("-", "_")


def missing(code: EnvironmentCode) -> str:
    """Why there is no module of that name, and the nearest that there is."""
    found = installed(code.folder)
    near = difflib.get_close_matches(module_of(code.name), found, 1, 0.5)
    if near:
        return f"there is no module {module_of(code.name)!r}; the nearest is {PREFIX + near[0]!r}"
    known = f"the environments here are {', '.join(found)}" if found else "no environment is here"
    return f"there is no module {module_of(code.name)!r}; {known}"


def installed(folder: str) -> list[str]:
    """Modules of environments: installed packages that require verifiers, and modules of the config's folder."""
    found = {
        module_of(str(one.metadata["Name"]))
        for one in distributions()
        if any(REQUIRES.match(wanted) and "extra ==" not in wanted for wanted in one.requires or [])
    }
    for path in [*Path(folder).glob("*.py"), *Path(folder).glob("*/__init__.py")]:
        if re.search(rf"def {LOADER}\b|\bTaskset\b", path.read_text(errors="replace", encoding="utf-8")):
            found.add(path.parent.name if path.name == "__init__.py" else path.stem)
    return sorted(found)
