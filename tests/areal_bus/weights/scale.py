"""How a push of a small model grows with its members: `python -m tests.areal_bus.weights.scale ROUTE N ...`.

ROUTE is "shared" or "gloo". For each N, forks N members without a model from this process, pushes N_PUSHES versions of
50 KB to them over loopback, checks every member's digest, and prints one JSON line.
"""

import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.route import Route
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import digest_of, take_snapshot

N_PUSHES = 6
TIMEOUT_S = 300.0


def measure(route: Route, n_members: int) -> dict[str, float | int | str]:
    """Seconds of the first push and of later ones, and the CPU time of root and members for each later push."""
    with members(n_members) as connections:
        store, endpoint = serve_store("127.0.0.1")
        root = WeightSender(store, interface="lo", address="127.0.0.1", route=route)
        names = [name_of(index) for index in range(n_members)]
        pushes, cpu, of_members = [], [], []
        for version in range(N_PUSHES):
            began = time.process_time()
            parameters = {f"layer.{index}": torch.randn(128, 10) for index in range(10)}
            sent = take_snapshot(
                version, parameters, bucket_bytes=1 << 20, shared_on=torch.device("cpu") if route == "shared" else None
            )
            if sent is None:
                raise RuntimeError("the root takes a snapshot")
            begin = PushBegin(version, version, 0, names, endpoint, TIMEOUT_S)
            for connection in connections:
                connection.send(begin)
            pushes.append(root.push(sent, begin).receive_s)
            answers = [connection.recv() for connection in connections]
            if {digest for digest, _ in answers} != {sent.digest}:
                raise RuntimeError(f"every member holds the root's bits; one holds something else: {answers}")
            cpu.append(time.process_time() - began)
            of_members.append(statistics.mean(cpu_s for _, cpu_s in answers))
        root.close()
    return {
        "route": route,
        "members": n_members,
        "first_push_s": round(pushes[0], 3),
        "push_s": round(statistics.median(pushes[1:]), 3),
        "push_s_best": round(min(pushes[1:]), 3),
        "root_cpu_ms": round(1e3 * statistics.median(cpu[1:])),
        "member_cpu_ms": round(1e3 * statistics.median(of_members[1:]), 2),
    }


@contextmanager
def members(n: int) -> Iterator[list[Connection]]:
    """Forked before this process has a thread. Each ends when its connection closes."""
    gc.freeze()
    ours: list[Connection] = []
    processes: list[int] = []
    for index in range(n):
        here, there = Pipe()
        process = os.fork()
        if not process:
            for connection in (*ours, here):
                connection.close()
            os._exit(serve(name_of(index), there))
        there.close()
        ours.append(here)
        processes.append(process)
    try:
        yield ours
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            os.waitpid(process, 0)


def serve(name: str, connection: Connection) -> int:
    """Take part in each push that arrives; answer with the digest of what was received and the CPU seconds."""
    member = WeightReceiver(name, address="127.0.0.1", interface="lo")
    spare = None
    while True:
        try:
            begin = connection.recv()
        except EOFError:
            return 0
        began = time.process_time()
        spare = member.receive(begin, spare).tensors
        connection.send((digest_of(spare), time.process_time() - began))


def name_of(index: int) -> str:
    return f"generator-{index}.0"


def main(route: Route, *counts: str) -> None:
    torch.set_num_threads(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    for count in counts:  # each in a process of its own, so that no thread exists when members are forked
        process = os.fork()
        if not process:
            print(json.dumps(measure(route, int(count))), flush=True)
            os._exit(0)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
