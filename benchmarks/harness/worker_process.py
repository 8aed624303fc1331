"""One side of a comparison: a worker process that measures on request.

Protocol: JSON lines (see `benchmarks.harness.worker_main`). Our sides run in this interpreter, peers in that of
`make bench-peers`.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import areal_bus
from areal_bus.errors import ConfigError

ROOT = Path(areal_bus.__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}  # as a job's learner has
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
START_S = 180.0  # imports of a peer on a loaded machine
ANSWER_S = 3600.0  # a whole run of a peer on a loaded machine
END_S = 5.0
READ_BYTES = 1 << 20


def ours(module: str, *, before: Sequence[str] = ()) -> "Side":
    """Our half of a bench, `benchmarks.MODULE`. `before` comes before its command line."""
    return Side(Path(sys.executable), f"benchmarks.{module}", before=before)


def peer(module: str) -> "Side":
    """A peer's half, `benchmarks.MODULE`. Raises ConfigError where the peers are not installed."""
    if not PEERS.is_file():
        raise ConfigError(f"this bench measures a peer beside us and {PEERS} is not there: run `make bench-peers`")
    return Side(PEERS, f"benchmarks.{module}")


class Side:
    """A process that measures, from the moment it is entered to the end of the block.

    Ours or a peer's, it keeps its memory as a job's learner does (KEEPING), and begins with one thread. Its temporary
    files go with it.
    """

    def __init__(self, python: Path, module: str, *, before: Sequence[str] = ()) -> None:
        self._python, self._module, self._before = python, module, before
        self._unread = b""

    def __enter__(self) -> Self:
        self._complaints = tempfile.TemporaryFile()
        self._folder = tempfile.TemporaryDirectory(prefix="areal-bus-bench-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [*self._before, str(self._python), "-m", self._module],
            cwd=ROOT,
            env={**KEEPING, **os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "TMPDIR": self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )
        try:
            self.about: dict[str, Any] = self._read(START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it exited during a request
                    pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()
        self._folder.cleanup()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call its function `do` and return the result. Raises ConfigError when it fails, exits or does not answer."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a request without waiting for the answer. Raises ConfigError when the worker has exited."""
        if self._process.stdin is None:
            raise RuntimeError("a process started with pipes must have them")
        line = json.dumps({"do": do, "with": arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Of the question asked first that has none yet."""
        return self._read(ANSWER_S)["value"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("a process started with pipes must have them")
        deadline = time.monotonic() + timeout_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise ConfigError(f"{self._module} must answer within {timeout_s:g} s: it has not")
            data = os.read(descriptor, READ_BYTES)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self._module} must measure without error: {answer['error']}")
        return answer

    def _ended(self) -> ConfigError:
        try:
            code: int | None = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None  # it closed its pipes but still runs
        self._complaints.seek(0)
        last = self._complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
        mend = ": run `make bench-peers`" if self._python == PEERS else ""
        return ConfigError(f"{self._module} must stay to be measured; it ended with {code} ({last[:300]}){mend}")
