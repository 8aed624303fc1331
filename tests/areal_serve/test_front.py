"""Requests over HTTP, with a trainer and a sampler of a tiny model on the event loop of the front."""

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config, ServeConfig
from areal_serve.front import BODY_BYTES, FULL, NOT_SERVED, Front
from areal_serve.limits import MOST
from areal_serve.registry import Registry
from areal_serve.rejection import MOST_CHARACTERS
from areal_serve.sampler import Sampler
from areal_serve.samplers import Samplers
from areal_serve.storage.client_journal import ClientJournal
from areal_serve.wire import VERSIONS, fields, raw
from areal_serve.worker import Frame, answer, take
from tests.areal_serve.parts import CONFIG, CONTEXT, data, model_folder, trainer
from tests.areal_serve.test_wire import dense, part, varint

KEY, NAME = "tml-a-key-of-this-test", "models/Tiny"
Answer = tuple[int, Any]
Call = Callable[..., Awaitable[Answer]]


class InlineSampler:
    """A sampler on the event loop."""

    def __init__(self, samplers: Samplers) -> None:
        self._samplers = samplers
        self._sampler = Sampler(CONFIG, str(model_folder()), load_tokenizer(str(model_folder())), device="cpu")

    def send(self, frame: Frame) -> None:
        take(self._sampler, msgpack.unpackb(msgpack.packb(frame)))
        asyncio.get_running_loop().call_soon(self._run)

    def close(self) -> None: ...

    def _run(self) -> None:
        while not self._sampler.is_idle:
            for id, reply in self._sampler.step():
                self._samplers.on_frame(0, {"id": id, **reply})


@asynccontextmanager
async def serving(folder: Path, config: Config = CONFIG) -> AsyncIterator[Call]:
    """A function that posts (or another method) and returns status and body."""
    own, samplers = trainer(config), Samplers()

    def to_trainer(frame: Frame) -> None:
        asyncio.get_running_loop().call_soon(lambda: registry.on_trainer(answer(own, frame)))

    registry = Registry(folder, save_every=2, to_trainer=to_trainer)
    samplers.add(InlineSampler(samplers))
    journal = ClientJournal(folder, config)
    registry.on_done = samplers.on_done = journal.call
    front = Front(registry, samplers, key=KEY, name=NAME, context=CONTEXT, tokenizer=str(model_folder()))
    async with TestClient(TestServer(front.app)) as client:
        registry.on_trainer_start()
        samplers.on_start(0)

        async def call(
            path: str,
            given: Any = None,
            *,
            method: str = "POST",
            key: str = KEY,
            headers: dict[str, str] | None = None,
            more: Mapping[str, str] = {},
        ) -> Answer:
            body = given if isinstance(given, bytes) or given is None else json.dumps(given).encode()
            sent = None if body is None else io.BytesIO(body)
            async with client.request(
                method, f"/api/v1{path}", data=sent, headers={"X-API-Key": key, **more}
            ) as response:
                found = await response.read()
                if headers is not None:
                    headers |= response.headers
                is_json = response.content_type == "application/json"
                return response.status, json.loads(found) if is_json and found else found

        yield call
    journal.close()


def run(folder: Path, scenario: Callable[[Call], Awaitable[None]], config: Config = CONFIG) -> None:
    async def all_of_it() -> None:
        async with serving(folder, config) as call:
            await scenario(call)

    asyncio.run(all_of_it())


def served(scenario: Callable[[Call], Awaitable[None]]) -> Callable[[Path], None]:
    """The test of a scenario with a server of its own."""

    def test(tmp_path: Path) -> None:
        run(tmp_path, scenario)

    return test


async def model(call: Call, *, base: str = NAME, number: int = 0) -> str:
    _, session = await call("/create_session", {"tags": [], "sdk_version": "0.38.0", "user_metadata": None})
    given = {"session_id": session["session_id"], "model_seq_id": number, "base_model": base}
    status, promise = await call("/create_model", {**given, "lora_config": {"rank": 2, "seed": 1}})
    assert status == 200, promise
    await future(call, promise["request_id"])
    return str(promise["model_id"])


async def model_and_base(call: Call) -> tuple[str, str]:
    """A model and its session, which samples from the base, too."""
    id = await model(call)
    session = id.partition(":")[0]
    base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    assert (await call("/create_sampling_session", base))[0] == 200
    return id, session


