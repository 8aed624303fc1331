"""One worker: the process that a reward function runs in, `python -m actors.rewards.worker PARENT_PID`.

Its first frame names the function; it answers {"ready": true} or {"broken": why}. Then each frame is one score, and
each answer a verdict. The pool kills it when a score takes too long, so nothing here keeps time.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, SupportsFloat

from actors.rewards.framing import LENGTH, REPLY_BYTES, REQUEST_BYTES, check, pack, read
from actors.rewards.loading import load_reward
from actors.rewards.protocol import RewardFunction, Score
from areal_bus.errors import ConfigError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ERROR_CHARACTERS = 2000
FILE_BYTES = 1 << 30  # longest file that a score may write
LARGEST = 1e9  # reward, in size: its square must be far from the end of float32


def main(parent: int) -> None:
    die_with(parent)
    limit_damage()
    requests, replies = take_channel()
    order = read_frame(requests)
    if order is None:
        return
    try:
        function = load_reward(order["function"], order["folder"], order.get("fields"))
    except ConfigError as error:
        reply(replies, {"broken": str(error)[:ERROR_CHARACTERS]})
        return
    reply(replies, {"ready": True})
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    myself = os.getpid()
    while (request := read_frame(requests)) is not None:
        answer = verdict(function, request)
        if os.getpid() != myself:
            os._exit(1)  # the function forked: its child has no say
        reply(replies, {"id": request["id"], **answer})


def die_with(parent: int) -> None:
    """SIGKILL when the thread that started this process ends; at once when it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def limit_damage() -> None:
    """No core files; and when memory runs out, the kernel takes this process before the actors."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not on every kernel and container, and only a preference
        Path("/proc/self/oom_score_adj").write_text("1000")


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """The pipes that stdin and stdout were; what the user's function reads or prints now meets /dev/null.

    Processes that it starts do not inherit the pipes. stderr stays the actor's, for people.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return requests, replies


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
    """A number that the function stands for, or what went wrong (I10: never a number in place of it)."""
    try:
        value = function(request["prompt"], request["completion"], json.loads(request["row"]))
        return {"status": "value", **read_value(value)}
    except BaseException as error:  # noqa: BLE001 (whatever the function raises, SystemExit too, is its verdict)
        text = f"{type(error).__name__}: {error}"
        return {"status": "error", "error": text[:ERROR_CHARACTERS].encode(errors="replace").decode()}


def read_value(value: object) -> dict[str, Any]:
    """Reward and correctness of what a reward function returned. Raises TypeError or ValueError when it is neither."""
    score = value if isinstance(value, Score) else None
    number: object = score.reward if score else value
    correct: object = score.correct if score else value if isinstance(value, bool) else None
    if not isinstance(correct, bool | None):
        raise TypeError(f"Score.correct must be True, False or None: it is a {type(correct).__name__}")
    if isinstance(number, str | bytes) or not isinstance(number, (float, int, SupportsFloat)):  # the slow one last
        raise TypeError(f"a reward function must return a number or a Score: it returned a {type(number).__name__}")
    reward = float(number)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite: it is {reward}")
    if abs(reward) > LARGEST:
        raise ValueError(f"a reward must be at most {LARGEST:g} in size: it is {reward:g}")
    return {"reward": reward, "correct": correct}


if __name__ == "__main__":
    main(int(sys.argv[1]))
