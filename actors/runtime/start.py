"""Entry point of an actor: `python -m actors.runtime.start`, its Context as JSON on stdin, whose end ends it."""

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from actors.runtime import context as context_module
from actors.runtime import process
from actors.runtime.context import Context
from actors.runtime.process import CRASHED, DONE, LEFT, RESTART, code_of, leave
from actors.runtime.user_code import add_user_folder, place_of, shown
from areal_bus.foreign_text import printable, text_of
from areal_bus.messages import Role
from areal_bus.process import standard_streams
from areal_bus.process.parent_death import die_with_parent

ACTORS = {
    "head": "actors.head.shell",
    "generator": "actors.generator.actor",
    "reward": "actors.rewards.actor",
    "learner": "actors.learner.actor",
}
GRACE_S = 5.0
SWITCH_S = 1e-4  # how long a thread may hold the GIL (Python's default of 5 ms is long for an event loop)


def main() -> int:
    die_with_parent()
    sys.setswitchinterval(SWITCH_S)
    standard_streams.secure()
    process.listen_for_drain()
    context = context_module.current = Context.from_json(sys.stdin.readline())
    process.listen_for_profile(context.name, records=context.role in (Role.LEARNER, Role.GENERATOR))
    threading.Thread(target=end_with_supervisor, name="supervisor", daemon=True).start()
    add_user_folder(context.config_folder)  # last on sys.path
    try:
        importlib.import_module(ACTORS[context.role]).run(context)
    except SystemExit as error:  # user code may call exit(): that is a crash
        return report(context, f"it called exit({error.code!r})", code=CRASHED, place=place_of(error))
    except Exception as error:
        code = code_of(error)
        return report(context, sentence(error, code), code=code, place=place_of(error))
    return LEFT if process.drain_requested() and context.role != Role.HEAD else DONE


def end_with_supervisor() -> None:
    """Wait for the end of standard input, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def sentence(error: Exception, code: int) -> str:
    """The first line of an error text; an unexpected error has its type in front."""
    text = text_of(error) or "no message"
    expected = code != CRASHED or type(error).__module__ == "areal_bus.errors"
    return (text if expected else f"{type(error).__name__}: {text}").splitlines()[0]


def report(context: Context, first: str, *, code: int, place: str = "") -> int:
    """Print one line and write the traceback to RUN/logs. `place`: FILE:LINE in the user's code."""
    at = f" ({place})" if place and place not in first else ""
    lines = [f"rank {context.rank} ({context.role}-{context.index}): {first}{at}"]
    if code != RESTART:
        try:
            logs = Path(context.run_folder) / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            file = logs / f"{context.name}.error.txt"
            file.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            if place or code == CRASHED:
                lines.append(f"; full traceback: {shown(file)}")
        except OSError as error:
            lines.append(f"; cannot write the traceback: {error}")
    lines.append("\n")
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(2, printable("".join(lines)).encode())  # one write: lines of several ranks do not mix
    return code


if __name__ == "__main__":
    leave(main())
