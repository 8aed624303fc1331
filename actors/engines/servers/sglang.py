"""SGLang: its command line, its HTTP routes, and how its server is started or attached."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.protocol import SamplingControls
from actors.engines.servers import protocol, sglang_probe
from actors.engines.servers.http_client import ServerRejected, done, perform, ping, weights_rejected
from actors.engines.servers.weight_transfer import WeightBroadcast
from actors.models.model_config import base_of
from actors.runtime.context import Context
from areal_bus.config.capacity import BUCKET_BYTES
from areal_bus.config.sections import Config
from areal_bus.errors import EngineLost, SettingRefused
from areal_bus.messages import Finish

CHANGED_LOGITS = (
    "SGLang's log-probs are of logits after penalties, logit_bias and min_new_tokens, and training needs those of the "
    'model: leave these settings out, or set rollout.engine to "builtin" or "vllm"'
)
NAN = "NaN happened"  # SGLang's message when it replaced a token, because its logits were NaN


class SGLang:
    """One SGLang server, started here or attached."""

    def __init__(
        self,
        met: protocol.ServerContext,
        relay: WeightBroadcast,
        abilities: sglang_probe.SGLangCapabilities,
    ) -> None:
        """Joins the server to a new process group named `met.name`. Raises EngineLost if it does not join."""
        self._link, self._relay, self._abilities, self._process = met.link, relay, abilities, met.process
        self._group = met.name
        self._call_timeout_s, self._load_timeout_s = met.config.engine.call_timeout_s, met.config.weights.timeout_s
        self._label: str | None = None  # of the weights that this process sent
        self._is_known = met.is_known
        self._join()

    @property
    def stamps(self) -> bool:
        return self._abilities.stamps

    @property
    def pauses(self) -> bool:
        return self._abilities.pauses

    def check_sampling(self, *, temperature: float, top_p: float, controls: SamplingControls) -> None:
        if controls.changes_logits:
            raise SettingRefused(CHANGED_LOGITS)

    def ask(self, piece: protocol.RequestPiece) -> tuple[str, dict[str, Any]]:
        return "/generate", request_body(piece) | ({"extra_key": piece.salt} if self._abilities.salts else {})

    def read(self, event: Mapping[str, Any], n_known: int) -> protocol.PieceUpdate:
        try:
            self._check_label(event.get("meta_info") or {})
            return read_event(event, n_known, is_incremental=self._abilities.is_incremental)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._link.url} must answer as SGLang does: {error!r} in {str(event)[:300]}") from None

    def _check_label(self, about: Mapping[str, Any]) -> None:
        """Check the server's weight version. Without versions by token, no piece runs across an update."""
        served = about.get("weight_version", self._label)
        if not self._abilities.stamps and served != self._label:
            raise EngineLost(
                f"weights mismatch: {self._link.url} samples with {served!r}, this generator sent {self._label!r}; "
                "the server was restarted, or another client updates it"
            )

    def abort(self, rid: str) -> None:
        self._link.begin("POST", sglang_probe.ABORT, {"rid": rid}, timeout_s=self._call_timeout_s)

    def abort_all(self) -> None:
        body = {"rid": "", "abort_all": True}
        perform(self._link, sglang_probe.ABORT, body, timeout_s=self._call_timeout_s, reports_success=False)

    def pause(self, *, keep: bool) -> None:
        body = {"mode": "in_place" if keep else "retract"}
        perform(self._link, sglang_probe.PAUSE, body, timeout_s=self._call_timeout_s)

    def resume(self) -> None:
        perform(self._link, sglang_probe.RESUME, {}, timeout_s=self._call_timeout_s)

    def load(self, label: str, tensors: Mapping[str, Any], *, flush: bool) -> None:
        """Send weights in parts of at most `bucket_bytes`, one broadcast a tensor. The last part carries the label."""
        deadline = time.monotonic() + self._load_timeout_s
        try:
            if self._abilities.sessions:
                done(self._link.call("POST", sglang_probe.BEGIN, {}, timeout_s=self._call_timeout_s))
            parts = split(tensors, BUCKET_BYTES)
            for index, names in enumerate(parts):
                is_last = index == len(parts) - 1
                part = {name: tensors[name] for name in names}
                body = update_body(part, self._group, label if is_last else None, flush=flush and is_last)
                left_s = max(deadline - time.monotonic(), 0.1)
                call = self._link.begin("POST", sglang_probe.UPDATE, body, timeout_s=left_s)
                self._relay.send(list(part.values()), call, timeout_s=left_s)
                done(call.result())
            if self._abilities.sessions:
                done(self._link.call("POST", sglang_probe.END, {}, timeout_s=self._call_timeout_s))
        except ServerRejected as error:
            raise weights_rejected(self._link, label, error, is_known=self._is_known) from None
        self._label, self._is_known = label, True

    def ping(self) -> None:
        ping(self._link, "/model_info", timeout_s=self._call_timeout_s)

    def check(self) -> None:
        if self._process is not None:
            self._process.check()

    def close(self) -> None:
        self._relay.close()
        if self._process is not None:
            self._process.close()

    def _join(self) -> None:
        size = 1 + self._abilities.n_ranks
        body = {
            "master_address": self._relay.host,
            "master_port": self._relay.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self._group,
            "backend": "gloo",
        }
        call = self._link.begin("POST", sglang_probe.JOIN, body, timeout_s=self._call_timeout_s)
        try:
            self._relay.meet(self._group, size, call, timeout_s=self._call_timeout_s)
        except ServerRejected as error:
            raise EngineLost(f"{self._link.url} must join the group that brings its weights: {error}") from None


