"""The worker process of a reward function: `python -m actors.rewards.worker PARENT_PID`.

First frame: the order; reply "ready" or "broken". Then a score a frame, a verdict a reply; the pool has the deadlines.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from actors.data.fields import UNREAD
from actors.processes.ipc import REPLY_BYTES, Channel, keep_prints, limit_damage, limit_prints
from actors.rewards.binding.group import GroupFunction, read_rewards
from actors.rewards.binding.values import ADDED, TOKEN_IDS, decode_ids, read_value
from actors.rewards.loading import load_group, load_reward
from actors.rewards.protocol import RewardFunction, Score
from actors.runtime.user_code import definition, innermost, is_ours, known_fields, place_of, trace_of
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import cut, described, text_of

FILE_BYTES = 1 << 30  # largest file that a score may write
TRACE_BYTES = 30_000  # of a traceback as JSON: with the error text it stays below REPLY_BYTES


def main(parent: int) -> None:
    channel = Channel(parent)
    limit_damage()
    order = channel.read()
    if order is None:
        return
    keep_prints(order.get("prints"))
    try:
        functions = load_functions(order)
    except ConfigError as error:
        channel.reply({"broken": text_of(error)})
        return
    exposed = is_exposed()
    if exposed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    needs_ids = any(getattr(one, "needs_token_ids", False) for one in (functions.score, functions.check))
    channel.reply({"ready": True, "needs_ids": needs_ids, "exposed": exposed})
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    for request in channel:
        limit_prints()
        if order.get("fresh_process"):
            answer = verdict_of_fork(functions, request, channel)
        else:
            answer = verdict(functions, request)
        channel.reply({"id": request["id"], **answer})


class Functions(NamedTuple):
    """What this worker calls: the reward function, the group reward and the second grader, where there are any."""

    score: RewardFunction
    group: GroupFunction | None = None
    check: RewardFunction | None = None


def load_functions(order: Mapping[str, Any]) -> Functions:
    """Raises ConfigError when one of them does not load."""
    folder, fields, options = order["folder"], order.get("fields"), order.get("options")
    return Functions(
        load_reward(order["function"], folder, fields, options=options),
        load_group(order["group"], folder, options=options) if order.get("group") else None,
        load_reward(order["check"], folder, fields, options=options, key="reward.check.function")
        if order.get("check")
        else None,
    )


def is_exposed() -> bool:
    """Whether the function runs programs that can kill this process: in the sandbox without namespaces."""
    sandbox = sys.modules.get("actors.rewards.sandbox")
    return sandbox is not None and sandbox.find_level() == "rlimits"


def verdict(functions: Functions, request: dict[str, Any]) -> dict[str, Any]:
    """Run the function that is asked for: its reward, or its error (I10: an error never becomes a reward)."""
    row: dict[str, Any] = {}
    try:
        row = read_row(request["row"])
        if functions.group is not None and "samples" in request:
            rewards = functions.group(request["prompt"], json.loads(request["samples"]), row)
            return {"status": "value", "rewards": rewards}
        if "ids" in request:
            row[TOKEN_IDS] = decode_ids(request)
        with shut_sandbox() if request.get("shut") else contextlib.nullcontext():
            value = function_of(functions, request)(request["prompt"], request["completion"], row)
        return {"status": "value", **read_value(value)}
    except BaseException as error:  # noqa: BLE001 (any exception, SystemExit too, is an error verdict)
        called = functions.group if "samples" in request else function_of(functions, request)
        return {"status": "error", **explain(error, called, row)}


def function_of(functions: Functions, request: Mapping[str, Any]) -> RewardFunction:
    return functions.check if request.get("check") and functions.check is not None else functions.score


def read_row(text: str) -> dict[str, Any]:
    """The row, which a guest may have written. Raises ValueError for anything but a JSON object."""
    row = json.loads(text)
    if not isinstance(row, dict) or not isinstance(row.get(UNREAD, {}), dict):
        raise ValueError(f"invalid row: it must be a JSON object, and is {cut(text, 80)!r}")
    return row


def shut_sandbox() -> contextlib.AbstractContextManager[None]:
    """Programs do not run meanwhile."""
    from actors.rewards import sandbox

    return sandbox.shut()


def verdict_of_fork(functions: Functions, request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The verdict of a fork that ends with it: nothing of it stays, and it cannot write to the channel."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        channel.close()
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            out.write(json.dumps(verdict(functions, request)).encode()[:REPLY_BYTES])
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
            return verdict_of_fork(functions, {**request, "shut": True}, channel)
        return {"status": "error", "error": f"the process of the score gave no verdict: it ended by exit code {code}"}


def checked_answer(answer: Any) -> dict[str, Any]:
    """A verdict of `verdict`. Raises ValueError, TypeError or KeyError for anything else."""
    if "rewards" in answer:
        return {"status": "value", "rewards": read_rewards(answer["rewards"], len(answer["rewards"]))}
    if answer["status"] == "value":
        return {"status": "value", **read_value(Score(answer["reward"], answer["correct"], answer.get("parts", {})))}
    return {"status": "error", **{name: str(answer[name]) for name in ("error", "place", "trace") if name in answer}}


def explain(error: BaseException, function: object, row: Mapping[str, Any]) -> dict[str, str]:
    """The error of a function that was called for this row; for user code with place and traceback."""
    place = place_of(error) or ("" if is_ours(function) else innermost(error) or definition(function))
    text = described(error)
    fields = known_fields(error, {name: value for name, value in row.items() if name not in ADDED}, row.get(UNREAD, {}))
    if not place:
        return {"error": cut(f"{text}{fields}")}
    trace = trace_of(error)
    if len(json.dumps(trace)) > TRACE_BYTES:  # JSON may need twelve bytes for a character
        trace = trace[-TRACE_BYTES // 12 :]
    return {"error": cut(f"{text} ({place}){fields}"), "place": place, "trace": trace}


if __name__ == "__main__":
    main(int(sys.argv[1]))
