"""A small HTTP server that speaks SGLang's routes, for what goes wrong: it stands for a foreign program.

It samples by rule: the token at position i under weights w is (w + i) % V, its log-prob -(w + i / 1000), where w is the
number in its weights. A test lets it sample so many tokens at a time, and says what it cannot or will not do. Weights
come through torch.distributed, by the sequence of SGLang's own helper.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import load_file

V = 31
ROUTES = [
    "/generate", "/model_info", "/server_info", "/pause_generation", "/continue_generation", "/abort_request",
    "/init_weights_update_group", "/update_weights_from_distributed", "/begin_weight_update", "/end_weight_update",
    "/weights_checker",
]  # fmt: skip
NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.1.x.weight",
    "lm_head.weight",
    "model.layers.1.self_attn.attn.k_scale",
]
OLD = ["/pause_generation", "/continue_generation", "/begin_weight_update", "/end_weight_update"]
TIMEOUT_S = 20.0


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # five, the default, is less than the samples that come at once


class Stream:
    """One piece under way."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.n_prompt = len(body["input_ids"])
        self.pairs: list[tuple[float, int]] = []
        self.labels: list[str] = []
        self.n_sent = 0
        self.finish: dict[str, Any] | None = None
        self.ends_in_queue = False  # the end comes while it waits, retracted

    def spans(self) -> list[dict[str, Any]]:
        """Its tokens by the labels of the weights that sampled them."""
        found: list[dict[str, Any]] = []
        for i, label in enumerate(self.labels):
            if found and found[-1]["version"] == label:
                found[-1]["end"] = i + 1
            else:
                found.append({"version": label, "start": i, "end": i + 1})
        return found


