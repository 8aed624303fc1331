"""vLLM: its command line, its HTTP routes, and how its server is started or attached."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.protocol import PLAIN, SamplingControls
from actors.engines.servers import protocol, vllm_probe
from actors.engines.servers.http_client import ServerRejected, done, perform, ping, weights_rejected
from actors.engines.servers.server_process import core_set
from actors.engines.servers.weight_transfer import WeightFiles
from actors.models.model_config import base_of
from actors.runtime.context import Context
from areal_bus.config.rollout import changes_sampling
from areal_bus.config.sections import Config
from areal_bus.config.stages import samplings_of
from areal_bus.errors import ConfigError, EngineLost, SettingRefused
from areal_bus.messages import Finish

PREFIX = "generate-tokens-"  # the server puts this before request ids
NO_LOG_PROB = -9999.0  # vLLM sends this instead of NaN
COLDEST = 0.01  # vLLM raises temperatures between 0 and this one to this one


class VLLM:
    """One vLLM server, started here or attached. It runs on this machine: its weights come through a folder."""

    stamps = True
    pauses = True

    def __init__(
        self,
        met: protocol.ServerContext,
        abilities: vllm_probe.VLLMCapabilities,
        handover: WeightFiles,
    ) -> None:
        self._link, self._abilities, self._handover, self._process = met.link, abilities, handover, met.process
        # name of a weight that pushes leave out -> name of the equal one that they send
        self._tied = dict(met.shape.tied) if abilities.is_untied else {}
        self._call_timeout_s, self._load_timeout_s = met.config.engine.call_timeout_s, met.config.weights.timeout_s
        self._is_known = met.is_known

    def check_sampling(self, *, temperature: float, top_p: float, controls: SamplingControls) -> None:
        mode = self._abilities.logprobs_mode
        if broken := sampling_rule(mode, temperature=temperature, top_p=top_p, controls=controls):
            raise SettingRefused(broken)

    def ask(self, piece: protocol.RequestPiece) -> tuple[str, dict[str, Any]]:
        salt = {"cache_salt": piece.salt} if self._abilities.salts else {}
        return vllm_probe.GENERATE, request_body(piece) | salt

    def read(self, event: Mapping[str, Any], n_known: int) -> protocol.PieceUpdate:
        try:
            return read_event(event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._link.url} must answer as vLLM does: {error!r} in {str(event)[:300]}") from None

    def abort(self, rid: str) -> None:
        self._link.begin("POST", vllm_probe.ABORT, {"request_ids": [PREFIX + rid]}, timeout_s=self._call_timeout_s)

    def abort_all(self) -> None:
        self._call(vllm_probe.ABORT, {})

    def pause(self, *, keep: bool) -> None:
        """Running requests stay queued. Without `keep` their KV caches and all cached prefixes are dropped."""
        self._call(f"{vllm_probe.PAUSE}?mode=keep&clear_cache={'false' if keep else 'true'}", {})

    def resume(self) -> None:
        self._call(vllm_probe.RESUME, {})

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Load weights from a folder in memory, which holds them during the call only."""
        deadline = time.monotonic() + self._load_timeout_s
        whole = dict(tensors) | {name: tensors[same].clone() for name, same in self._tied.items()}
        with self._handover.holding(whole) as folder:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            left_s = max(deadline - time.monotonic(), 0.1)
            try:
                done(self._link.call("POST", vllm_probe.RPC, body, timeout_s=left_s))
            except ServerRejected as error:
                raise weights_rejected(self._link, label, error, is_known=self._is_known) from None
        if flush:
            self._call(vllm_probe.CACHE, {})
        self._call(vllm_probe.LABEL, {"new_version": label})
        self._is_known = True

    def ping(self) -> None:
        ping(self._link, "/health", timeout_s=self._call_timeout_s)

    def check(self) -> None:
        if self._process is not None:
            self._process.check()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._handover.close()

    def _call(self, path: str, body: Mapping[str, Any]) -> None:
        perform(self._link, path, body, timeout_s=self._call_timeout_s)


def sampling_rule(logprobs_mode: str, *, temperature: float, top_p: float, controls: SamplingControls = PLAIN) -> str:
    """The reason why vLLM gives no log-probs of the model's full distribution for such a request; "" if it does.

    Its processed log-probs are at the temperature, after penalties, top_k, top_p and min_p. Its raw log-probs are of
    the model's logits at temperature 1.
    """
    if logprobs_mode == "raw_logprobs" and temperature not in (0.0, 1.0):
        return (
            f"vLLM's raw log-probs are those at temperature 1, and {temperature:g} was asked for: set temperatures to "
            "1, or use no setting that changes what is drawn (gconfig.top_p, top_k, min_p, penalties, logit_bias, "
            "min_new_tokens)"
        )
    if logprobs_mode != "raw_logprobs" and top_p < 1 and temperature > 0:
        return f"vLLM's processed log-probs are of the nucleus: top_p {top_p:g} was asked for, not 1; set gconfig.top_p"
    if logprobs_mode != "raw_logprobs" and (controls.changes_logits or (controls.changes_sampling and temperature > 0)):
        return (
            "vLLM's processed log-probs are of what penalties, logit_bias, min_new_tokens, top_k and min_p leave: set "
            "them in gconfig, so that the server gives raw ones, and all temperatures to 1 or 0"
        )
    if 0 < temperature < COLDEST:
        return f"vLLM's temperatures are 0, or {COLDEST:g} and more: {temperature:g} was asked for"
    return ""


