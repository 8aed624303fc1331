"""The worker process of a reward function: `python -m actors.rewards.worker PARENT_PID`.

Its first frame names the function and the file for its output; it replies {"ready": true, "needs_ids": whether it
takes token ids, "exposed": whether its programs could kill it} or {"broken": reason}. Then each frame is one score and
each reply a verdict. The pool enforces deadlines by killing the process.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from actors.data.fields import UNREAD
from actors.processes.ipc import LENGTH, REPLY_BYTES, REQUEST_BYTES, check, pack, read
from actors.rewards.binding.columns import ADDED, TOKEN_IDS, decode_ids
from actors.rewards.binding.values import read_value
from actors.rewards.loading import load_reward
from actors.rewards.protocol import RewardFunction, Score
from actors.runtime.user_code import definition, innermost, is_ours, known_fields, place_of, trace_of
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described, text_of

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FILE_BYTES = 1 << 30  # largest file that a score may write
PRINTED_BYTES = 64 << 20  # largest size of the output file; later output is discarded
TRACE_BYTES = 30_000  # of a traceback as JSON: with the error text it stays below REPLY_BYTES


def main(parent: int) -> None:
    die_with(parent)
    limit_damage()
    requests, replies = take_channel()
    order = read_frame(requests)
    if order is None:
        return
    keep_prints(order.get("prints"))
    try:
        function = load_reward(order["function"], order["folder"], order.get("fields"), options=order.get("options"))
    except ConfigError as error:
        reply(replies, {"broken": text_of(error)})
        return
    exposed = is_exposed()
    if exposed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    needs_ids = bool(getattr(function, "needs_token_ids", False))
    reply(replies, {"ready": True, "needs_ids": needs_ids, "exposed": exposed})
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    myself = os.getpid()
    while (request := read_frame(requests)) is not None:
        limit_prints()
        if order.get("fresh_process"):
            answer = verdict_of_fork(function, request, channel=(requests, replies))
        else:
            answer = verdict(function, request)
        if os.getpid() != myself:
            os._exit(1)  # the function forked: the child must not reply
        reply(replies, {"id": request["id"], **answer})


def die_with(parent: int) -> None:
    """Get SIGKILL when the thread that started this process ends; exit at once when it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def is_exposed() -> bool:
    """Whether the function runs programs that can kill this process: in the sandbox without namespaces."""
    sandbox = sys.modules.get("actors.rewards.sandbox.sandbox")
    return sandbox is not None and sandbox.find_level() == "rlimits"


def limit_damage() -> None:
    """Disable core files, and make the OOM killer prefer this process to the actors."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not available in every container; only a preference
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Take the pipes from stdin and stdout, and connect both to /dev/null for user code.

    Processes that user code starts do not inherit the pipes. stderr stays the actor's. `keep_prints` sends standard
    output to a file.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return requests, replies


def keep_prints(path: str | None) -> None:
    """Append standard output to this file, line by line. Without a file, output is discarded."""
    if path is not None and isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # disk full or no permission: only the output is lost
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, 1)
            os.close(file)
            sys.stdout.reconfigure(line_buffering=True)


def limit_prints() -> None:
    """Discard further output once the file has PRINTED_BYTES."""
    with contextlib.suppress(OSError):  # user code has closed it
        if os.fstat(1).st_size > PRINTED_BYTES:
            os.write(1, f"\n(over {PRINTED_BYTES >> 20} MiB: later output is discarded)\n".encode())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)


def read_frame(requests: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None at the end of the channel."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    check(length, cap_bytes=REQUEST_BYTES)
    body = requests.read(length)
    return read(body) if len(body) == length else None


def reply(replies: BinaryIO, record: dict[str, Any]) -> None:
    replies.write(pack(record, cap_bytes=REPLY_BYTES))
    replies.flush()


def verdict(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """Run the function: its reward, or its error (I10: an error never becomes a reward)."""
    row: dict[str, Any] = {}
    try:
        row = json.loads(request["row"])
        if "ids" in request:
            row[TOKEN_IDS] = decode_ids(request)
        with shut_sandbox() if request.get("shut") else contextlib.nullcontext():
            value = function(request["prompt"], request["completion"], row)
        return {"status": "value", **read_value(value)}
    except BaseException as error:  # noqa: BLE001 (any exception, SystemExit too, is an error verdict)
        return {"status": "error", **explain(error, function, row)}


def shut_sandbox() -> contextlib.AbstractContextManager[None]:
    """Programs do not run meanwhile."""
    from actors.rewards.sandbox import sandbox

    return sandbox.shut()


def verdict_of_fork(
    function: RewardFunction, request: dict[str, Any], *, channel: tuple[BinaryIO, BinaryIO]
) -> dict[str, Any]:
    """The verdict of a fork that ends with it. Nothing that the function changes in its process stays, and it cannot
    write to the channel.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for file in channel:
            os.close(file.fileno())
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            out.write(json.dumps(verdict(function, request)).encode()[:REPLY_BYTES])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read(REPLY_BYTES)
    _, status = os.waitpid(child, 0)
    try:
        return checked_answer(json.loads(answer))
    except (ValueError, TypeError, KeyError):
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and is_exposed() and not request.get("shut"):
            return verdict_of_fork(function, {**request, "shut": True}, channel=channel)
        return {"status": "error", "error": f"the process of the score gave no verdict: it ended by exit code {code}"}


def checked_answer(answer: Any) -> dict[str, Any]:
    """A verdict of `verdict`. Raises ValueError, TypeError or KeyError for anything else."""
    if answer["status"] == "value":
        return {"status": "value", **read_value(Score(answer["reward"], answer["correct"], answer.get("parts", {})))}
    return {"status": "error", **{name: str(answer[name]) for name in ("error", "place", "trace") if name in answer}}


def explain(error: BaseException, function: object, row: Mapping[str, Any]) -> dict[str, str]:
    """The error of a function that was called for this row; for user code with place and traceback."""
    place = place_of(error) or ("" if is_ours(function) else innermost(error) or definition(function))
    text = described(error)
    fields = known_fields(error, {name: value for name, value in row.items() if name not in ADDED}, row.get(UNREAD, {}))
    if not place:
        return {"error": f"{text}{fields}"}
    trace = trace_of(error)
    if len(json.dumps(trace)) > TRACE_BYTES:  # JSON may need twelve bytes for a character
        trace = trace[-TRACE_BYTES // 12 :]
    return {"error": f"{text} ({place}){fields}", "place": place, "trace": trace}


if __name__ == "__main__":
    main(int(sys.argv[1]))
