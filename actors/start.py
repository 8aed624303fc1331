"""Entry of one actor process: `python -m actors.start`, with the Context as one JSON line on standard input.

Standard input stays open for as long as the supervisor lives: at its end the actor gets SIGTERM, and is killed should
it still be there after the grace time. So no actor outlives its supervisor, however that ended.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from actors.context import Context
from actors.leaving import leave
from areal_bus.errors import ArealBusError, ConfigError

PR_SET_PDEATHSIG = 1  # Linux: the signal a process gets when its parent ends
GRACE_S = 5.0


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    context = Context.from_json(sys.stdin.readline())
    threading.Thread(target=end_with_supervisor, name="supervisor", daemon=True).start()
    context.find_user_modules()
    try:
        importlib.import_module(f"actors.{context.role}").run(context)
    except ArealBusError as error:
        return report(context, str(error), code=2 if isinstance(error, ConfigError) else 1)
    except SystemExit as error:  # the user's code may call exit()
        return report(context, f"it called exit({error.code!r})", code=1) if error.code else 0
    except Exception as error:
        return report(context, f"{type(error).__name__}: {error}", code=1)
    return 0


def end_with_supervisor() -> None:
    """Wait for the end of standard input, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def report(context: Context, sentence: str, *, code: int) -> int:
    """One line for people, the traceback into the run's folder."""
    first = sentence.strip().splitlines()[0] if sentence.strip() else "no message"
    line = f"rank {context.rank} ({context.role}-{context.index}): {first}\n"
    with contextlib.suppress(BrokenPipeError):  # nobody may read any more
        os.write(2, line.encode())  # one write: lines of several ranks do not mix
    logs = Path(context.run_folder) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{context.name}.error.txt").write_text(traceback.format_exc())
    return code


if __name__ == "__main__":
    leave(main())
