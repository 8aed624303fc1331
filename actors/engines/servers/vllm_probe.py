"""Asks a vLLM server once for its routes, settings and weight names, and checks whether it can serve a run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from actors.engines.servers.http_client import HttpClient, ServerRejected
from actors.engines.servers.model_spec import check_formats, check_names, refuse
from actors.engines.servers.protocol import has_field, number
from areal_bus.config.names.engines import NumberFormats
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

OLDEST = (0, 32)  # the oldest release that was tried
GENERATE, RPC, LABEL, CHECKER = "/inference/v1/generate", "/collective_rpc", "/update_weight_version", "/weight_checker"
PAUSE, RESUME, ABORT, CACHE = "/pause", "/resume", "/abort_requests", "/reset_prefix_cache"
RL = (RPC, LABEL, CHECKER, PAUSE, RESUME, ABORT, CACHE)
HERE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class VLLMCapabilities:
    """The settings of a server that matter to a run."""

    logprobs_mode: str
    is_untied: bool  # it holds separate weights where the model ties them
    salts: bool  # a request may keep its prefixes apart from those of other weights


def probe(
    link: HttpClient,
    *,
    names: Collection[str] | None,
    config: Config,
    is_tied: bool,
    longest: int,
) -> VLLMCapabilities:
    """Its settings; leaves it idle. `names`: to compare, of a server that others started; `longest`: tokens of a
    sample. Raises ConfigError if it cannot serve the run, EngineLost for no answer.
    """
    host = urlsplit(link.url).hostname
    if host not in HERE:
        raise ConfigError(
            f"vLLM takes its weights from a folder: its server is on this machine, not {host} (engine.urls)"
        )
    keep, timeout_s = config.rollout.on_update == "keep", config.engine.call_timeout_s
    try:
        version = str(link.call("GET", "/version", timeout_s=timeout_s)["version"])
        routes = link.call("GET", "/openapi.json", timeout_s=timeout_s)
        check_routes(link.url, set(routes["paths"]), version)
        salts = has_field(routes, "GenerateRequest", "cache_salt")
        settings = link.call("GET", "/server_info?config_format=json", timeout_s=timeout_s)["vllm_config"]
        check_settings(link.url, settings, is_tied=is_tied, keeps_prefixes=keep and not salts, longest=longest)
        check_formats(link.url, formats(settings), config, is_own=names is None)
        free(link, timeout_s=timeout_s)
        if names is not None:
            served = link.call("POST", CHECKER, {"action": "checksum"}, timeout_s=timeout_s)["checksums"]
            check_names(link.url, served, names)
        read_from_folders(link, timeout_s=timeout_s)
        return VLLMCapabilities(str(settings["model_config"]["logprobs_mode"]), is_untied(settings), salts)
    except (ServerRejected, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"engine.urls must name vLLM servers: {link.url}: {error!r}") from None


def check_routes(url: str, paths: set[str], version: str) -> None:
    """Raises ConfigError with advice."""
    missing, oldest = [path for path in RL if path not in paths], ".".join(map(str, OLDEST))
    rules = [
        (number(version) < OLDEST, f"vLLM {oldest} or newer is needed: {url} is {version}; upgrade it"),
        (bool(missing), f"vLLM needs routes that {url} ({version}) has not: {', '.join(missing)}; start it with "
         "VLLM_SERVER_DEV_MODE=1 in its environment"),
        (GENERATE not in paths, f"vLLM needs {GENERATE}, which {url} ({version}) has not: start it with "
         "--enable-scale-out"),
    ]  # fmt: skip
    refuse(rules)


def check_settings(url: str, settings: Mapping[str, Any], *, is_tied: bool, keeps_prefixes: bool, longest: int) -> None:
    """`keeps_prefixes`: those of old weights would be found. Raises ConfigError with advice."""
    parallel, mode = settings["parallel_config"], settings["model_config"]["logprobs_mode"]
    replicas = max(int(parallel.get(f"{kind}_parallel_size") or 1) for kind in ("data", "pipeline"))
    holds = int(settings["model_config"].get("max_model_len") or longest)
    on_cpu = "cpu" in str(parallel["worker_cls"]).lower()
    rules = [
        (replicas > 1, f"a generator has one server without replicas or stages: {url} has {replicas}; start it with "
         "--tensor-parallel-size alone, one a generator"),
        (mode not in ("raw_logprobs", "processed_logprobs"), f"vLLM must give log-probs: {url} gives {mode}; start it "
         "with --logprobs-mode processed_logprobs"),
        (holds < longest, f"a sample of this run has up to {longest} tokens, and {url} holds {holds}: start it with "
         f"--max-model-len {longest}"),
        (keeps_prefixes and bool(settings["cache_config"].get("enable_prefix_caching")), 'with rollout.on_update = '
         f'"keep" no prefix of old weights may be used again, and {url} takes no cache_salt: start it with '
         "--no-enable-prefix-caching"),
        (on_cpu and is_tied and not is_untied(settings), f"on CPU vLLM never reloads a tied output layer: start {url} "
         """with --hf-overrides '{"tie_word_embeddings": false}'"""),
    ]  # fmt: skip
    refuse(rules)


def formats(settings: Mapping[str, Any]) -> NumberFormats:
    model, cache = settings["model_config"], settings["cache_config"]
    return NumberFormats.of(dtype=model.get("dtype"), weights=model.get("quantization"), cache=cache.get("cache_dtype"))


def is_untied(settings: Mapping[str, Any]) -> bool:
    overrides = settings["model_config"].get("hf_overrides") or {}
    return isinstance(overrides, Mapping) and overrides.get("tie_word_embeddings") is False


def free(link: HttpClient, *, timeout_s: float) -> None:
    """End what a killed generator may have left: requests, a pause."""
    for path in (ABORT, RESUME):
        link.call("POST", path, {}, timeout_s=timeout_s)


def read_from_folders(link: HttpClient, *, timeout_s: float) -> None:
    """The server was started with dummy weights; make it read safetensors from now on."""
    overrides = {"load_config": {"load_format": "safetensors"}}
    link.call("POST", RPC, {"method": "update_config", "kwargs": {"overrides": overrides}}, timeout_s=timeout_s)
