"""From settings to a server and the engine over it: starts the server, or attaches to one that runs.

With LoRA each version is loaded under its label, requests name it, and all of them end before an update.
"""

import json
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
from loguru import logger

from actors.engines.adapter_engine import with_adapters
from actors.engines.protocol import Engine
from actors.engines.servers.engine import ServerEngine
from actors.engines.servers.http_client import HttpClient, ServerRejected, done
from actors.engines.servers.model_spec import ModelSpec, shape_of
from actors.engines.servers.protocol import (
    LOOPBACK,
    AdapterRoutes,
    RequestPiece,
    Server,
    ServerContext,
    ServerSpec,
    number,
)
from actors.engines.servers.server_process import ServerProcess, free_port, installed, interpreter
from actors.engines.servers.sglang import SGLANG
from actors.engines.servers.vllm import VLLM_SERVER
from actors.engines.servers.vllm_probe import HERE
from actors.engines.servers.weight_transfer import SERVER_BYTES, WeightFiles, check_shared_memory
from actors.models.loading import empty_model, load_base, stop_ids
from actors.models.lora import BASE_DIGEST, adapted_layers, adapter_tensors
from actors.models.model_config import CONFIG_FILE, PREFIX, WEIGHTS_FILE, base_of
from actors.runtime.context import Context
from areal_bus.config.learner import LoraConfig
from areal_bus.config.names.engines import NumberFormats, kind_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineLost


def why_merged(met: ServerContext, routes: AdapterRoutes, server: Server) -> str:
    """Why the server is sent merged weights instead of adapters; "" if it takes adapters. Asks the server."""
    config, timeout_s = met.config, met.config.engine.call_timeout_s
    lora = config.actor.lora or LoraConfig()
    rank, loader = max(rank for rank, _ in lora.forms), NumberFormats.of_arguments(config.engine.arguments).loader
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
        (met.process is not None and loader in ("", "dummy"), "it was started without weights; "
         "engine.arguments with --load-format auto lets it load the base"),
        (bool(met.shape.tied) and is_untied, "its output layer is apart from the embedding, and the model's files have "
         "one for both"),
        (urlsplit(met.link.url).hostname not in HERE, "it is on another machine, and adapters go through a folder"),
        ("dora" in lora.variant, "it takes no DoRA"),
        (len(lora.forms) > 1, "it takes one rank and alpha for all layers"),
        (config.rollout.on_update == "keep", 'rollout.on_update = "keep" keeps samples under way'),
        (not server.stamps, "it is too old"),
    ]  # fmt: skip
    return next((sentence for holds, sentence in rules if holds), "")


def adapter_config(lora: LoraConfig, layers: Collection[str], base: str) -> str:
    """The contents of adapter_config.json, which all versions share. `base`: the folder of the model.

    alpha / r is the scale: not every server has another rule for rsLoRA.
    """
    ((rank, _),) = lora.forms
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": lora.scale(next(iter(layers))) * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "base_model_name_or_path": base,
    }
    return json.dumps(about)


class AdapterServer:
    """A `server` whose base weights never change: overrides its requests and the loading of weights."""

    stamps = False

    def __init__(self, server: Server, link: HttpClient, routes: AdapterRoutes, about: str, config: Config) -> None:
        self._server, self._link, self._routes, self._about = server, link, routes, about
        self._call_timeout_s, self._load_timeout_s = config.engine.call_timeout_s, config.weights.timeout_s
        self._handover = WeightFiles()
        self._held = ExitStack()  # the files of the adapter in use
        self._label: str | None = None

    def ask(self, piece: RequestPiece) -> tuple[str, dict[str, Any]]:
        path, body = self._server.ask(piece)
        return path, body | {self._routes.field: self._label}

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Load the adapter, then unload the last one. Raises ConfigError for a refused first one, else EngineLost."""
        self._held.close()
        adapters = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items() if name != BASE_DIGEST}
        folder = self._held.enter_context(self._handover.holding(adapters, WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_text(self._about, encoding="utf-8")
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

    def __getattr__(self, name: str) -> Any:
        """All else is the server's."""
        return getattr(self._server, name)


POLL_S = 0.2
PROBE_S = 10.0  # for one answer of a server that starts
PORTS = 5  # that are tried in one start
KINDS = {"sglang": SGLANG, "vllm": VLLM_SERVER}  # by rollout.engine


def open_engine(context: Context, config: Config, tokenizer: Any) -> Engine:
    """The engine, its server ready for weights. Raises ConfigError at the job's start, EngineLost later."""
    model = empty_model(context.model_folder, config.model.dtype, "meta")
    try:
        engine, why = _open(context, config, model, tokenizer)
    except (ConfigError, EngineLost) as error:
        if context.incarnation:
            raise EngineLost(str(error)) from error
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rollout.engine = {config.rollout.engine!r}: {error}") from error
    if not why:
        return engine
    logger.info("{}: the server gets whole weights with the adapters merged: {}", context.name, why)
    base = load_base(config, context.model_folder, "cpu")
    return with_adapters(engine, base, config, base_on=torch.device("cpu"), is_live=False)


