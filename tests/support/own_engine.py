"""An engine as a user adds one: an opener, here of an engine that passes everything on to the builtin one."""

from typing import Any

from actors.engines.builtin.connect import open_builtin
from actors.engines.protocol import Engine
from actors.runtime.context import Context
from areal_bus.config.sections import Config


class OwnEngine:
    """Delegates; none of its methods is inherited."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def open_it(context: Context, config: Config, tokenizer: Any) -> OwnEngine:
    return OwnEngine(open_builtin(config, context.model_folder, tokenizer, device=context.device))


def open_nothing(context: Context, config: Config, tokenizer: Any) -> object:
    return object()
