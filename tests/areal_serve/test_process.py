import gzip
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from areal_serve.front import BODY_BYTES
from tests.areal_serve.processes import Server, call, model_name, pids, post, raw, result, serving
from tests.areal_serve.test_front import pass_body

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
    status, found = raw(server, post(server, "/create_session", b"{}", key=server["TINKER_API_KEY"][:-1]))
    assert (status, b"wrong API key" in found, server["TINKER_API_KEY"].encode() in found) == (401, True, False)
    assert "session_id" in call(server, "/create_session", {})


def malformed(server: Server) -> list[tuple[bytes, int, bytes]]:
    """Bytes, the status of the answer and words of it. 0: the connection closes, or the rest never comes."""
    key, chunks = f"X-API-Key: {server['TINKER_API_KEY']}", "Transfer-Encoding: chunked"
    path, zipped = "/create_session", "Content-Encoding: gzip"
    get = f"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{key}\r\n\r\n".encode()
    return [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400, b""),  # TLS to a port of plain HTTP
        (b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 401, b"wrong API key"),
        (b"POST\r\n\r\n", 400, b""),
        (b"F@O /api/v1/healthz " + get, 400, b""),
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
        (post(server, path, b"f\r\n" + b" " * 15 + b"\r\n0\r\n\r\n", length=chunks), 400, b"a JSON object"),
        (post(server, path, gzip.compress(b" " * (4 * BODY_BYTES)), zipped), 413, b"body too large"),
        (post(server, path, gzip.compress(b"{}" * 99)[:20], zipped), 400, b""),
        (post(server, path, '{"tags":[]}'.encode("utf-16")), 400, b"a JSON object"),
    ]


def test_bad_input_gets_an_answer_and_ends_no_process(server: Server) -> None:
    """The session says that its SDK is of another version: what counts is what it sends."""
    before = [pids(server, role) for role in ("front", "trainer", "sampler")]
    session = call(server, "/create_session", {"sdk_version": "99.0.0"})["session_id"]
    given = {"session_id": session, "model_seq_id": 0, "base_model": model_name(server), "lora_config": {"rank": 2}}
    id = result(server, "/create_model", given)["model_id"]
    for data, status, words in malformed(server):
        code, found = raw(server, data, ends=status == 0)
        assert code == status or (status == 0 and code == 400), (data[:200], code, found)
        assert words in found, (data[:200], found)
    refused = result(server, "/forward_backward", pass_body(id, 1, "no_such_loss"))
    assert "unknown loss 'no_such_loss'" in refused["error"]
    assert isinstance(result(server, "/forward_backward", pass_body(id, 2)), bytes)
    step = {"model_id": id, "seq_id": 3, "adam_params": {"learning_rate": 1e-3}}
    assert result(server, "/optim_step", step)["metrics"]["step:max"] == 1
    assert [pids(server, role) for role in ("front", "trainer", "sampler")] == before
