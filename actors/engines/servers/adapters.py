"""A server that samples with adapters: each version is loaded under its label, and the one before is unloaded.

Servers do not report which adapter made a token. So each request names the adapter of its version, and all requests are
ended before an update.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from actors.engines.protocol import SamplingControls
from actors.engines.servers.http_client import HttpClient, ServerRejected, done
from actors.engines.servers.protocol import AdapterRoutes, PieceUpdate, RequestPiece, Server, ServerContext
from actors.engines.servers.weight_transfer import WeightFiles
from actors.models.adapter_folder import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from actors.models.lora import BASE_DIGEST
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineLost

HERE = ("127.0.0.1", "::1", "localhost")


def why_merged(met: ServerContext, routes: AdapterRoutes, server: Server) -> str:
    """Why the server is sent merged weights instead of adapters; "" if it takes adapters.

    Asks the server which routes it has and up to which rank.
    """
    config, timeout_s = met.config, met.config.engine.call_timeout_s
    rank = 0 if config.actor.lora is None else config.actor.lora.rank
    try:
        paths = set(met.link.call("GET", "/openapi.json", timeout_s=timeout_s)["paths"])
        settings = met.link.call("GET", routes.info, timeout_s=timeout_s)
        most, is_untied = routes.largest_rank(settings), routes.is_untied(settings)
    except (ServerRejected, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"it does not say which adapters it takes ({error!r})"
    rules = [
        (not {routes.load, routes.unload} <= paths, f"it has no route {routes.load}"),
        (most < 1, "it was started without --enable-lora"),
        (most < rank, f"it takes adapters up to rank {most}, not {rank} (--max-lora-rank)"),
        (met.process is not None and "--load-format" not in config.engine.arguments, "it was started without weights; "
         "engine.arguments with --load-format auto lets it load the base"),
        (bool(met.shape.tied) and is_untied, "its output layer is apart from the embedding, and the model's files have "
         "one for both"),
        (urlsplit(met.link.url).hostname not in HERE, "it is on another machine, and adapters go through a folder"),
        (config.rollout.on_update == "keep", 'rollout.on_update = "keep" keeps samples under way'),
        (not server.stamps, "it is too old"),
    ]  # fmt: skip
    return next((sentence for holds, sentence in rules if holds), "")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of adapter_config.json, which all versions share."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    base: str

    def encode(self) -> str:
        modules = sorted({layer.rpartition(".")[2] for layer in self.layers})
        about = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": modules,
            "base_model_name_or_path": self.base,
        }
        return json.dumps(about)


class AdapterServer:
    """A `server` whose base weights never change: overrides its requests and the loading of weights."""

    stamps = False

    def __init__(
        self, server: Server, link: HttpClient, routes: AdapterRoutes, files: AdapterFiles, config: Config
    ) -> None:
        self._server, self._link, self._routes, self._files = server, link, routes, files
        self._call_timeout_s, self._load_timeout_s = config.engine.call_timeout_s, config.weights.timeout_s
        self._handover = WeightFiles()
        self._held = ExitStack()  # the files of the adapter in use
        self._label: str | None = None

    @property
    def pauses(self) -> bool:
        return self._server.pauses

    def ask(self, piece: RequestPiece) -> tuple[str, dict[str, Any]]:
        path, body = self._server.ask(piece)
        return path, body | {self._routes.field: self._label}

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Load the adapter under its label, then unload the last one. Nothing cached is shared between adapters.

        Raises ConfigError when the first one is refused, EngineLost later.
        """
        self._held.close()
        adapters = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items() if name != BASE_DIGEST}
        folder = self._held.enter_context(self._handover.holding(adapters, WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_text(self._files.encode(), encoding="utf-8")
        body = {"lora_name": label, "lora_path": str(folder)}
        try:
            self._call(self._routes.load, body, self._load_timeout_s)
            if self._label is not None:
                self._call(self._routes.unload, {"lora_name": self._label}, self._call_timeout_s)
        except ServerRejected as error:
            sentence = f"{self._link.url} must take adapter {label}: {error}"
            raise (ConfigError(sentence) if self._label is None else EngineLost(sentence)) from None
        self._label = label

    def _call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        answer = self._link.call("POST", path, body, timeout_s=timeout_s)
        if isinstance(answer, Mapping):  # vLLM answers with a text
            done(answer)

    def close(self) -> None:
        self._held.close()
        self._handover.close()
        self._server.close()

    # all other methods are those of the server

    def check_sampling(self, *, temperature: float, top_p: float, controls: SamplingControls) -> None:
        self._server.check_sampling(temperature=temperature, top_p=top_p, controls=controls)

    def read(self, event: Mapping[str, Any], n_known: int) -> PieceUpdate:
        return self._server.read(event, n_known)

    def abort(self, rid: str) -> None:
        self._server.abort(rid)

    def abort_all(self) -> None:
        self._server.abort_all()

    def pause(self, *, keep: bool) -> None:
        self._server.pause(keep=keep)

    def resume(self) -> None:
        self._server.resume()

    def ping(self) -> None:
        self._server.ping()

    def check(self) -> None:
        self._server.check()
