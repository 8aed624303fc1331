import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from areal_serve.front import BODY_BYTES
from tests.areal_serve.processes import Server, call, model_name, pids, post, raw, result, serving
from tests.areal_serve.test_front import pass_body
from tests.areal_serve.test_wire import dense, part, varint

pytestmark = pytest.mark.slow

ADDRESS = "127.0.0.2"  # a second one of this host: as a network interface, without a network


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("tiny"), "configs/tiny.toml", "--set", f"bus.interface={ADDRESS}") as found:
        yield found


def test_server_listens_on_its_interface_only_and_asks_for_its_key(server: Server) -> None:
    url = urlsplit(server["TINKER_BASE_URL"])
    assert url.hostname == ADDRESS
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", url.port or 0), 10)
    for key in ("", "tml-another-key", server["TINKER_API_KEY"][:-1]):
        status, found = raw(server, post(server, "/create_session", b"{}", key=key))
        assert (status, b"wrong API key" in found) == (401, True)
        assert server["TINKER_API_KEY"].encode() not in found
    status, found = raw(server, b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (status, b"wrong API key" in found) == (401, True)
    assert "session_id" in call(server, "/create_session", {})


def malformed(server: Server) -> list[tuple[bytes, int, bytes]]:
    """Bytes, the status of the answer and words of it. 0: the connection closes, or the rest never comes."""
    key, chunks = f"X-API-Key: {server['TINKER_API_KEY']}", "Transfer-Encoding: chunked"
    path, zipped = "/create_session", "Content-Encoding: gzip"
    get = f"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{key}\r\n\r\n".encode()
    return [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400, b""),  # TLS to a port of plain HTTP
        (b"POST\r\n\r\n", 400, b""),
        (b"F@O /api/v1/healthz " + get, 400, b""),
        (b"GET /api/v1/nonsense " + get, 404, b"unknown path"),
        (b"GET /api/v1/create_session " + get, 405, b"unknown path"),
        (b"GET /api/v1/" + b"a" * 20_000 + b" " + get, 400, b""),
        (b"GET /api/v1/training_runs/../../etc/passwd " + get, 404, b"unknown path"),
        (b"GET /api/v1/training_runs/%2e%2e " + get, 404, b"unknown training run"),
        (b"GET /api/v1/files/%2e%2e/x/y?expires=1&signature=a " + get, 403, b"wrong signature"),
        (b"GET /api/v1/checkpoints?offset=x " + get, 400, b"invalid page"),
        (post(server, path, b"{}", f"X-Long: {'a' * 20_000}"), 400, b""),
        (post(server, path, b"{}", length="Content-Length: -5"), 400, b""),
        (post(server, path, b"{}", length="Content-Length: 2\r\nContent-Length: 3"), 400, b""),
        (post(server, path, b"{}", length="Content-Length: 50"), 0, b""),
        (post(server, path, b"zz\r\n{}\r\n0\r\n\r\n", length=chunks), 400, b""),
        (post(server, path, b"5\r\n{}", length=chunks), 0, b""),
        (post(server, path, b" " * 10_000_000), 413, b"body too large"),
        (post(server, path, b"f\r\n" + b" " * 15 + b"\r\n0\r\n\r\n", length=chunks), 400, b"a JSON object"),
        (post(server, path, b"no gzip", zipped), 400, b"cannot be decoded"),
        (post(server, path, gzip.compress(b" " * (4 * BODY_BYTES)), zipped), 413, b"body too large"),
        (post(server, path, gzip.compress(b"{}" * 99)[:20], zipped), 400, b""),
        (post(server, path, '{"tags":[]}'.encode("utf-16")), 400, b"a JSON object"),
        (post(server, path, b'{"display_name": "\\ud800"}'), 400, b"a JSON object"),
        (post(server, path, b"[" * 100_000), 400, b"a JSON object"),
        (post(server, path, b"null"), 400, b"not a NoneType"),
    ]