async def future(call: Call, request_id: str) -> Any:
    status, found = await call("/retrieve_future", {"request_id": request_id})
    assert status == 200, found
    return found


async def result(call: Call, path: str, given: Any) -> Any:
    """Of the future that is promised."""
    status, promise = await call(path, given)
    assert status == 200, promise
    return await future(call, promise["request_id"])


def pass_body(id: str, seq: int, loss_fn: str = "cross_entropy", tokens: list[int] | None = None) -> bytes:
    """Of one datum: these tokens, each of which predicts the next."""
    (given,) = data(6)
    ids_T, targets_T = given.ids_T, given.inputs["target_tokens"]
    if tokens is not None:
        ids_T, targets_T = np.array(tokens[:-1], "<i8"), np.array(tokens[1:], "<i8")
    inputs = {"target_tokens": dense(targets_T, 2), "weights": dense(np.ones(len(ids_T), "<f4"), 1)}
    datum = part(1, part(1, part(1, ids_T.astype("<i4").tobytes())))
    datum += b"".join(part(2, part(1, name.encode()) + part(2, value)) for name, value in inputs.items())
    return part(1, id.encode()) + varint(2 << 3) + varint(seq) + part(3, datum) + part(4, loss_fn.encode())


async def train(call: Call, id: str, seq: int) -> dict[str, Any]:
    """A pass and a step; the metrics of the step."""
    for path, body in (
        ("/forward_backward", pass_body(id, seq)),
        ("/optim_step", {"model_id": id, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-2}}),
    ):
        found = await result(call, path, body)
    return dict(found["metrics"])


@served
async def test_model_is_trained_saved_and_sampled(call: Call) -> None:
    id = await model(call)
    assert (await train(call, id, 1))["step:max"] == 1
    session = id.partition(":")[0]
    saved = await result(call, "/save_weights_for_sampler", {"model_id": id, "seq_id": 3, "sampling_session_seq_id": 0})
    asked = {
        "sampling_session_id": saved["sampling_session_id"],
        "seq_id": 625_717_909_000_000_000,  # of a copy of a sampling client
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
    }
    asked |= {"sampling_params": {"max_tokens": 3, "temperature": 1}}
    _, sampled = await call("/asample", asked)
    assert len(sampled["sample_sequence_ids"]) == 2
    assert isinstance(await future(call, sampled["request_id"]), bytes)
    saved = await result(call, "/save_weights", {"model_id": id, "seq_id": 4, "path": "one", "ttl_seconds": 7200})
    path = saved["path"]
    given = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    other = (await result(call, "/load_weights", given))["model_id"]
    assert (await train(call, other, 1))["step:max"] == 2
    _, runs = await call("/training_runs", method="GET")
    assert {run["training_run_id"] for run in runs["training_runs"]} == {id, other}
    _, held = await call(f"/training_runs/{id}/checkpoints", method="GET")
    assert [one["tinker_path"] for one in held["checkpoints"]] == [path]
    assert held["checkpoints"][0]["expires_at"]
    status, _ = await call(f"/training_runs/{id}/checkpoints/weights/one", method="DELETE")
    assert status == 204
    status, found = await call("/weights_info", {"tinker_path": path})
    assert status == 404, found


async def sampled(call: Call, sampler: str, seq: int) -> tuple[list[int], list[int], str]:
    """(prompt and sample, version of each token of the sample, version in the header)."""
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
    _, promise = await call("/asample", {**asked, "sampling_params": {"max_tokens": 4, "stop": [], "seed": seq}})
    headers: dict[str, str] = {}
    _, found = await call("/retrieve_future", {"request_id": promise["request_id"]}, headers=headers)
    sequence = dict(fields(dict(fields(memoryview(found)))[1]))  # type: ignore[arg-type]
    ids, versions = (np.frombuffer(raw(sequence[number]), "<i4").tolist() for number in (2, VERSIONS))
    return [5, 6, *ids], versions, headers["X-Weights-Version"]


