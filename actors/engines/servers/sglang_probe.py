"""Asks an SGLang server once for its routes, settings, model and one token, and checks whether it can serve a run."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.engines.servers.http_client import HttpClient, ServerRejected
from actors.engines.servers.model_spec import check_formats, check_names, refuse
from actors.engines.servers.protocol import has_field, number
from areal_bus.config.names.engines import NumberFormats
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineLost

ROOM = 8  # positions beyond the longest sample: SGLang ends a completion a few tokens before its limit
OLDEST = (0, 5, 10)  # older ones unpickle bytes from the network (CVE-2026-3059, CVE-2026-3060)
UPDATE, BEGIN, END = "/update_weights_from_distributed", "/begin_weight_update", "/end_weight_update"
PAUSE, RESUME, ABORT, JOIN = "/pause_generation", "/continue_generation", "/abort_request", "/init_weights_update_group"
CHECKER = "/weights_checker"
NEEDED = ("/generate", UPDATE, ABORT, JOIN)


@dataclass(frozen=True, slots=True)
class SGLangCapabilities:
    """The capabilities of a server."""

    version: str
    stamps: bool  # its replies have the spans of weight versions (0.5.20)
    pauses: bool  # it can retract, and pause in place
    sessions: bool  # weights are accepted between a begin and an end call only (0.5.22)
    is_incremental: bool  # an event of a stream has the new tokens only
    n_ranks: int  # of tensor parallelism
    salts: bool  # a request may keep its prefixes apart from those of other weights


def probe(
    link: HttpClient,
    *,
    architecture: str,
    names: Collection[str] | None,
    config: Config,
    longest: int,
) -> SGLangCapabilities:
    """Its capabilities; leaves it idle. `names`: to compare, of a server that others started; `longest`: tokens of a
    sample. Raises ConfigError if it cannot serve the run, EngineLost for no answer.
    """
    keep, timeout_s = config.rollout.on_update == "keep", config.engine.call_timeout_s
    try:
        routes = link.call("GET", "/openapi.json", timeout_s=timeout_s)
        paths, modes = set(routes["paths"]), pause_modes(routes)
        info = "/server_info" if "/server_info" in paths else "/get_server_info"
        settings = link.call("GET", info, timeout_s=timeout_s)
        model = link.call("GET", "/model_info", timeout_s=timeout_s) if "/model_info" in paths else {}
        salts = has_field(routes, "GenerateReqInput", "extra_key")
        stale = stale_settings(settings, salts=salts) if keep and "in_place" in modes else []
        check(link.url, paths, settings, model, architecture=architecture, stale=stale)
        check_room(link.url, settings, longest)
        free(link, paths, timeout_s=timeout_s)
        check_formats(link.url, formats(settings), config, is_own=names is None)
        if names is not None and CHECKER in paths:
            check_weights(link, names, timeout_s=timeout_s)
        abilities = SGLangCapabilities(
            version=str(settings["version"]),
            stamps=stamps_tokens(link, timeout_s=timeout_s),
            pauses={"retract", "in_place"} <= modes,
            sessions={BEGIN, END} <= paths,
            is_incremental=bool(settings.get("incremental_streaming_output") or settings.get("stream_output")),
            n_ranks=int(settings.get("tp_size") or 1),
            salts=salts,
        )
    except (ServerRejected, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"engine.urls must name SGLang servers: {link.url}: {error!r}") from None
    if keep and not (abilities.pauses and abilities.stamps):
        raise ConfigError(
            'rollout.on_update = "keep" needs an SGLang that pauses in place and stamps its tokens (0.5.20 or newer): '
            f'{link.url} is {abilities.version}; set rollout.on_update = "recompute"'
        )
    return abilities


def check(
    url: str,
    paths: set[str],
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    architecture: str,
    stale: list[str],
) -> None:
    """`stale`: missing settings with which "keep" is right. Raises ConfigError with advice."""
    missing = [path for path in NEEDED if path not in paths]
    version, served = str(settings["version"]), model.get("architectures") or []
    oldest = ".".join(map(str, OLDEST))
    rules = [
        (number(version) < OLDEST, f"SGLang {oldest} or newer is needed, for safety: {url} is {version}; upgrade it"),
        (bool(missing), f"SGLang needs routes that {url} ({version}) has not: {', '.join(missing)}; upgrade it"),
        (replicas(settings) > 1, f"a generator has one server without replicas or stages: {url} has "
         f"{replicas(settings)}; start it with --tp-size alone, one a generator"),
        (bool(served and architecture) and architecture not in served, f"the server must serve the model of this run, "
         f"a {architecture}: {url} serves {', '.join(served)}; start it with the folder of model.path"),
        (bool(stale), f'with rollout.on_update = "keep" no prefix of old weights may '
         f"be used again: start {url} with " + " and ".join(f"--{key.replace('_', '-')}" for key in stale)),
    ]  # fmt: skip
    refuse(rules)


def stale_settings(settings: Mapping[str, Any], *, salts: bool) -> list[str]:
    """Settings without which a kept sample would mix weights: prefixes of old ones, a step that is launched ahead."""
    needed = ("disable_overlap_schedule",) if salts else ("disable_radix_cache", "disable_overlap_schedule")
    return [key for key in needed if not settings.get(key)]


def check_room(url: str, settings: Mapping[str, Any], longest: int) -> None:
    """SGLang truncates longer samples silently. Raises ConfigError with the setting to change."""
    limits = [settings.get(name) for name in ("context_length", "max_total_num_tokens")]
    holds = min([int(limit) for limit in limits if limit], default=longest + ROOM)
    if holds < longest + ROOM:
        raise ConfigError(
            f"context too short: samples have up to {longest} tokens and SGLang needs {ROOM} more, and {url} holds "
            f"{holds}: start it with --context-length {longest + ROOM} (SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in "
            "its environment) and memory for as many"
        )


def check_weights(link: HttpClient, names: Collection[str], *, timeout_s: float) -> None:
    """Compare the names of its weights with the model's, where it lists them. Raises ConfigError with advice."""
    with suppress(ServerRejected):
        for rank in link.call("POST", CHECKER, {"action": "checksum"}, timeout_s=timeout_s).get("ranks") or []:
            check_names(link.url, rank["checksums"], names)