def nan_pass(id: str, seq: int) -> bytes:
    """A pass of one datum with an advantage that is no number."""
    datum = part(1, part(1, part(1, np.array([3, 4], "<i4").tobytes())))
    for name, value in (
        ("target_tokens", dense(np.array([4, 5], "<i8"), 2)),
        ("logprobs", dense(np.zeros(2, "<f4"), 1)),
        ("advantages", dense(np.array([1, np.nan], "<f4"), 1)),
    ):
        datum += part(2, part(1, name.encode()) + part(2, value))
    return part(1, id.encode()) + varint(2 << 3) + varint(seq) + part(3, datum) + part(4, b"ppo")


def refused(server: Server, id: str) -> list[tuple[str, Any, int, bytes]]:
    """Requests in the form of HTTP, which the server refuses at once."""
    session = id.partition(":")[0]
    model = {"session_id": session, "model_seq_id": 5, "base_model": "Other/Model", "lora_config": {"rank": 2}}
    asked = {"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "prompt": {"chunks": [{"tokens": [3]}]}}
    return [
        ("/create_model", model, 404, b"unknown model"),
        ("/create_model", {**model, "session_id": "none", "base_model": "tiny"}, 404, b"unknown"),
        ("/retrieve_future", {"request_id": f"{id}:77"}, 404, b"unknown future"),
        ("/forward_backward", b"\xff" * 1000, 400, b"invalid body"),
        ("/forward_backward", pass_body(id, 1)[:-3], 400, b"invalid body"),
        ("/forward_backward", pass_body("none", 1), 404, b"unknown model"),
        ("/forward_backward", pass_body(id, 1 << 40), 429, b"too many calls in flight"),
        ("/asample", {**asked, "sampling_params": {"temperature": float("nan")}}, 400, b"invalid temperature"),
        ("/asample", {**asked, "num_samples": 1 << 40, "sampling_params": {}}, 400, b"num_samples"),
        ("/asample", {**asked, "sampling_session_id": "none"}, 404, b"unknown sampling session"),
        ("/save_weights", {"model_id": id, "seq_id": 1, "path": "../../x"}, 400, b"invalid name"),
        ("/load_weights", {"model_id": id, "seq_id": 1, "path": "/etc/passwd"}, 400, b"invalid path"),
    ]


def test_bad_input_gets_an_answer_and_ends_no_process(server: Server) -> None:
    """The session says that its SDK is of another version: what counts is what it sends."""
    before = [pids(server, role) for role in ("front", "trainer", "sampler")]
    session = call(server, "/create_session", {"sdk_version": "99.0.0"})["session_id"]
    given = {"session_id": session, "model_seq_id": 0, "base_model": model_name(server), "lora_config": {"rank": 2}}
    id = result(server, "/create_model", given)["model_id"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model_name(server)}
    call(server, "/create_sampling_session", sampler)
    for data, status, words in malformed(server):
        code, found = raw(server, data, ends=status == 0)
        assert code == status or (status == 0 and code == 400), (data[:200], code, found)
        assert words in found, (data[:200], found)
    for path, body, status, words in refused(server, id):
        code, found = raw(server, post(server, path, body if isinstance(body, bytes) else json.dumps(body).encode()))
        assert (code, words in found) == (status, True), (path, body, found)
    for seq, (body, error) in enumerate(
        (
            (nan_pass(id, 1), "advantages of datum 0 holds a NaN"),
            (pass_body(id, 2, tokens=[3] * 9999), "datum 0 is too long or empty"),
            (pass_body(id, 3, "no_such_loss"), "unknown loss 'no_such_loss'"),
            (pass_body(id, 4, tokens=[3, 9_999_999]), "unknown token in datum 0"),
        ),
        1,
    ):
        assert error in result(server, "/forward_backward", body)["error"], seq
    assert isinstance(result(server, "/forward_backward", pass_body(id, 5)), bytes)
    step = {"model_id": id, "seq_id": 6, "adam_params": {"learning_rate": 1e-3}}
    assert result(server, "/optim_step", step)["metrics"]["step:max"] == 1
    assert [pids(server, role) for role in ("front", "trainer", "sampler")] == before
