"""Many light clients at one head: all come at once, and nobody's first message is lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

from areal_bus.messages import Join, Stop
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import Keyring, new_pair
from tests.support.strangers import JOB

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
CLIENTS = """
import json, sys
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import KeyPair, Keyring
from areal_bus.messages import Join, Stop
told = json.loads(sys.stdin.readline())
keys = Keyring(KeyPair(*told["own"]), told["seats"]) if told["own"] else None
buses = [Bus(f"generator-{n}.0", job=told["job"], keys=keys) for n in told["numbers"]]
print("ready", flush=True)
sys.stdin.readline()
for n, bus in zip(told["numbers"], buses):
    bus.connect("head", told["head"])
    bus.send("head", Join(f"generator-{n}.0", "generator", n, 0, "", 0, "host"))
heard = sum(isinstance(bus.receive(60)[1], Stop) for bus in buses)
print(heard, flush=True)
for bus in buses:
    bus.close(0)
"""


def crowd(n_processes: int, n_each: int, *, listen: str, keys: bool) -> float:
    """Seconds until the head has heard the Join of every client, and each client the answer. All start at one word."""
    own, theirs = new_pair(), new_pair()
    seats = {"head-0": own.public, "generator-*": theirs.public}
    head = Bus("head", job=JOB, listen=listen, keys=Keyring(own, seats) if keys else None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENTS], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(n_processes)
    ]
    try:
        for number, process in enumerate(processes):
            numbers = list(range(number * n_each, (number + 1) * n_each))
            pair = [theirs.public, theirs.secret] if keys else []
            told = {"own": pair, "seats": seats, "job": JOB, "numbers": numbers, "head": head.endpoint}
            say(process, json.dumps(told))
        assert [answer(process) for process in processes] == ["ready"] * n_processes
        began = time.monotonic()
        for process in processes:
            say(process, "go")
        heard = set()
        while len(heard) < n_processes * n_each:
            left_s = began + PATIENCE_S - time.monotonic()
            got = head.receive(max(left_s, 0.001))
            assert got is not None, f"{len(heard)} of {n_processes * n_each} were heard; refused: {head.refused}"
            assert isinstance(got[1], Join)
            assert got[0] == got[1].name
            heard.add(got[0])
            head.send(got[0], Stop("welcome"))
        assert [answer(process) for process in processes] == [str(n_each)] * n_processes
        assert not head.refused
        assert not head.send_queues.undelivered
        return time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        head.close(0)


def say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_64_clients_connect_at_once(tmp_path: Path) -> None:
    assert crowd(2, 32, listen=f"ipc://{tmp_path}/head", keys=False) < PATIENCE_S
