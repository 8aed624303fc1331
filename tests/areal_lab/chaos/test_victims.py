"""Which processes may suffer a fault, and how connections are cut: real sockets and processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from actors.engines.servers import watch_parent
from areal_lab.chaos.victims import cut, send, servers_of
from tests.support.polling import wait_until

CLIENT = """
import socket, sys
tcp, unix = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), socket.socket(socket.AF_UNIX)
unix.connect(sys.argv[2])
pair = socket.socketpair()
print("connected", flush=True)
ends = [one.recv(1) for one in (tcp, unix)]
pair[0].send(b"x")
print(ends, pair[1].recv(1), flush=True)
"""


@contextlib.contextmanager
def running(*words: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_cut_ends_connections_over_tcp_and_named_unix_sockets_on_both_sides_and_no_pair(tmp_path: Path) -> None:
    path = str(tmp_path / "listener")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        with running("-c", CLIENT, str(tcp.getsockname()[1]), path) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "connected\n"
            accepted = [tcp.accept()[0], unix.accept()[0]]
            assert cut(client.pid) == 2
            assert client.stdout.readline() == "[b'', b''] b'x'\n"
            assert [one.recv(1) for one in accepted] == [b"", b""]
            for one in accepted:
                one.close()
    assert cut(client.pid) == 0  # it has ended
    assert not send(client.pid, signal.SIGKILL)


def test_the_servers_of_a_generator_are_found_below_their_keepers() -> None:
    """Other children, as the workers of an agent, are not servers."""
    sleep = f"{sys.executable} -c 'import time; time.sleep(100)'"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, {watch_parent.__file__!r}, 'sleep', '100'], stdin=subprocess.PIPE)\n"
        f"subprocess.run({sleep!r}, shell=True)"
    )
    with running("-c", code) as generator:
        wait_until(lambda: len(servers_of(generator.pid)) == 1)
        (server,) = servers_of(generator.pid)
        wait_until(lambda: Path(f"/proc/{server}/comm").read_text(encoding="utf-8") == "sleep\n")
        assert send(server, signal.SIGKILL)
        wait_until(lambda: not servers_of(generator.pid))
    assert not os.path.exists(f"/proc/{server}")