def test_samples_have_versions_and_stale_ones_are_refused(tmp_path: Path) -> None:
    async def scenario(call: Call) -> None:
        id = await model(call)
        save = {"model_id": id, "sampling_session_seq_id": 0, "kind": "inflight"}
        sampler = (await result(call, "/save_weights_for_sampler", {**save, "seq_id": 1}))["sampling_session_id"]
        old, versions, header = await sampled(call, sampler, 1)
        assert (versions, header) == ([0] * 4, "0")
        assert b"lag:max" in await result(call, "/forward_backward", pass_body(id, 2, tokens=old))
        await train(call, id, 3)  # a step
        assert b"lag:max" in await result(call, "/forward_backward", pass_body(id, 5, tokens=old))
        await train(call, id, 6)  # a second step
        error = (await result(call, "/forward_backward", pass_body(id, 8, tokens=old)))["error"]
        assert "stale samples: datum 0 was sampled by version 0 of the weights, 2 optimizer steps ago" in error
        other = pass_body(id, 9)  # whose tokens no sample had
        assert b"lag:max" not in await result(call, "/forward_backward", other)
        await result(call, "/save_weights_for_sampler", {**save, "seq_id": 10})
        new, versions, header = await sampled(call, sampler, 2)
        assert (versions, header) == ([2] * 4, "2")
        assert b"lag:max" in await result(call, "/forward_backward", pass_body(id, 11, tokens=new))

    run(tmp_path, scenario, CONFIG.model_copy(update={"serve": ServeConfig(max_staleness=1)}))


def test_session_with_too_much_in_flight_is_refused_until_results_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(call: Call) -> None:
        id, session = await model_and_base(call)
        asked = {**ASKED, "sampling_session_id": f"{session}:sample:0"}
        assert (await call("/optim_step", {"model_id": id, "seq_id": 2, "adam_params": {}}))[0] == 200  # waits for 1
        monkeypatch.setitem(MOST, "tokens", 3)
        status, found = await call("/asample", asked)
        assert (status, "too many tokens in flight" in found["error"]) == (429, True)
        monkeypatch.setitem(MOST, "bytes", 10)
        status, found = await call("/forward_backward", pass_body(id, 3))
        assert (status, "too many bytes in flight" in found["error"]) == (429, True)
        assert (await call("/forward_backward", pass_body(id, 1)))[0] == 200  # the others wait for it
        await future(call, f"{id}:2")
        assert isinstance(await result(call, "/asample", asked), bytes)

    run(tmp_path, scenario)


@served
async def test_whole_model_is_trained_by_its_name(call: Call) -> None:
    id = await model(call, base=f"any-org/Tiny{FULL}")
    _, info = await call("/get_info", {"model_id": id})
    assert info["is_lora"] is False
    assert (await train(call, id, 1))["step:max"] == 1


@served
async def test_finished_session_refuses_its_calls(call: Call) -> None:
    id = await model(call)
    session = id.partition(":")[0]
    assert (await call("/session_heartbeat", {"session_id": session}))[0] == 200
    assert (await call(f"/sessions/{session}/finish", {"reason": {"type": "success"}}))[0] == 204
    assert (await call("/session_heartbeat", {"session_id": session}))[0] == 410
    status, found = await call("/optim_step", {"model_id": id, "seq_id": 1, "adam_params": {}})
    assert status == 404, found


@served
async def test_request_without_the_key_is_refused(call: Call) -> None:
    for key in ("", "tml-another", KEY[:-1], KEY + "x", "käse", "\udcff\udcfe"):
        status, found = await call("/get_server_capabilities", method="GET", key=key)
        assert (status, "wrong API key" in found["error"]) == (401, True)
        assert KEY not in found["error"]
    assert (await call("/healthz", method="GET", key=""))[0] == 200


ASKED = {"sampling_session_id": "@B", "seq_id": 9, "prompt": {"chunks": [{"tokens": [1]}]},
         "sampling_params": {"max_tokens": 3}}  # fmt: skip
