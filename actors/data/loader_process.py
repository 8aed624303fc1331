"""The process of a user's data loader: `python -m actors.data.loader_process`.

First the order; then requests for a row or a state. A state is sent as JSON, without pickle (`encode`, `decode`).
"""

import base64
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from actors.data.loading import complete_row, named_row
from actors.processes.ipc import ROWS_BYTES, Channel
from actors.runtime.user_code import add_user_folder, load_function
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described


class LoaderRows:
    """The rows of a loader, pass after pass, and the state after the last one."""

    def __init__(self, build: Callable[[], Any], *, passes: int | None = None, state: Mapping[str, Any] | None = None):
        """`build`: makes the loader. `state`: of an earlier one, to continue after its last row. Raises ConfigError."""
        self._loader, self._passes = build(), passes
        if not (hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")):
            raise ConfigError(
                "a loader needs state_dict and load_state_dict, so that a resumed run goes on after its last row: "
                f"a {type(self._loader).__name__} has not; StatefulDataLoader of torchdata has"
            )
        self._pass = self._n_rows = 0  # the pass, and its rows so far
        self._left: list[Any] = []  # rows of the last item that are still to come
        self._state: Any = None  # of the loader, after its last item
        if state:
            self._pass, self._n_rows, self._left = state["pass"], state["n_rows"], list(state["left"])
            self._state = state["loader"]
            if self._state is not None:
                self._loader.load_state_dict(decode(self._state))
        self._items: Iterator[Any] = iter(self._loader)

    def next(self) -> tuple[int, int, Any] | None:
        """(pass, its number in the pass, row); None after the last pass."""
        while not self._left:
            try:
                self._left = rows_of(next(self._items))
            except StopIteration:
                if not self._n_rows:
                    raise ConfigError(f"no row in loader pass {self._pass}: it must yield one in each pass") from None
                if self._passes is not None and self._pass + 1 >= self._passes:
                    return None
                self._pass, self._n_rows = self._pass + 1, 0
                self._items = iter(self._loader)
                continue
            self._state = encode(self._loader.state_dict())
        self._n_rows += 1
        return self._pass, self._n_rows - 1, self._left.pop(0)

    def state(self) -> dict[str, Any]:
        """JSON from which another instance continues after the last row."""
        return {"pass": self._pass, "n_rows": self._n_rows, "left": list(self._left), "loader": self._state}


def rows_of(item: Any) -> list[Any]:
    """The rows of one item of a loader: itself, or the rows in a list."""
    if isinstance(item, Mapping):
        return [dict(item)]
    if isinstance(item, list | tuple) and all(isinstance(row, Mapping) for row in item):
        return [dict(row) for row in item]
    raise ConfigError(
        f"a loader must yield rows (dicts), or lists of rows: it yields a {type(item).__name__}; set "
        "batch_size = None, or collate_fn = list"
    )


class Feed:
    """Answers the requests of the head."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._config = Config.model_validate_json(json.dumps(order["config"]))
        self._name: str = order["name"]
        self._data = self._config.data.of(self._name)
        self._rows: LoaderRows | None = None
        self._factory = find_factory(self._data.function, order["folder"])

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the state after it; or an empty answer after the last row."""
        if self._rows is None or "state" in request:
            state = request.get("state")
            self._rows = LoaderRows(self._build, passes=self._data.total_train_epochs, state=state)
            if "state" in request:
                return {}
        found = self._rows.next()
        if found is None:
            return {"row": None, "state": self._rows.state()}
        pass_, number, row = found
        where = f"data.function = {self._data.function!r}, row {number} of pass {pass_}"
        completed = named_row(complete_row(row, self._data, where, most_bytes=None), self._name, where)
        return {"row": [number, pass_, json.dumps(completed, ensure_ascii=False)], "state": self._rows.state()}

    def _build(self) -> Any:
        """The user's loader, with all global random numbers seeded."""
        seed = self._config.run.seed
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        try:
            return self._factory(self._config)
        except Exception as error:
            raise ConfigError(
                f"data.function = {self._data.function!r} must return a loader: it raised {described(error)}"
            ) from error


def find_factory(function: str, folder: str) -> Callable[[Config], Any]:
    """The user's factory. Raises ConfigError."""
    add_user_folder(folder)
    return load_function("data.function", function)


def main(parent: int) -> None:
    """Answer each request after the order. An error is the last answer."""
    channel = Channel(parent, most_bytes=ROWS_BYTES, prints_to=sys.stderr.fileno())
    feed: Feed | None = None
    for request in channel:
        try:
            if feed is None:
                feed = Feed(request)
            else:
                channel.reply(feed.answer(request))
        except Exception as error:  # noqa: BLE001  user code raises any error; the head reports it and ends
            is_ours = isinstance(error, ConfigError)
            channel.reply({"error": str(error) if is_ours else f"the loader failed: {described(error)}"})


KIND = "kind"  # marks an object that stands for a value that JSON has not


def encode(value: Any, path: str = "state") -> Any:
    """JSON that `decode` reads. Raises ConfigError for a value of another type, with its place."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(one, f"{path}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": encode(list(value), path)}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[encode(k), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return encode(value.item(), path)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return {KIND: "tensor", "array": encode(value.detach().cpu().numpy(), path)}
    raise ConfigError(
        f"the state of a loader must hold plain values, bytes, arrays and tensors: {path} is a {type(value).__name__}"
    )


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    match value[KIND]:
        case "tuple":
            return tuple(decode(value["items"]))
        case "dict":
            return {decode(key): decode(one) for key, one in value["items"]}
        case "bytes":
            return base64.b64decode(value["data"])
        case "array":
            flat = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        case _:
            return importlib.import_module("torch").from_numpy(decode(value["array"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
