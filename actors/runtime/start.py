"""Entry of one actor process: `python -m actors.runtime.start`, with the Context as one JSON line on standard input.

No actor outlives its supervisor, however that ended: the kernel kills it then, stopped (SIGSTOP) or not. Standard input
stays open for as long as the supervisor lives, and its end means the same. actors/runtime/process.py has the exit
codes.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from actors.runtime import process as draining
from actors.runtime.context import Context
from actors.runtime.process import CRASHED, DONE, LEFT, RESTART, code_of, leave
from actors.runtime.user_code import place_of, shown
from areal_bus.messages import Role
from areal_bus.parent_death import die_with_parent

ACTORS = {
    "head": "actors.head.shell",
    "generator": "actors.generator.actor",
    "reward": "actors.rewards.actor",
    "learner": "actors.learner.actor",
}
GRACE_S = 5.0
SWITCH_S = 1e-4  # how long a thread may keep the interpreter from another (Python has 5 ms: long, for a loop)


def main() -> int:
    die_with_parent()
    sys.setswitchinterval(SWITCH_S)
    print_whole_lines()
    draining.listen()
    context = Context.from_json(sys.stdin.readline())
    threading.Thread(target=end_with_supervisor, name="supervisor", daemon=True).start()
    context.find_user_modules()
    try:
        importlib.import_module(ACTORS[context.role]).run(context)
    except SystemExit as error:  # the user's code may call exit(): no actor ends by that
        return report(context, f"it called exit({error.code!r})", code=CRASHED, place=place_of(error))
    except Exception as error:
        code = code_of(error)
        return report(context, sentence(error, code), code=code, place=place_of(error))
    return LEFT if draining.asked() and context.role != Role.HEAD else DONE


def print_whole_lines() -> None:
    """One write a line on standard output, as standard error has it: lines of several ranks do not mix."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def end_with_supervisor() -> None:
    """Wait for the end of standard input, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def sentence(error: Exception, code: int) -> str:
    """The first line of what is said on purpose; the kind of error before it when it was not."""
    text = str(error).strip() or "no message"
    expected = code != CRASHED or type(error).__module__ == "areal_bus.errors"
    return (text if expected else f"{type(error).__name__}: {text}").splitlines()[0]


def report(context: Context, first: str, *, code: int, place: str = "") -> int:
    """One line for people, the traceback into the run's folder. `place`: FILE:LINE in the user's code."""
    at = f" ({place})" if place and place not in first else ""
    lines = [f"rank {context.rank} ({context.role}-{context.index}): {first}{at}"]
    if code != RESTART:
        try:
            logs = Path(context.run_folder) / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            file = logs / f"{context.name}.error.txt"
            file.write_text(traceback.format_exc())
            if place or code == CRASHED:
                lines.append(f"; full traceback: {shown(file)}")
        except OSError as error:
            lines.append(f"; no traceback kept: {error}")
    lines.append("\n")
    with contextlib.suppress(OSError):  # nobody may read any more
        os.write(2, "".join(lines).encode())  # one write: lines of several ranks do not mix
    return code


if __name__ == "__main__":
    leave(main())
