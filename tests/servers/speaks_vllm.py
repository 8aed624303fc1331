"""A small HTTP server that speaks vLLM's routes, for what goes wrong: it stands for a foreign program.

It samples by the rule of the one that speaks SGLang's. Weights come as a folder of safetensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from safetensors.torch import load_file

from actors.engines.servers.vllm_probe import GENERATE, RL
from tests.servers.speaks_sglang import Handler, SpeaksSGLang, Stream

UNTIED = {"tie_word_embeddings": False}


class SpeaksVLLM(SpeaksSGLang):
    """One server on the loopback, its requests in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "0.32.0"
        self.routes = ["/generate", "/health", "/version", "/server_info", *RL]
        self.model: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "hf_overrides": UNTIED}
        self.parallel = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "worker_cls": "cpu_worker.CPUWorker"}
        self.cache: dict[str, Any] = {}  # settings of the KV cache
        self.caches_prefixes = self.forgets = True
        self.scale_out = self.salts = True
        self.lora: dict[str, Any] | None = None
        self.taken: list[dict[str, Any]] = []  # tensors of each update
        self.modes_of_folder: list[int] = []

    def handler(self) -> type[Handler]:
        return VLLMHandler

    def act(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/openapi.json":
                schemas = {"GenerateRequest": {"properties": {"cache_salt": {}} if self.salts else {}}}
                paths = [*self.routes, *([GENERATE] if self.scale_out else [])]
                return 200, {"paths": {path: {} for path in paths}, "components": {"schemas": schemas}}
            case "/version":
                return 200, {"version": self.version}
            case "/server_info":
                cache = {"enable_prefix_caching": self.caches_prefixes} | self.cache
                model = {"model_config": self.model, "parallel_config": self.parallel, "cache_config": cache}
                return 200, {"vllm_config": model | {"lora_config": self.lora}}
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter":
                super().act(path, body)
                return 200, "Success"
            case "/weight_checker":
                return 200, {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": "0" for name in self.names}}
            case "/reset_prefix_cache":
                return 200, {"success": self.forgets}
            case "/pause":
                self.is_paused = True
            case "/resume":
                self.is_paused = False
            case "/abort_requests":
                for rid, stream in list(self.streams.items()):
                    if not body.get("request_ids") or rid in body["request_ids"]:
                        stream.finish = stream.finish or {"type": "abort"}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/collective_rpc" if body["method"] == "reload_weights":
                self.take(Path(body["kwargs"]["weights_path"]))
        return 200, {"results": [None]}

    def take(self, folder: Path) -> None:
        self.modes_of_folder.append(folder.stat().st_mode & 0o777)
        tensors = load_file(folder / "model.safetensors")
        self.taken.append(tensors)
        self.weight = int(next(iter(tensors.values())).flatten()[0])

    def event(self, stream: Stream) -> dict[str, Any]:
        pairs, stream.n_sent = stream.pairs[stream.n_sent :], len(stream.pairs)
        return {"choices": [{
            "index": 0,
            "token_ids": [token for _, token in pairs],
            "finish_reason": stream.finish and stream.finish["type"],
            "weight_versions": stream.spans() if stream.finish else None,
            "logprobs": {"content": [{"token_id": token, "logprob": logp} for logp, token in pairs]},
        }]}  # fmt: skip


class VLLMHandler(Handler):
    def serve(self, body: dict[str, Any]) -> None:
        self.path, _, query = self.path.partition("?")
        body = body | dict(parse_qsl(query))
        if self.path == GENERATE:
            self.path = "/generate"
            given = {"max_new_tokens": body["sampling_params"]["max_tokens"], **body["sampling_params"]}
            rid = f"generate-tokens-{body['request_id']}"
            body = {
                "rid": rid,
                "input_ids": body["token_ids"],
                "stream": body["stream"],
                "sampling_params": given,
                "lora_path": body.get("model"),
                "cache_salt": body.get("cache_salt"),
            }
        super().serve(body)


@contextmanager
def speaking(change: Callable[[SpeaksVLLM], None] | None = None) -> Iterator[SpeaksVLLM]:
    fake = SpeaksVLLM()
    try:
        if change is not None:
            change(fake)
        yield fake
    finally:
        fake.close()
