"""The requests of the Tinker API: authenticates them, reads bodies, answers. State is in the registry.

An error is {"error": sentence} with a status that the SDK has a class for; that of a future has a category.
"""

import asyncio
import contextlib
import hmac
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from loguru import logger

from areal_serve.bodies import (
    Given,
    cut,
    is_whole,
    optional,
    page,
    read_json,
    sampling_options,
    seed_of,
    text,
    tokens,
    whole,
)
from areal_serve.registry import JSON, PROTOBUF, Future, Model, Registry
from areal_serve.rejection import MOST_CHARACTERS, Rejected
from areal_serve.samplers import Samplers
from areal_serve.storage import checkpoints
from areal_serve.storage.downloads import EXTERNAL, SIGNED, Downloads
from areal_serve.wire import read_pass

BODY_BYTES = 8 << 20  # the SDK sends at most about 5 MB at a time
POLL_S = 25.0  # longest wait for a future; the SDK waits 45 s
WATCH_S = 10.0  # between looks at silent sessions
MOST_SAMPLES = 1024  # of one request
FULL = ":full"  # behind the name of the base model: all of its weights are trained
API = "/api/v1"
VERSION = "X-Weights-Version"  # of the weights that have sampled a result
NO_UNEMBED = "adapters are on the layers of attention and MLP; the unembedding layer has none on this server"