def formats(settings: Mapping[str, Any]) -> NumberFormats:
    return NumberFormats.of(
        dtype=settings.get("dtype"),
        weights=settings.get("quantization"),
        torchao=settings.get("torchao_config"),
        cache=settings.get("kv_cache_dtype"),
        loader=settings.get("load_format"),
    )


def replicas(settings: Mapping[str, Any]) -> int:
    """Number of data-parallel replicas and pipeline stages: pushes reach the tensor-parallel ranks only."""
    return max(int(settings.get(key) or 1) for key in ("dp_size", "pp_size"))


def pause_modes(routes: Mapping[str, Any]) -> set[str]:
    if not {PAUSE, RESUME} <= set(routes["paths"]):
        return set()
    schemas = routes.get("components", {}).get("schemas", {})
    return set(schemas.get("PauseGenerationReqInput", {}).get("properties", {}).get("mode", {}).get("enum", []))


def free(link: HttpClient, paths: set[str], *, timeout_s: float) -> None:
    """End what a killed generator may have left, in this order: a started update, a pause, requests."""
    body: dict[str, Any]
    for path, body in [(END, {}), (RESUME, {}), (ABORT, {"rid": "", "abort_all": True})]:
        if path in paths:
            with suppress(ServerRejected):  # nothing was left
                link.call("POST", path, body, timeout_s=timeout_s)


def stamps_tokens(link: HttpClient, *, timeout_s: float) -> bool:
    """Whether a reply has the weight versions of its tokens. Raises ConfigError if it lacks other fields."""
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    body = {"input_ids": [0], "return_logprob": True, "sampling_params": sampling}
    try:
        about = link.call("POST", "/generate", body, timeout_s=timeout_s)["meta_info"]
    except ServerRejected as error:
        raise EngineLost(f"{link.url} refused to sample a token: {error}") from None
    return "weight_versions" in about
