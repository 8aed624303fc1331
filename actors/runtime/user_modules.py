"""Imports the user's modules, and functions that a setting names as "module:function".

They are in the folder of the config, which is the last place where Python looks. So no file of that folder can hide a
module of this project, of the standard library or of an installed package. A module that a setting names must have a
name of its own. Imports without loguru, because worker processes use it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.runtime.user_code import cause
from areal_bus.errors import ConfigError

_folders: list[str] = []  # the one that `add_user_folder` added last in this process


def add_user_folder(folder: str | Path) -> None:
    """Put the folder of a config last on sys.path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    _folders[:] = [str(folder)]


def user_folder() -> str:
    """The folder of the config, as long as it is on sys.path; "" before `add_user_folder`."""
    return next((folder for folder in _folders if folder in sys.path), "")


def import_user_module(name: str) -> ModuleType:
    """Import a module that a setting names. Raises what its code raises, and as `check_not_hidden`."""
    check_not_hidden(name)
    return importlib.import_module(name)


def check_not_hidden(name: str) -> None:
    """Raises ImportError when the config's folder has a module of that name and Python finds another one first."""
    top, folder = name.partition(".")[0], user_folder()
    for own in (Path(folder) / f"{top}.py", Path(folder) / top / "__init__.py"):
        if folder and own.is_file() and (other := found_instead(top, own)):
            raise ImportError(f"a module of yours needs a name of its own: Python finds {other} before {own}")


def found_instead(name: str, own: Path) -> str:
    """The file that Python finds under that name, if it is not `own`; else ""."""
    spec = importlib.util.find_spec(name)
    if spec is None or (spec.origin and Path(spec.origin).resolve() == own.resolve()):
        return ""
    return spec.origin or f"another {name}"


def load_function(key: str, name: str) -> Callable[..., Any]:
    """ "module:function" from sys.path, which has the config's folder. `key` is the setting. Raises ConfigError."""
    module_name, _, function_name = name.partition(":")
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} must import: {module_name!r} does not ({cause(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"missing function {function_name!r} in module {module_name!r} ({key})")
    return function  # type: ignore[no-any-return]