def request_body(piece: protocol.RequestPiece) -> dict[str, Any]:
    """The body of a request: sets every field that the model's generation config could change."""
    return {
        "rid": piece.rid,
        "input_ids": piece.ids,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": piece.max_new_tokens,
            "temperature": piece.temperature,
            "top_p": piece.top_p,
            "top_k": piece.controls.top_k or -1,
            "min_p": piece.controls.min_p,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(piece.stops),
            **({"ignore_eos": True} if piece.controls.ignore_eos else {}),  # the model's own
        },
    }


def read_event(event: Mapping[str, Any], n_known: int, *, is_incremental: bool) -> protocol.PieceUpdate:
    """`n_known`: known tokens; without `is_incremental` the event begins with them. Raises KeyError, TypeError, ..."""
    if "error" in event:
        return protocol.PieceUpdate(finish=Finish.ABORT, error=str(event["error"]))
    about, n_before = event["meta_info"], 0 if is_incremental else n_known
    finish = about.get("finish_reason")
    ids = [int(token) for token in event["output_ids"][n_before:]]
    pairs = (about.get("output_token_logprobs") or [])[n_before:]
    if is_incremental and finish and finish["type"] == "abort" and "completion_tokens" in about:
        ids, pairs = _new_of_ended(ids, pairs, int(about["completion_tokens"]) - n_known)
    if [int(pair[1]) for pair in pairs] != ids:
        raise ValueError("tokens and log-probs differ")
    if finish and finish.get("matched") == NAN:
        raise ValueError("its last token is not the one that was sampled")
    spans = about.get("weight_versions") if finish else None
    return protocol.PieceUpdate(
        ids=ids,
        logps=[float(pair[0]) for pair in pairs],
        finish=None if finish is None else str(Finish(finish["type"])),
        labels=None if spans is None else [(str(x["version"]), int(x["end"]) - int(x["start"])) for x in spans],
        error=str(finish.get("message") or "") if finish else "",
    )


def _new_of_ended(ids: list[int], pairs: Sequence[Any], n_new: int) -> tuple[list[int], Sequence[Any]]:
    """New tokens of a piece that was aborted while queued: 0.5.23 repeats its last token, and all log-probs."""
    if n_new == len(ids) == len(pairs):
        return ids, pairs
    if not 0 <= n_new <= len(pairs):
        raise ValueError(f"{n_new} tokens are new, and {len(pairs)} have log-probs")
    new = pairs[len(pairs) - n_new :]
    return [int(pair[1]) for pair in new], new


def update_body(part: Mapping[str, Any], group: str, label: str | None, *, flush: bool) -> dict[str, Any]:
    body = {
        "names": list(part),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
        "shapes": [list(tensor.shape) for tensor in part.values()],
        "group_name": group,
        "flush_cache": flush,
        "abort_all_requests": False,
    }
    return body if label is None else body | {"weight_version": label}


def split(tensors: Mapping[str, Any], n_bytes: int) -> list[list[str]]:
    """Split names into parts of at most `n_bytes`, in order; a larger tensor is a part by itself."""
    parts: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not parts or tensor.nbytes > room:
            parts.append([])
            room = n_bytes
        parts[-1].append(name)
        room -= tensor.nbytes
    return parts


STREAM = 16  # tokens in an event; tokens that are not sent yet are lost when a generator dies
SPARE = 2  # times the tokens of all slots, on CPU: room for shared prefixes


def command(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """The command line after the interpreter. The user's arguments come last and take precedence."""
    rollout = config.rollout
    words: Sequence[object] = [
        "-m", "sglang.launch_server",
        "--model-path", base_of(context.model_folder),
        "--host", "127.0.0.1",
        "--port", port,
        "--load-format", "dummy",  # all weights arrive by pushes
        "--dtype", config.model.dtype,
        "--tp-size", config.topology.tensor_parallel,
        "--context-length", most_tokens + sglang_probe.ROOM,
        "--max-running-requests", rollout.max_concurrent_rollouts,
        "--random-seed", protocol.seed(config.run.seed, context),
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--incremental-streaming-output",
        "--stream-interval", STREAM,
    ]  # fmt: skip
    if rollout.on_update == "keep":
        words = [*words, "--disable-overlap-schedule"]
    if context.device == "cpu":
        most = protocol.longest(config, most_tokens) + sglang_probe.ROOM
        words = [
            *words,
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--grammar-backend", "none",
            "--disable-overlap-schedule",
            "--max-total-tokens", max(SPARE * most * rollout.max_concurrent_rollouts, most_tokens + sglang_probe.ROOM),
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def environment(context: Context, config: Config) -> dict[str, str]:
    more = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "GLOO_SOCKET_IFNAME": protocol.LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": protocol.LOOPBACK[1],
    }
    return more | {"SGLANG_USE_CPU_ENGINE": "1"} if context.device == "cpu" else more


def meet(met: protocol.ServerContext) -> protocol.Server:
    """The server, joined to a process group. Raises ConfigError if it cannot serve the run, and EngineLost."""
    config = met.config
    names = met.shape.parameters if met.process is None else None
    abilities = sglang_probe.probe(
        met.link,
        architecture=met.architecture,
        names=names,
        config=config,
        longest=met.longest,
    )
    return SGLang(met, WeightBroadcast(address=met.address, interface=met.interface), abilities)


def largest_rank(settings: Mapping[str, Any]) -> int:
    """The largest adapter rank that it accepts. A server without a limit reports none."""
    return int(settings.get("max_lora_rank") or 1 << 20) if settings.get("enable_lora") else 0


SGLANG = protocol.ServerSpec(
    oldest=sglang_probe.OLDEST,
    ready="/model_info",
    command=command,
    environment=environment,
    meet=meet,
    adapters=protocol.AdapterRoutes(
        "/load_lora_adapter", "/unload_lora_adapter", "lora_path", "/server_info", largest_rank
    ),
)