def request_body(piece: protocol.RequestPiece) -> dict[str, Any]:
    """The body of a request. It sets every field that the model's generation config could change."""
    controls = piece.controls
    bias = {"logit_bias": {str(token): bias for token, bias in controls.logit_bias}} if controls.logit_bias else {}
    return {
        "request_id": piece.rid,
        "token_ids": piece.ids,
        "stream": True,
        "sampling_params": {
            "max_tokens": piece.max_new_tokens,
            "temperature": piece.temperature,
            "top_p": piece.top_p,
            "top_k": controls.top_k,
            "min_p": controls.min_p,
            "min_tokens": controls.min_new_tokens,
            "frequency_penalty": controls.frequency_penalty,
            "presence_penalty": controls.presence_penalty,
            "repetition_penalty": controls.repetition_penalty,
            **bias,
            "stop_token_ids": list(piece.stops),
            "ignore_eos": True,  # the list above contains the model's own stop tokens
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
        },
    }


def read_event(event: Mapping[str, Any]) -> protocol.PieceUpdate:
    """Raises KeyError, TypeError or the like for an invalid event."""
    if "error" in event:
        return protocol.PieceUpdate(finish=Finish.ABORT, error=str(event["error"]))
    (choice,) = event["choices"]
    ids = [int(token) for token in choice["token_ids"] or []]
    told = (choice["logprobs"] or {}).get("content") or []
    logps = [float(token["logprob"]) for token in told]
    if [int(token["token_id"]) for token in told] != ids:
        raise ValueError("tokens and log-probs differ")
    if any(logp <= NO_LOG_PROB for logp in logps):
        raise ValueError("a log-prob is not a number")
    finish = choice["finish_reason"]
    spans = choice["weight_versions"] if finish else None
    return protocol.PieceUpdate(
        ids=ids,
        logps=logps,
        finish=None if finish is None else str(Finish(finish)),
        labels=None if spans is None else [(str(x["version"]), int(x["end"]) - int(x["start"])) for x in spans],
    )


CORES = "VLLM_CPU_OMP_THREADS_BIND"  # "0,1|2,3": cores of each rank; "nobind": its threads are not pinned
STREAM = 16  # tokens in an event; tokens that are not sent yet are lost when a generator dies
CPU_CACHE_BYTES = 1 << 30  # of the KV cache; engine.arguments may override it


def command(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """The command line after the interpreter. The user's arguments come last and take precedence."""
    words: Sequence[object] = [
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", base_of(context.model_folder),
        "--host", "127.0.0.1",
        "--port", port,
        "--load-format", "dummy",  # all weights arrive by pushes
        "--dtype", config.model.dtype,
        "--tensor-parallel-size", config.topology.tensor_parallel,
        "--max-model-len", most_tokens,
        "--max-num-seqs", config.rollout.max_concurrent_rollouts,
        "--seed", protocol.seed(config.run.seed, context),
        "--skip-tokenizer-init",
        "--generation-config", "vllm",  # ignore the model's generation config
        "--enable-scale-out",  # tokens in, tokens out
        "--logprobs-mode", "raw_logprobs" if needs_raw(config) else "processed_logprobs",
        "--stream-interval", STREAM,
        "--disable-log-stats",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if context.device == "cpu":
        words = [
            *words,
            "--enforce-eager",
            "--kv-cache-memory-bytes", CPU_CACHE_BYTES,
            "--hf-overrides", json.dumps({"tie_word_embeddings": False}),  # a tied output layer is never reloaded
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def needs_raw(config: Config) -> bool:
    """Whether processed log-probs would differ from those of the model."""
    return any(map(changes_sampling, samplings_of(config)))


def environment(context: Context, config: Config) -> dict[str, str]:
    return {
        **cores(context, config),
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for new weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # those for adapters, with --enable-lora
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": protocol.LOOPBACK[0],
        "GLOO_SOCKET_IFNAME": protocol.LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": protocol.LOOPBACK[1],
    }


def cores(context: Context, config: Config) -> dict[str, str]:
    """On CPU, the cores of this server. By itself each would pin its threads to the same ones."""
    if (
        context.device != "cpu"
        or CORES in os.environ
        or context.interface != protocol.LOOPBACK[1]
        or context.n_generators < 2
    ):
        return {}
    own = core_set(context.index % context.n_generators, context.n_generators, ranks=config.topology.tensor_parallel)
    return {CORES: own or "nobind"}


def meet(met: protocol.ServerContext) -> protocol.Server:
    """The server, ready for weights. Raises ConfigError if it cannot serve the run, and EngineLost."""
    config = met.config
    names = met.shape.parameters if met.process is None else None
    abilities = vllm_probe.probe(
        met.link,
        names=names,
        config=config,
        is_tied=bool(met.shape.tied),
        longest=met.longest,
    )
    for one in samplings_of(config):
        controls = SamplingControls(**one.controls())
        if broken := sampling_rule(
            abilities.logprobs_mode, temperature=one.temperature, top_p=one.top_p, controls=controls
        ):
            raise ConfigError(f'rollout.engine = "vllm": {broken}')
    return VLLM(met, abilities, WeightFiles())


def largest_rank(settings: Mapping[str, Any]) -> int:
    """The largest adapter rank that it accepts; 0 if none."""
    return int((settings["vllm_config"].get("lora_config") or {}).get("max_lora_rank") or 0)


def has_own_head(settings: Mapping[str, Any]) -> bool:
    """Whether it was started with tie_word_embeddings = false: a base that it loads has no such head then."""
    return vllm_probe.is_untied(settings["vllm_config"])


VLLM_SERVER = protocol.ServerSpec(
    oldest=vllm_probe.OLDEST,
    ready="/health",
    command=command,
    environment=environment,
    meet=meet,
    adapters=protocol.AdapterRoutes(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "model",
        "/server_info?config_format=json",
        largest_rank,
        has_own_head,
    ),
)
