"""Fields of a trajectory: numbers by name that a workflow adds for each sampled token, sent as one frame. Pure.

The frame: a line of names with a space between them, then float32 numbers: all of the first name, of the second, ...
"""

import re
from collections.abc import Mapping

MAX_FIELDS = 16
MAX_LINE = 41 * MAX_FIELDS  # bytes of the names
MAX_NUMBER = 1.7e38  # exclusive; the largest float32 is about twice as large
TOKEN_REWARD = "token_reward"  # the field whose numbers "gae" and "grpo_process" add to the reward, token by token
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
TAKEN = frozenset(  # streams that the learner makes, and what makers of streams see beside them
    {"prox", "reference", "teacher", "token_rewards", "token_advantages", "returns", "old_values"}
    | {"behav", "lags", "reward"}
)


def packed(arrays: Mapping[str, bytes]) -> bytes:
    """The frame of these little-endian float32 arrays."""
    return f"{' '.join(arrays)}\n".encode() + b"".join(arrays.values()) if arrays else b""


def unpacked(frame: bytes) -> tuple[list[str], bytes]:
    """Names and numbers. Bytes that are no text show in a name, which `broken_rule` then refuses."""
    line = frame[:MAX_LINE].partition(b"\n")[0]
    return line.decode(errors="replace").split(" ") if frame else [], frame[len(line) + 1 :]


def broken_rule(names: list[str]) -> str:
    """The rule that these names break, with the names; "" for none."""
    if len(names) > MAX_FIELDS:
        return f"too many fields: a sample has {len(names)}, and at most {MAX_FIELDS} fields are allowed"
    if len(set(names)) != len(names):
        return f"duplicate field {max(names, key=names.count)[:40]!r}: each field of a sample has a name of its own"
    for name in names:
        if NAME.fullmatch(name) is None:
            return f"invalid field name {name[:60]!r}: it has 1 to 40 letters, digits and _, a letter first"
        if name in TAKEN:
            return f"duplicate field: {name!r} is taken by a stream that the learner makes"
    return ""