NOT_SERVED = {  # paths that the SDK may ask for -> why this server has none
    "/auth/token": "keys are not exchanged for tokens on this server",
    "/audit": "this server keeps no audit log",
    "/billing/usage/events": "this server has no billing",
    "/billing/usage/checkpoints/current": "this server has no billing",
    "/copy_weights": "this server has one project: use the checkpoint where it is",
    "/create_custom_loss": "custom losses run in the client: pass a function to forward_backward_custom",
    "/retrieve_futures": "futures are retrieved one by one",
    "/join_sampling_session": "copies of a sampling client number their requests themselves",
    "/sessions/search": "list sessions instead",
    "/sessions/{session_id}/project": "this server has one project",
    "/sessions/{session_id}/trace_export": "this server keeps no traces",
    "/training_runs/{model_id}/checkpoints/{kind}/{name}/publish": "this server has no public checkpoints",
}
SESSION: Mapping[str, Any] = {
    "tags": list,
    "user_metadata": dict,
    "sdk_version": str,
    "display_name": str,
}  # its fields
SAVES = {  # kind of a checkpoint -> type of the call that writes it
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    EXTERNAL: "save_weights_external",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The application."""

    def __init__(
        self, registry: Registry, samplers: Samplers, *, key: str, name: str, context: int, tokenizer: str
    ) -> None:
        """`name`: of the base model, a path or an id; its last part is accepted, too, behind any other. `tokenizer`:
        its folder. Raises ValueError for an empty key, with which every request would pass.
        """
        if not key:
            raise ValueError("missing key: a front answers only requests with its key")
        self._registry, self._samplers = registry, samplers
        self._key, self._name, self._context, self._tokenizer = key.encode(), name, context, tokenizer
        self._models = registry.folder / "models"
        self._downloads = Downloads(self._models, self._key, API)
        self.app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard])
        self.app.add_routes(self._routes())

    def _routes(self) -> list[web.RouteDef]:
        run, checkpoint = f"{API}/training_runs/{{model_id}}", "/checkpoints/{kind}/{name}"
        post = {
            "/client/config": self._client_config,
            "/client/dynamic_config": self._client_dynamic_config,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/sessions/{session_id}/finish": self._finish_session,
            "/telemetry": self._telemetry,
            "/create_model": self._create_model,
            "/get_info": self._get_info,
            "/forward_backward": self._forward_backward,
            "/forward": self._forward_backward,
            "/optim_step": self._optim_step,
            "/save_weights": self._save_weights,
            "/save_weights_for_sampler": self._save_for_sampler,
            "/save_weights_external": self._save_external,
            "/load_weights": self._load_weights,
            "/create_sampling_session": self._create_sampling_session,
            "/asample": self._sample,
            "/retrieve_future": self._retrieve_future,
            "/cancel_future": self._cancel_future,
            "/weights_info": self._weights_info,
        }
        get = {
            "/healthz": self._health,
            "/get_server_capabilities": self._capabilities,
            "/samplers/{sampler_id:.+}": self._get_sampler,
            "/training_runs": self._list_runs,
            "/checkpoints": self._list_all_checkpoints,
            "/sessions": self._list_sessions,
            "/sessions/{session_id}": self._get_session,
        }
        routes = [web.post(API + path, handler) for path, handler in post.items()]
        routes += [web.get(API + path, handler) for path, handler in get.items()]
        routes += [web.route("*", API + path, _refusal(why)) for path, why in NOT_SERVED.items()]
        routes += [
            web.get(f"{run}/checkpoints", self._list_checkpoints),
            web.delete(run + checkpoint, self._delete_checkpoint),
            web.put(f"{run}{checkpoint}/ttl", self._set_ttl),
            web.get(run, self._get_run),
        ]
        return routes + self._downloads.routes(API)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authenticate by key, and answer errors in the API's form."""
        try:
            if request.match_info.route.name != SIGNED and request.path != f"{API}/healthz":
                self._authenticate(request)
            return await handler(request)
        except Rejected as rejection:
            return _error(str(rejection), rejection.status)
        except web.RequestPayloadError as error:
            return _error(f"invalid body: it cannot be decoded: {error}"[:MOST_CHARACTERS], 400)
        except web.HTTPRequestEntityTooLarge:
            return _error(f"body too large: at most {BODY_BYTES} bytes; send fewer data at a time", 413)
        except web.HTTPException as error:
            return _error(f"unknown path {request.method} {request.path}: this server does not have it", error.status)
        except Exception:  # noqa: BLE001  the client gets an answer, the log has the traceback
            logger.error("a request of {} failed:\n{}", request.path, traceback.format_exc())  # without values: no key
            return _error("a fault of this server: see its log", 500)

    def _authenticate(self, request: web.Request) -> None:
        given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._key):
            raise Rejected("wrong API key: set TINKER_API_KEY to the key that the server printed", status=401)

    # service

    async def _health(self, request: web.Request) -> web.Response:
        return _reply({"status": "ok"})

    async def _client_config(self, request: web.Request) -> web.Response:
        return _reply({"pjwt_auth_enabled": False, "sample_max_concurrent_requests": 256})

    async def _client_dynamic_config(self, request: web.Request) -> web.Response:
        return _reply({"sample_cancel_enabled": True})

    async def _telemetry(self, request: web.Request) -> web.Response:
        return _reply({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        known = {"max_context_length": self._context, "trainable": True}
        names = [(self._name, True), (self._name + FULL, False)]
        models = [{"model_name": name, "sampleable": is_sampled, **known} for name, is_sampled in names]
        return _reply({"supported_models": models})

    async def _create_session(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        for name, kind in SESSION.items():
            optional(given, name, kind)
        id = self._registry.open_session(given)
        return _reply({"type": "create_session", "session_id": id, "info_message": NO_UNEMBED})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._registry.session(text(await read_json(request), "session_id"))
        return _reply({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        id = request.match_info["session_id"]
        self._registry.session(id)
        self._registry.end_session(id, "finished by its client")
        return web.Response(status=204)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        offset, limit = page(request)
        return _reply({"sessions": list(self._registry.sessions)[offset : offset + limit]})

    async def _get_session(self, request: web.Request) -> web.Response:
        id = request.match_info["session_id"]
        if id not in self._registry.sessions:
            raise Rejected(f"unknown session {id!r}", status=404)
        known = self._registry.sessions[id]
        return _reply(
            {
                "training_run_ids": [model.id for model in self._all_models() if model.session_id == id],
                "sampler_ids": [key for key, own in self._registry.samplers.items() if own["session_id"] == id],
                "user_metadata": known["user_metadata"],
                "display_name": known["display_name"],
            }
        )

    # training

    async def _create_model(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        base = text(given, "base_model")
        is_full = self._base(base)
        if (kind := (optional(given, "optimizer_config", dict) or {}).get("type", "adamw")) != "adamw":
            raise Rejected(f"unsupported optimizer {cut(kind)}: this server has adamw")
        lora = None if is_full else optional(given, "lora_config", dict)
        if lora is not None:
            for name, low, high in (("rank", 1, 1024), ("seed", 0, (1 << 63) - 1)):
                if not is_whole(lora.get(name), low, high) and (name == "rank" or lora.get(name) is not None):
                    raise Rejected(f"invalid {name} {cut(lora.get(name))}: from {low} to {high}")
            for name in ("train_mlp", "train_attn"):
                optional(lora, name, bool)
        elif not is_full:
            raise Rejected(f"missing lora_config: to train all weights, the base model is {self._name + FULL!r}")
        model = self._model(given, base, lora)
        reply = {"model_id": model.id, "type": "create_model"}
        return _promise(self._registry.create(model, folder=None, optimizer=False, reply=reply), model.id)

    def _model(self, given: Given, base: str, lora: dict[str, Any] | None) -> Model:
        session_id, number = text(given, "session_id"), whole(given, "model_seq_id")
        self._registry.session(session_id)
        return Model(
            f"{session_id}:train:{number}", session_id, base, lora, time.time(), optional(given, "user_metadata", dict)
        )

    def _base(self, name: str) -> bool:
        """Whether all weights of the base model of this name are trained. Raises Rejected."""
        if name.removesuffix(FULL).rpartition("/")[2] != self._name.rpartition("/")[2]:
            raise Rejected(f"unknown model {name!r}: this server has {self._name!r}", status=404)
        return name.endswith(FULL)

    async def _get_info(self, request: web.Request) -> web.Response:
        model = self._registry.run(text(await read_json(request), "model_id")).model
        data = {"arch": None, "model_name": model.base_model, "tokenizer_id": self._tokenizer}
        rank = None if model.lora is None else model.lora["rank"]
        return _reply(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model.id,
                "is_lora": model.lora is not None,
                "lora_rank": rank,
                "model_name": model.base_model,
            }
        )

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await request.read()
        given = read_pass(body, with_data=False)
        frame = {"op": "pass", "body": body, "forward_only": given.forward_only}
        if not given.forward_only:
            with contextlib.suppress(Rejected):  # by the trainer, too: the future gets the error
                frame["oldest"] = self._samplers.versions.oldest(read_pass(body))
        return _promise(self._registry.call(given.model_id, given.seq_id, frame, kind=PROTOBUF), given.model_id)

    async def _optim_step(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        if "optimizer_params" in given:
            raise Rejected("unsupported optimizer: this server has AdamW (AdamParams)")
        params = given.get("adam_params", given.get("optim_params"))
        if not isinstance(params, dict):
            raise Rejected("missing adam_params")
        return self._called(given, {"op": "step", "params": params})

    def _called(self, given: Given, frame: Given) -> web.Response:
        model_id = text(given, "model_id")
        return _promise(self._registry.call(model_id, given.get("seq_id"), frame), model_id)

    async def _save_weights(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        name = text(given, "path") if given.get("path") else str(whole(given, "seq_id"))
        return self._saved(given, "weights", name)

    async def _save_external(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        if given.get("age_encryption_recipients"):
            raise Rejected("unsupported age_encryption_recipients: this server does not encrypt files")
        return self._saved(given, EXTERNAL, text(given, "path"))

    def _saved(self, given: Given, kind: str, name: str) -> web.Response:
        model_id = text(given, "model_id")
        folder = checkpoints.place(self._models, model_id, kind, name)
        reply = {"path": f"{checkpoints.SCHEME}{model_id}/{kind}/{name}", "type": SAVES[kind]}
        frame = {"op": "save", "folder": str(folder), "optimizer": kind == "weights", "reply": reply}
        frame["for_others"] = kind == EXTERNAL
        return self._called(
            given, {**frame, "overwrite": bool(optional(given, "overwrite", bool)), "meta": self._meta(given)}
        )

    def _meta(self, given: Given) -> Given:
        run = self._registry.run(text(given, "model_id"))
        call = f"{run.model.id}:{given.get('seq_id')}"
        return {
            "call": call,
            "created": time.time(),
            "base_model": run.model.base_model,
            "user_metadata": optional(given, "user_metadata", dict),
            "expires": checkpoints.expiry(given.get("ttl_seconds")),
        }

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        if given.get("path"):
            return self._saved(given, "sampler_weights", text(given, "path"))
        run, number = self._registry.run(text(given, "model_id")), whole(given, "sampling_session_seq_id")
        if (kind := given.get("kind", "snapshot")) not in ("snapshot", "inflight"):
            raise Rejected(f"unknown kind {cut(kind)}: a sampling client is of kind 'snapshot' or 'inflight'")
        is_inflight = kind == "inflight"
        folder = run.folder / f"{'inflight' if is_inflight else 'unnamed'}-{whole(given, 'seq_id')}"
        sampler_id = f"{run.model.session_id}:sample:{number}"
        reply = {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
        frame = {"op": "save", "folder": str(folder), "optimizer": False, "overwrite": True, "reply": reply}
        response = self._called(given, {**frame, "meta": self._meta(given)})
        own = {"inflight": run.model.id} if is_inflight else {"folder": str(folder)}
        base = {"session_id": run.model.session_id, "base_model": run.model.base_model.removesuffix(FULL)}
        self._registry.open_sampler(sampler_id, {**base, **own})
        return response

    async def _load_weights(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        path, optimizer = text(given, "path"), bool(optional(given, "optimizer", bool))
        _, folder = checkpoints.find(self._models, path)
        if given.get("session_id") is None:
            reply = {"path": path, "model_id": given.get("model_id"), "type": "load_weights"}
            return self._called(given, {"op": "load", "folder": str(folder), "optimizer": optimizer, "reply": reply})
        meta = checkpoints.read(folder)
        if given.get("base_model"):
            self._base(text(given, "base_model"))
        model = self._model(given, meta["base_model"], meta["lora"])
        reply = {"path": path, "model_id": model.id, "type": "load_weights"}
        return _promise(self._registry.create(model, folder=folder, optimizer=optimizer, reply=reply), model.id)

    # sampling

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        session_id, number = text(given, "session_id"), whole(given, "sampling_session_seq_id")
        self._registry.session(session_id)
        record = {
            "session_id": session_id,
            "base_model": given.get("base_model"),
            "model_path": given.get("model_path"),
        }
        if given.get("model_path"):
            _, folder = checkpoints.find(self._models, text(given, "model_path"))
            record |= {"folder": str(folder), "base_model": checkpoints.read(folder)["base_model"].removesuffix(FULL)}
        elif self._base(text(given, "base_model")):
            raise Rejected(f"samples come from {self._name!r}: {FULL!r} is for training")
        id = self._registry.open_sampler(f"{session_id}:sample:{number}", record)
        return _reply({"type": "create_sampling_session", "sampling_session_id": id})

    async def _get_sampler(self, request: web.Request) -> web.Response:
        id = request.match_info["sampler_id"]
        record = self._registry.sampler(id)
        return _reply({"sampler_id": id, "base_model": record["base_model"], "model_path": record.get("model_path")})

    async def _sample(self, request: web.Request) -> web.Response:
        given = await read_json(request)
        sampler_id = text(given, "sampling_session_id")
        weights = self._registry.weights_of(sampler_id)
        prompt, number = tokens(given.get("prompt")), whole(given, "seq_id")
        n_samples = whole({"num_samples": 1, **given}, "num_samples", 1, MOST_SAMPLES)
        request_id = f"{sampler_id}:{number}"
        if request_id not in self._registry.futures:
            options = sampling_options(given, len(prompt))
            seed = options["sampling_params"].get("seed")
            frame = {
                "id": request_id,
                "op": "sample",
                "weights": weights,
                "model_id": checkpoints.model_of(self._models, weights),
                "prompt": prompt,
                "n_samples": n_samples,
                "seed": seed_of(request_id) if seed is None else [int(seed)],
                "options": options,
            }
            most = options["sampling_params"].get("max_tokens", self._context)
            give_back = self._registry.in_flight.take(
                self._registry.sampler(sampler_id)["session_id"],
                n_bytes=len(await request.read()),
                n_tokens=n_samples * (len(prompt) + most),
            )
            future = Future(kind=PROTOBUF, on_finish=give_back)
            self._samplers.submit(frame, future)
            self._registry.futures[request_id] = future
        ids = [f"{request_id}:{sample}" for sample in range(n_samples)]
        return _reply({"request_id": request_id, "sample_sequence_ids": ids})

    # futures

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        id = text(await read_json(request), "request_id")
        future = self._registry.futures.get(id)
        if future is None:
            is_lost = id.rpartition(":")[0] in self._registry.samplers  # before this front began
            raise Rejected(
                f"unknown future {id!r}: it was retrieved long ago, or never promised", status=410 if is_lost else 404
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await future.done.wait()
        if not future.done.is_set():
            return _reply({"type": "try_again", "request_id": id, "queue_state": "active"}, status=408)
        future.taken = True
        self._samplers.forget_old(self._registry.futures)
        if future.error:
            return _reply({"error": future.error, "category": "user"})
        headers = {} if future.version is None else {VERSION: str(future.version)}
        return web.Response(body=future.result, content_type=future.kind, headers=headers)

    async def _cancel_future(self, request: web.Request) -> web.Response:
        self._samplers.cancel(text(await read_json(request), "request_id"))
        return web.Response(status=204)

    # runs and checkpoints

    def _all_models(self) -> list[Model]:
        """Of every session, newest first."""
        found = [Model(**json.loads(path.read_text(encoding="utf-8"))) for path in self._models.glob("*/model.json")]
        return sorted(found, key=lambda model: model.created, reverse=True)

    def _known(self, model_id: str) -> Model:
        path = self._models / model_id / "model.json"
        if not checkpoints.NAME.fullmatch(model_id) or not path.is_file():
            raise Rejected(f"unknown training run {model_id!r}", status=404)
        return Model(**json.loads(path.read_text(encoding="utf-8")))

    def _training_run(self, model: Model) -> Given:
        held = checkpoints.listed(self._models / model.id)
        last = {
            kind: next((one for one in held if one["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        run = self._registry.runs.get(model.id)
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": "local",
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora["rank"],
            "last_request_time": checkpoints.moment(model.created if run is None else run.seen),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": model.user_metadata,
        }

    async def _list_runs(self, request: web.Request) -> web.Response:
        models, (offset, limit) = self._all_models(), page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(models)}
        return _reply(
            {"training_runs": [self._training_run(m) for m in models[offset : offset + limit]], "cursor": cursor}
        )

    async def _get_run(self, request: web.Request) -> web.Response:
        return _reply(self._training_run(self._known(request.match_info["model_id"])))

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        model = self._known(request.match_info["model_id"])
        return _reply({"checkpoints": checkpoints.listed(self._models / model.id)})

    async def _list_all_checkpoints(self, request: web.Request) -> web.Response:
        found = [one for model in self._all_models() for one in checkpoints.listed(self._models / model.id)]
        offset, limit = page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return _reply({"checkpoints": found[offset : offset + limit], "cursor": cursor})

    def _checkpoint(self, request: web.Request) -> Path:
        at = request.match_info
        return checkpoints.find(self._models, f"{checkpoints.SCHEME}{at['model_id']}/{at['kind']}/{at['name']}")[1]

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        checkpoints.delete(self._checkpoint(request))
        return web.Response(status=204)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        folder = self._checkpoint(request)
        expires = checkpoints.expiry((await read_json(request)).get("ttl_seconds"))
        checkpoints.write(folder, {**checkpoints.read(folder), "expires": expires})
        return web.Response(status=204)

    async def _weights_info(self, request: web.Request) -> web.Response:
        _, folder = checkpoints.find(self._models, text(await read_json(request), "tinker_path"))
        meta = checkpoints.read(folder)
        lora = meta["lora"] or {}
        parts = {name: lora.get(name) for name in ("train_mlp", "train_attn")} | {"train_unembed": False}
        return _reply({"base_model": meta["base_model"], "is_lora": bool(lora), "lora_rank": lora.get("rank"), **parts})


def _refusal(why: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        raise Rejected(f"not served: {why}", status=404)

    return handler


def _promise(request_id: str, model_id: str) -> web.Response:
    return _reply({"request_id": request_id, "model_id": model_id})


def _error(sentence: str, status: int) -> web.Response:
    response = _reply({"error": sentence, "category": "user" if status < 500 else "server"}, status=status)
    if status in (401, 413):
        response.force_close()  # its body may be unread
    return response


def _reply(record: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(record).encode(), status=status, content_type=JSON)