# @M: a model, @S: its session, @B: a sampling session of the base, @N: the number of the next call
ALL_FIELDS: dict[str, Any] = {
    "/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "display_name": "x"},
    "/create_model": {
        "session_id": "@S", "model_seq_id": "@N", "base_model": NAME, "user_metadata": {"a": "b"},
        "lora_config": {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True},
    },
    "/get_info": {"model_id": "@M"},
    "/optim_step": {"model_id": "@M", "seq_id": "@N", "adam_params": {"learning_rate": 1e-3, "eps": 1e-8}},
    "/save_weights": {"model_id": "@M", "seq_id": "@N", "path": "one", "overwrite": True, "ttl_seconds": 7200},
    "/save_weights_for_sampler": {"model_id": "@M", "seq_id": "@N", "sampling_session_seq_id": 3, "kind": "snapshot"},
    "/load_weights": {"model_id": "@M", "seq_id": "@N", "path": "tinker://@M/weights/kept", "optimizer": True},
    "/create_sampling_session": {"session_id": "@S", "sampling_session_seq_id": 7, "base_model": NAME},
    "/asample": {
        **ASKED, "seq_id": "@N", "num_samples": 2, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": ["a", 5], "temperature": 1.0, "top_k": 3, "top_p": 0.9},
        "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 1, "target_prompt_logprobs": {"shape": [2, 1], "data": [1, 2]},
    },
    "/retrieve_future": {"request_id": "x:1"},
    "/weights_info": {"tinker_path": "tinker://@M/weights/kept"},
}  # fmt: skip
REFUSED: list[tuple[str, bytes | dict[str, Any], int, str]] = [  # path, body or what differs from ALL_FIELDS
    ("/create_session", b"[]", 400, "it must be a JSON object, not a list"),
    ("/create_session", b"{", 400, "it must be a JSON object"),
    ("/create_session", b"[" * 100_000, 400, "it must be a JSON object"),
    ("/create_session", b'{"display_name": "\\ud800"}', 400, "it must be a JSON object"),
    ("/create_session", b'{"display_name": "\xed\xa0\x80"}', 400, "it must be a JSON object"),
    ("/create_session", b" " * (BODY_BYTES + 1), 413, "body too large"),
    ("/create_session", {"tags": "x"}, 400, "invalid tags: it must be a list, not 'x'"),
    ("/forward_backward", b"{}", 400, "invalid body"),
    ("/create_model", {"base_model": "Other/Model"}, 404, "unknown model"),
    ("/create_model", {"lora_config": None}, 400, "missing lora_config"),
    ("/create_model", {"lora_config": 5}, 400, "invalid lora_config"),
    ("/create_model", {"lora_config": {"rank": 0}}, 400, "invalid rank"),
    ("/create_model", {"lora_config": {"rank": True}}, 400, "invalid rank"),
    ("/create_model", {"lora_config": {"rank": 2, "seed": "x"}}, 400, "invalid seed"),
    ("/create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "unsupported optimizer"),
    ("/create_model", {"optimizer_config": []}, 400, "invalid optimizer_config"),
    ("/optim_step", {"seq_id": 0}, 400, "missing number"),
    ("/optim_step", {"seq_id": True}, 400, "missing number"),
    ("/optim_step", {"seq_id": 9999}, 429, "too many calls in flight"),
    ("/optim_step", {"model_id": "none"}, 404, "unknown model"),
    ("/optim_step", {"adam_params": None, "optimizer_params": {"type": "dimuon"}}, 400, "AdamW"),
    ("/optim_step", {"adam_params": {"eps": 1 << 70}}, 400, "invalid body"),
    ("/retrieve_future", {"request_id": "@M:77"}, 404, "unknown future"),
    ("/retrieve_future", {"request_id": None}, 400, "missing request_id"),
    ("/save_weights", {"path": "../../x"}, 400, "invalid name"),
    ("/save_weights", {"path": 5}, 400, "missing path"),
    ("/save_weights", {"ttl_seconds": 5}, 400, "invalid ttl_seconds"),
    ("/save_weights", {"overwrite": "no"}, 400, "invalid overwrite: it must be true"),
    ("/load_weights", {"path": "tinker://@M/weights/no"}, 404, "missing checkpoint"),
    ("/load_weights", {"path": "/etc/passwd"}, 400, "invalid path"),
    ("/create_sampling_session", {"base_model": NAME + FULL}, 400, "is for training"),
    ("/create_sampling_session", {"sampling_session_seq_id": "../x"}, 400, "missing"),
    ("/save_weights_for_sampler", {"sampling_session_seq_id": "../x"}, 400, "missing"),
    ("/save_weights_for_sampler", {"kind": "x"}, 400, "unknown kind 'x'"),
    ("/asample", {"sampling_session_id": "none"}, 404, "unknown sampling session"),
    ("/asample", {"seq_id": "../x"}, 400, "missing seq_id"),
    ("/asample", {"prompt": {"chunks": [{"data": "x"}]}}, 400, "no images"),
    ("/asample", {"prompt": {"chunks": [{"tokens": [1 << 70]}]}}, 400, "chunks of token ids"),
    ("/asample", {"target_prompt_logprobs": {"shape": [2, 1], "data": [1 << 70, 1]}}, 400, "its data are token ids"),
    ("/asample", {"prompt_logprobs": 1}, 400, "invalid prompt_logprobs: it must be true or false, not 1"),
    ("/asample", {"sampling_params": None}, 400, "missing sampling_params"),
    *[
        ("/asample", {"sampling_params": {"max_tokens": 3, name: value}}, 400, f"invalid {name}")
        for name, values in {
            "stop": [5, {"a": 1}, [None], [1 << 70]],
            "temperature": [math.inf, math.nan, 1e-320, 10**400, True],
            "top_p": [-1],
            "seed": [1 << 70],
            "max_tokens": [True],
        }.items()
        for value in values
    ],
    ("/nonsense", b"{}", 404, "unknown path"),
    ("/audit", b"{}", 404, "not served: this server keeps no audit log"),
]


@served
async def test_bad_requests_are_refused_with_a_sentence_and_the_model_goes_on(call: Call) -> None:
    id, session = await model_and_base(call)
    names = {'"@N"': "1", "@M": id, "@S": session, "@B": f"{session}:sample:0"}
    for path, given, status, words in REFUSED:
        text = given if isinstance(given, bytes) else json.dumps(ALL_FIELDS[path] | given).encode()
        for short, name in names.items():
            text = text.replace(short.encode(), name.encode())
        code, found = await call(path, text)
        assert (code, words in found["error"]) == (status, True), (path, found)
    assert (await train(call, id, 1))["step:max"] == 1


WRONG: tuple[Any, ...] = (
    *("MISSING", None, -1, 1.5, 1 << 70, math.nan, True, "x", "tinker://../weights/x", "x" * 99_999),
    *([], [None], {"a": {}}),
)


def spoilt(given: Any, wrong: Any) -> Iterator[Any]:
    """The body with one of its fields replaced, for each field at any depth."""
    for key in given if isinstance(given, dict) else range(len(given)) if isinstance(given, list) else ():
        other = given.copy()
        if wrong == "MISSING":
            del other[key]
        else:
            other[key] = wrong
        yield other
        for inner in spoilt(given[key], wrong):
            other = given.copy()
            other[key] = inner
            yield other


@pytest.mark.slow
@served
async def test_no_wrong_value_of_a_field_is_a_fault_of_the_server(call: Call) -> None:
    id, session = await model_and_base(call)
    await result(call, "/save_weights", {"model_id": id, "seq_id": 1, "path": "kept"})
    numbers = dict.fromkeys(ALL_FIELDS, 2)
    for path, given in ALL_FIELDS.items():
        of_model = "/optim_step" if given.get("model_id") and given.get("seq_id") else path
        for wrong in WRONG:
            for body in spoilt(given, wrong):
                text = json.dumps(body).replace("@M", id).replace("@S", session).replace("@B", f"{session}:sample:0")
                status, found = await call(path, text.replace('"@N"', str(numbers[of_model])).encode())
                assert status < 500, (path, body, found)
                assert status < 400 or len(found["error"]) <= MOST_CHARACTERS
                if status != 200 or "request_id" not in found or path == "/retrieve_future":
                    continue
                numbers[of_model] += 1
                if not found["request_id"].endswith((":1", str(1 << 70))):  # a call that was there, or waits
                    told = str(await future(call, found["request_id"]))
                    assert "a fault of this server" not in told, (path, body, told)
    assert (await train(call, id, numbers["/optim_step"]))["step:max"] >= 1


@served
async def test_body_that_cannot_be_decoded_is_refused(call: Call) -> None:
    headers = {"Content-Encoding": "gzip"}
    status, found = await call("/create_session", b"no gzip", more=headers)
    assert (status, "invalid body: it cannot be decoded" in found["error"]) == (400, True)


@served
async def test_paths_that_are_not_served_say_so(call: Call) -> None:
    for path, why in NOT_SERVED.items():
        at = path.format(session_id="a", model_id="b", kind="weights", name="c")
        for method in ("GET", "POST", "PUT", "DELETE"):
            status, found = await call(at, method=method)
            assert (status, found["error"]) == (404, f"not served: {why}")
