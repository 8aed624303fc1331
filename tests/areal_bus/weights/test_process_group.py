"""Stores and groups of pushes ask no name server."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal_bus.errors import ConfigError
from areal_bus.weights.process_group import check_torch

ROOT = Path(__file__).parents[3]
NAME_SERVER = "127.53.53.53"
CODE = """
import os, sys
from areal_bus.weights.process_group import join_store, print_numeric_peers, serve_store
from areal_bus.weights.process_group import StoreListener

def connect():
    store, endpoint = serve_store("127.0.0.9")
    client = join_store(endpoint, 10.0)
    client.clone().set("key", "value")
    StoreListener("127.0.0.9", "").device
    assert store.get("key") == b"value"

for is_mended in (False, True):
    if os.fork() == 0:
        if is_mended:
            print_numeric_peers()
            assert "RES_OPTIONS" not in os.environ
        connect()
        os._exit(0)
    assert os.wait()[1] == 0
    print("done", flush=True)
    sys.stdin.readline()
"""


class NameServer:
    """Answers that a name does not exist, and counts."""

    def __init__(self, port: socket.socket) -> None:
        self.n_asked = 0
        self._port = port
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            question, client = self._port.recvfrom(4096)
            self.n_asked += 1
            self._port.sendto(question[:2] + b"\x81\x83" + question[4:], client)


@pytest.mark.slow
def test_a_store_asks_no_name_server_for_its_peers(tmp_path: Path) -> None:
    """Torch alone does, and waits 10 s for one that does not answer."""
    port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        port.bind((NAME_SERVER, 53))
    except PermissionError:
        pytest.skip("a name server listens on port 53: only root may")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("another /etc/resolv.conf needs a mount namespace, which this user may not have")
    server = NameServer(port)
    (settings := tmp_path / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")
    (script := tmp_path / "connect.py").write_text(CODE)
    line = f"mount --bind {settings} /etc/resolv.conf && exec {sys.executable} {script}"
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", line],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked = []
        for _ in range(2):
            assert process.stdout.readline() == "done\n"
            asked.append(server.n_asked)
            print(file=process.stdin, flush=True)
    assert process.returncode == 0
    alone, with_ours = asked[0], asked[1] - asked[0]
    assert alone > 0
    assert with_ours == 0
    port.close()


def test_a_store_names_the_limit_of_open_files_that_its_members_exceed() -> None:
    code = (
        "import resource\n"
        "from areal_bus.weights.process_group import serve_store\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1024))\n"
        "serve_store('127.0.0.1', n_members=224)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024\n"
        "serve_store('127.0.0.1', n_members=225)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "needs 1028 open files to push weights to 225 generators: the limit is 1024" in done.stderr


def test_a_torch_without_the_names_that_pushes_need_is_refused_with_a_sentence() -> None:
    check_torch()

    class Other:
        class _Options:
            _timeout = _threads = None

    with pytest.raises(
        ConfigError, match=r"lacks _Options\._devices, create_device, which weight pushes need; install"
    ):
        check_torch(Other)
    with pytest.raises(ConfigError, match=r"lacks _Options\._timeout, _Options\._devices"):
        check_torch(object)
