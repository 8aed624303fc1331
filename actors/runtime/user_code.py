"""The user's code: imports its modules and functions, finds where an exception was raised in it, formats it for logs.

Modules are in the folder of the config, which is the last place where Python looks. So no file of that folder can hide
a module of this project, of the standard library or of an installed package. A module that a setting names must have a
name of its own. Imports without loguru, because worker processes use it.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described
from areal_bus.process.isolation import PACKAGES, ROOT

OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("areal_bus", *PACKAGES))
NOT_THE_USERS = (
    *OURS,
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
    "<",  # "<frozen importlib._bootstrap>", "<string>"
)
INSTALLED = ("site-packages", "dist-packages")
MAX_FIELDS = 20  # of a row, in an error text
HEAD_CHARACTERS, TAIL_CHARACTERS = 2000, 6000  # kept of a long traceback


def place_of(error: BaseException) -> str:
    """ "FILE:LINE" of the innermost frame in user code; "" without one."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{shown(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def innermost(error: BaseException) -> str:
    """ "FILE:LINE" of the last frame, in user code or not; "" when it is in this project."""
    frames = traceback.extract_tb(error.__traceback__)
    is_outside = bool(frames) and not frames[-1].filename.startswith(OURS)
    return f"{shown(frames[-1].filename)}:{frames[-1].lineno}" if is_outside else ""


def definition(function: object) -> str:
    """ "FILE:LINE" of a function's definition; "" for one that is not written in Python."""
    code = code_of(function)
    return f"{shown(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def is_ours(function: object) -> bool:
    """Whether the function belongs to this project."""
    code = code_of(function)
    return code is not None and code.co_filename.startswith(OURS)


def code_of(function: object) -> CodeType | None:
    inner = inspect.unwrap(function) if callable(function) else function
    for one in (inner, vars(type(inner)).get("__call__")):
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def is_users(filename: str) -> bool:
    """Whether a file is outside this project, the standard library and installed packages."""
    whole = filename if filename.startswith("<") else absolute(filename)
    return not whole.startswith(NOT_THE_USERS) and not any(name in Path(whole).parts for name in INSTALLED)


def shown(path: str | Path) -> str:
    """A path as printed: relative to the working directory when it is below that."""
    whole, here = absolute(path), absolute("")
    return os.path.relpath(whole, here) if here and whole.startswith(f"{here}{os.sep}") else str(path)


def absolute(path: str | Path) -> str:
    """The absolute path; the path itself when the working directory has been deleted."""
    try:
        return os.path.abspath(path)
    except OSError:
        return str(path)


def describe(error: BaseException, place: str = "") -> str:
    """Type and text of an error on one line, with its place (`place`, else `place_of`)."""
    text = described(error)
    at = place or place_of(error)
    return f"{text} ({at})" if at and at not in text else text


def known_fields(error: BaseException, row: Mapping[str, Any], unread: Mapping[str, str]) -> str:
    """The end of an error text for a KeyError on a field the row lacks: its fields, or why it is `unread`."""
    if not isinstance(error, KeyError) or len(error.args) != 1 or not isinstance(name := error.args[0], str):
        return ""
    if name in row:
        return ""
    if why := unread.get(name):
        return f"; unreadable value in column {name!r}: {why}; change it in the file"
    names = sorted(field for field in row if not field.startswith("_"))
    more = f" and {len(names) - MAX_FIELDS} more" if len(names) > MAX_FIELDS else ""
    return f"; the row has no field {name!r}, it has {', '.join(names[:MAX_FIELDS])}{more}"


def cause(error: BaseException) -> str:
    """As `describe`, with the first line of the error only."""
    first = described(error).splitlines()[0]
    at = place_of(error)
    return f"{first} ({at})" if at else first


def trace_of(error: BaseException) -> str:
    """The traceback as Python prints it, cut in the middle when long. Valid Unicode."""
    text = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]}\n  ...\n{text[-TAIL_CHARACTERS:]}"


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
    if not module_name or not function_name:
        raise ConfigError(f'{key} must be "module:function": it is {name!r}')
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} must import: {module_name!r} does not ({cause(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"missing function {function_name!r} in module {module_name!r} ({key})")
    return function  # type: ignore[no-any-return]