class SpeaksSGLang:
    """One server on the loopback, its requests in threads."""

    def __init__(self, port: int = 0) -> None:
        self.version, self.architecture, self.settings = "0.5.23", "LlamaForCausalLM", {"tp_size": 1, "dp_size": 1}
        self.routes, self.modes = list(ROUTES), ["abort", "retract", "in_place"]
        self.stamps = self.incremental = self.salts = True
        self.answers: dict[str, list[tuple[int, str]]] = {}  # of a path, in order, instead of what it would do
        self.hangs: set[str] = set()  # paths that get no answer
        self.breaks = False  # streams end in the middle
        self.break_after: list[int] = []  # tokens after which the next stream breaks off, and the one after that
        self.says_why = False  # ... by an event
        self.names = list(NAMES)  # of its weights
        self.most_new_tokens = 1 << 30  # of one request, whatever it asks for
        self.text = ""  # of each event, from a server that has a tokenizer
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.most_on_one = 0  # requests that came over one connection
        self.label, self.weight, self.is_paused = "default", 0, False
        self.adapters: dict[str, int] = {}  # name -> number in its matrices
        self.adapter_config: dict[str, Any] = {}  # of the last one
        self.streams: dict[str, Stream] = {}
        self.groups: dict[str, Any] = {}
        self.changed = threading.Condition()
        self.allowed = 0  # tokens that each stream may have
        self.ends = False
        server = self._http = Listener(("127.0.0.1", port), type("Handler", (self.handler(),), {"fake": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self._thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def handler(self) -> "type[Handler]":
        return Handler

    def allow(self, n: int) -> None:
        """Each stream may have so many tokens from its beginning."""
        with self.changed:
            self.allowed = n
            self.changed.notify_all()

    def called(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.calls if at == path]

    def close(self) -> None:
        """May be said twice."""
        with self.changed:
            if self.ends:
                return
            self.ends = True
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for group in self.groups.values():  # torch keeps a group, with its sockets, until it is destroyed
            c10d.destroy_process_group(group)

    # what the routes do

    def describe(self) -> dict[str, Any]:
        mode = {"properties": {"mode": {"enum": self.modes}}}
        schemas = {"GenerateReqInput": {"properties": {"extra_key": {}} if self.salts else {}}}
        schemas |= {"PauseGenerationReqInput": mode} if "/pause_generation" in self.routes else {}
        return {"paths": {path: {} for path in self.routes}, "components": {"schemas": schemas}}

    def act(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/openapi.json":
                return 200, self.describe()
            case "/model_info":
                return 200, {"architectures": [self.architecture], "weight_version": self.label}
            case "/server_info":
                incremental = {"incremental_streaming_output": self.incremental}
                return 200, {"version": self.version} | incremental | self.settings
            case "/pause_generation":
                self.is_paused = True
            case "/continue_generation":
                self.is_paused = False
            case "/abort_request":
                for rid, stream in list(self.streams.items()):
                    if body.get("abort_all") or rid.startswith(body["rid"]):
                        stream.finish = stream.finish or {"type": "abort", "message": "Aborted"}
            case "/init_weights_update_group":
                self.join(body)
            case "/weights_checker":
                return 200, {"success": True, "ranks": [{"checksums": dict.fromkeys(self.names, "0")}]}
            case "/update_weights_from_distributed":
                self.receive(body)
            case "/load_lora_adapter" | "/v1/load_lora_adapter":
                self.load_adapter(body["lora_name"], Path(body["lora_path"]))
            case "/unload_lora_adapter" | "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
        return 200, {"success": True, "message": ""}

    def load_adapter(self, name: str, folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapter_config = json.loads((folder / "adapter_config.json").read_text())
        (self.adapters[name],) = {int(number) for tensor in tensors.values() for number in tensor.flatten()}

    def join(self, body: dict[str, Any]) -> None:
        """As `init_custom_process_group` does."""
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        limit = timedelta(seconds=TIMEOUT_S)
        store, rank, size = next(c10d.rendezvous(address, body["rank_offset"], body["world_size"], timeout=limit))
        store = c10d.PrefixStore(body["group_name"], store)
        group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend("gloo"), store, group_name=body["group_name"], timeout=limit
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[body["group_name"]] = group

    def receive(self, body: dict[str, Any]) -> None:
        group = self.groups[body["group_name"]]
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensor], options).wait()
            self.weight = int(tensor.flatten()[0])
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]

    def sample(self, stream: Stream) -> bool:
        """Its next token, when it may have one."""
        n = len(stream.pairs)
        probe = "rid" not in stream.body
        most = min(stream.body["sampling_params"]["max_new_tokens"], self.most_new_tokens)
        if n >= most:
            stream.finish = stream.finish or {"type": "length", "length": n}
            return True
        if stream.finish or self.is_paused or (n >= self.allowed and not probe):
            return False
        at, adapter = stream.n_prompt + n, stream.body.get("lora_path")
        weight = self.weight if adapter is None else self.adapters[adapter]
        stream.pairs.append((-(weight + at / 1000), (weight + at) % V))
        stream.labels.append(self.label)
        if n + 1 == most:
            stream.finish = {"type": "length", "length": n + 1}
        return True

    def event(self, stream: Stream) -> dict[str, Any]:
        first = stream.n_sent if self.incremental else 0
        stream.n_sent = len(stream.pairs)
        pairs = stream.pairs[first:]
        about: dict[str, Any] = {
            "finish_reason": stream.finish,
            "completion_tokens": len(stream.pairs),
            "weight_version": self.label,
            "output_token_logprobs": [[logp, token, None] for logp, token in pairs],
        }
        if stream.finish and self.stamps:
            about["weight_versions"] = stream.spans()
        if stream.ends_in_queue and self.incremental:  # as 0.5.23: all log-probs, and the last token once more
            about["output_token_logprobs"] = [[logp, token, None] for logp, token in stream.pairs]
            pairs = stream.pairs[-1:]
        return {"output_ids": [token for _, token in pairs], "meta_info": about, "text": self.text}


class Handler(BaseHTTPRequestHandler):
    fake: SpeaksSGLang
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    n_requests = 0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.serve(json.loads(self.rfile.read(length) or b"{}"))

    def serve(self, body: dict[str, Any]) -> None:
        fake = self.fake
        with suppress(BrokenPipeError, ConnectionResetError):
            fake.calls.append((self.path, body))
            self.n_requests += 1
            fake.most_on_one = max(fake.most_on_one, self.n_requests)
            if self.path in fake.hangs:
                with fake.changed:
                    fake.changed.wait_for(lambda: fake.ends, TIMEOUT_S)
                return None
            if fake.answers.get(self.path):
                return self.answer(*fake.answers[self.path].pop(0))
            if self.path not in [*fake.routes, "/openapi.json"]:
                return self.answer(404, "Not Found")
            if self.path == "/generate":
                return self.generate(body)
            status, answer = fake.act(self.path, body)
            with fake.changed:
                fake.changed.notify_all()
            return self.answer(status, json.dumps(answer))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def generate(self, body: dict[str, Any]) -> None:
        fake, stream = self.fake, Stream(body)
        if not body.get("stream"):
            fake.sample(stream)
            return self.answer(200, json.dumps(fake.event(stream)))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with fake.changed:
            fake.streams[body["rid"]] = stream
        while True:
            with fake.changed:
                fake.changed.wait_for(lambda: fake.ends or stream.finish or fake.sample(stream), TIMEOUT_S)
                event, is_last = fake.event(stream), stream.finish is not None
            if fake.ends or fake.breaks:
                self.close_connection = True
                return None
            self.chunk(f"data: {json.dumps(event, ensure_ascii=False)}\n\n")
            if fake.break_after and len(stream.pairs) >= fake.break_after[0]:
                fake.break_after.pop(0)
                self.close_connection = True
                return self.chunk('data: {"error": {"message": "text"}}\n\n') if fake.says_why else None
            if is_last:  # the client has been told so
                fake.streams.pop(body["rid"], None)
                self.chunk("data: [DONE]\n\n")
                return self.chunk("")

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()


@contextmanager
def speaking(change: Callable[[SpeaksSGLang], None] | None = None) -> Iterator[SpeaksSGLang]:
    fake = SpeaksSGLang()
    try:
        if change is not None:
            change(fake)
        yield fake
    finally:
        fake.close()
