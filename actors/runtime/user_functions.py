"""Loads a function that a setting names as "module:function"."""

from collections.abc import Callable
from typing import Any

from actors.runtime.user_code import cause
from actors.runtime.user_modules import import_user_module
from areal_bus.errors import ConfigError


def load_function(key: str, name: str) -> Callable[..., Any]:
    """ "module:function" from sys.path, which has the config's folder. `key` is the setting. Raises ConfigError."""
    module_name, _, function_name = name.partition(":")
    try:
        module = import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} must import: {module_name!r} does not ({cause(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} names a function of {module_name!r}: {function_name!r} is none")
    return function  # type: ignore[no-any-return]