def _open(context: Context, config: Config, model: Any, tokenizer: Any) -> tuple[ServerEngine, str]:
    """The engine; with actor.lora also why its server takes merged weights, "" if it takes adapters."""
    shape, stops = shape_of(model), stop_ids(model, tokenizer)
    architecture = (getattr(model.config, "architectures", None) or [""])[0]
    kind = KINDS[config.rollout.engine]
    is_own, copies_weights = not config.engine.urls, kind_of(config.rollout.engine).copies_weights
    check_shared_memory(shape.n_bytes if copies_weights else 0, SERVER_BYTES if is_own else 0)
    process, link = _reach(kind, context, config, shape)
    address, interface = LOOPBACK if process is not None else (context.address, context.interface)
    name = f"{context.name}-{uuid.uuid4().hex[:12]}"
    try:
        is_known = context.incarnation > 0
        met = ServerContext(link, process, config, shape, architecture, stops, name, address, interface, is_known)
        server = kind.meet(met)
        lora, why = config.actor.lora, ""
        if lora is not None and not (why := why_merged(met, kind.adapters, server)):
            layers = {
                layer: module.weight.shape for layer, module in adapted_layers(model, lora.target_modules).items()
            }
            about = adapter_config(lora, layers, base_of(context.model_folder))
            server = cast(Server, AdapterServer(server, link, kind.adapters, about, config))
            shape = replace(shape, parameters=adapter_tensors(layers, lora))
    except BaseException:
        link.close()
        if process is not None:
            process.close()
        raise
    return ServerEngine(server, met, shape=shape, tokenizer=tokenizer), why


def _reach(
    kind: ServerSpec, context: Context, config: Config, shape: ModelSpec
) -> tuple[ServerProcess | None, HttpClient]:
    """A server that answers, and its process if started here; one that finds its port taken starts again on another."""
    timeout_s, n_left = config.engine.start_timeout_s, PORTS
    while True:
        n_left -= 1
        process, url = _process(kind, context, config, shape)
        link = HttpClient(url)
        try:
            wait_ready(link, kind.ready, process, timeout_s=timeout_s, name=context.name)
            return process, link
        except BaseException as error:
            link.close()
            is_taken = process is not None and process.lost_its_port()
            if process is not None:
                process.close()
            if not (isinstance(error, EngineLost) and is_taken and n_left):
                raise
            logger.warning("{}: another program took the port of {}: starting the server again", context.name, url)


def _process(kind: ServerSpec, context: Context, config: Config, shape: ModelSpec) -> tuple[ServerProcess | None, str]:
    """The server process, if this process starts it, and the URL."""
    urls = config.engine.urls
    if urls and context.index >= len(urls):
        raise ConfigError(
            f"engine.urls has a server for each generator: {len(urls)} for generator {context.index}; add one"
        )
    if urls:
        return None, urls[context.index]
    python = interpreter(config.engine.python, Path(context.config_folder))
    packages = kind_of(config.rollout.engine).packages
    version = installed(python, *packages)
    if number(version) < kind.oldest:
        oldest = ".".join(map(str, kind.oldest))
        raise ConfigError(f"{packages[0]} {oldest} or newer is needed: {python} has {version}; upgrade it")
    port = free_port()
    command = [python, *kind.command(context, config, most_tokens=shape.most_tokens, port=port)]
    log = context.folder / "logs" / f"{context.name}.server.txt"
    return ServerProcess(command, log, kind.environment(context, config), port=port), f"http://127.0.0.1:{port}"


def wait_ready(
    link: HttpClient, path: str, process: ServerProcess | None, *, timeout_s: float, name: str = "generator"
) -> None:
    """Wait until the server answers. Raises EngineLost if it ends or does not answer within `timeout_s`."""
    deadline, has_said = time.monotonic() + timeout_s, False
    while (why := _why_not(link, path, process)) and time.monotonic() < deadline:
        if process is not None:
            process.check()
        elif not has_said:
            logger.warning("{}: {}; waiting for it up to {:g} s (engine.start_timeout_s)", name, why, timeout_s)
            has_said = True
        time.sleep(POLL_S)
    if why and process is None:
        raise EngineLost(f"server not ready within engine.start_timeout_s ({timeout_s:g}): {why}; start it, or correct "
                         "engine.urls")  # fmt: skip
    if why:
        raise EngineLost(f"server not ready within engine.start_timeout_s ({timeout_s:g}): {why}")
    if process is not None:
        process.is_ready()


def _why_not(link: HttpClient, path: str, process: ServerProcess | None) -> str:
    """Why the server cannot serve yet; "" if it can."""
    try:
        link.call("GET", path, timeout_s=PROBE_S)
    except ServerRejected as error:
        if error.status != 404:  # an older one, which the probe looks at
            return str(error)
    except EngineLost as error:
        return str(error)
    return "" if process is None or process.listens() else f"another program answers at {link.url}"
