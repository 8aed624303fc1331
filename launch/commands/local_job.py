"""`areal-bus run CONFIG -np N ...`: checks words and settings as a rank would, then runs mpirun."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import areal_bus.launch
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT, STARTED_BY, find_mpirun, mpirun_variables, shell_line
from areal_bus.process.isolation import CHILD, child_path
from areal_bus.process.parent_death import die_with_parent
from launch.commands import main as launcher
from launch.plan.topology import check_count, min_ranks

USAGE = f"""\
usage: {SCRIPT} run CONFIG.toml [-np N] [--set SECTION.KEY=VALUE] [--resume RUN] [--dry-run] ...

Starts mpirun -np N python -m areal_bus.launch CONFIG.toml with what Open MPI needs here: more ranks than cores, no
binding to single cores, permission for root. The line that it starts is printed first. N is the least number of ranks
that the topology accepts, unless you give one. For several hosts or options of mpirun, use that line yourself.

Further words go to the launcher:
"""
COUNT = ("-np", "-n", "--np")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


def main(words: Sequence[str]) -> int:
    """Exit code. Raises ConfigError."""
    if {"-h", "--help"} & set(words):
        print(USAGE, flush=True)
        return run_without_mpirun(["--help"])
    n_ranks, others = split_count(words)
    options = launcher.parse_arguments(others)
    launcher.check_combinations(options)
    if options.serve:
        raise ConfigError(f"--serve is for your own mpirun: {SCRIPT} serve CONFIG.toml -np N starts the same processes")
    if options.dry_run or options.slurm:
        return launcher.main(others, n_ranks=n_ranks)
    if options.explain is not None or options.join is not None:
        return run_without_mpirun(others)
    if not options.config and not options.resume:
        raise ConfigError(f"missing config file: {SCRIPT} run configs/tiny.toml, or that of {SCRIPT} init FOLDER")
    config, _ = launcher.load_settings(options.config, options.resume, options.set)
    least = min_ranks(config.topology)
    if n_ranks is not None and n_ranks < least:
        raise ConfigError(f"-np must be at least {least}, the least that this topology accepts: it is {n_ranks}")
    check_count(config.topology, n_ranks or least)
    return run_mpirun(n_ranks or least, others)


def split_count(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The N of -np N (also -n N, --np N, -np=N), and the other words. Raises ConfigError."""
    n_ranks, others, rest = None, [], list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in COUNT:
            others.append(name + equals + value)
            continue
        given = value if equals else (rest.pop(0) if rest else "")
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"{name} takes the number of ranks, at least 1: got {given!r}")
        n_ranks = int(given)
    return n_ranks, others


def run_without_mpirun(words: Sequence[str]) -> int:
    sys.argv = [f"{SCRIPT} run", *words]
    return areal_bus.launch.main()


def run_mpirun(n_ranks: int, words: Sequence[str]) -> int:
    """Run mpirun, after printing the line that does the same. Exit code of the job; 128 + N after signal N."""
    variables = mpirun_variables()
    command = [find_mpirun(), "-np", str(n_ranks), *CHILD, "areal_bus.launch", *words]
    print(shell_line(variables, shlex.join(command)), file=sys.stderr, flush=True)
    environment = os.environ | variables | {"PYTHONPATH": child_path(), "PYTHONUTF8": "1", STARTED_BY: SCRIPT}
    return attend(command, environment)


def attend(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command with the signals that this process gets. Exit code; 128 + N if it fails after signal N."""
    waited = {*FORWARDED, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    start = partial(become_child, os.getpid(), mask)
    child = subprocess.Popen(command, env=environment, preexec_fn=start)
    ended_by = 0
    while child.poll() is None:
        found = signal.sigtimedwait(waited, 1.0)  # another thread may have taken SIGCHLD
        if found is None or found.si_signo == signal.SIGCHLD:
            continue
        if found.si_signo in ENDING:
            ended_by = ended_by or found.si_signo
        if found.si_code <= 0:  # of a process; the terminal sends its own to the command, too
            child.send_signal(found.si_signo)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    return 128 + ended_by if code and ended_by else code


def become_child(parent: int, mask: Iterable[int]) -> None:
    """In the child: its signals as they were, and SIGKILL when `areal-bus run` is killed."""
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
