"""`areal-bus run CONFIG -np N ...`: checks the words and the settings, then becomes mpirun with what it needs here.

The checks are those of a rank, so that a mistake costs one line instead of a start of mpirun.
"""

import os
import shlex
import sys
from collections.abc import Sequence

import areal_bus.launch
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT, STARTED_BY
from areal_bus.process.isolation import CHILD, child_path
from areal_bus.process.mpirun import find_mpirun, mpirun_variables, shell_line
from launch import main as launcher
from launch.topology import check_count, min_ranks

USAGE = f"""\
usage: {SCRIPT} run CONFIG.toml [-np N] [--set SECTION.KEY=VALUE] [--resume RUN] [--dry-run] ...

Starts mpirun -np N python -m areal_bus.launch CONFIG.toml with what Open MPI needs here: more ranks than cores, no
binding to single cores, permission for root. The line that it starts is printed first. N is the least number of ranks
that the topology accepts, unless you give one. For several hosts or options of mpirun, use that line yourself.

Further words go to the launcher:
"""
COUNT = ("-np", "-n", "--np")


def main(words: Sequence[str]) -> int:
    """Does not return where mpirun starts. Raises ConfigError."""
    if {"-h", "--help"} & set(words):
        print(USAGE, flush=True)
        return run_without_mpirun(["--help"])
    n_ranks, others = split_count(words)
    options = launcher.parse_arguments(others)
    launcher.check_combinations(options)
    if options.dry_run or options.slurm:
        return launcher.main(others, n_ranks=n_ranks)
    if options.explain is not None or options.join is not None:
        return run_without_mpirun(others)
    if options.config is None and not options.resume:
        raise ConfigError(f"give a config file: {SCRIPT} run configs/tiny.toml, or that of {SCRIPT} init FOLDER")
    config, _ = launcher.load_settings(options.config, options.resume, options.set)
    launcher.check_is_ring(config)
    least = min_ranks(config.topology)
    if n_ranks is not None and n_ranks < least:
        raise ConfigError(f"-np must be at least {least}, the least that this topology accepts: it is {n_ranks}")
    check_count(config.topology, n_ranks or least)
    return become_mpirun(n_ranks or least, others)


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


def become_mpirun(n_ranks: int, words: Sequence[str]) -> int:
    """Replace this process by mpirun, after printing the line that does the same."""
    variables = mpirun_variables()
    command = [find_mpirun(), "-np", str(n_ranks), *CHILD, "areal_bus.launch", *words]
    print(shell_line(variables, shlex.join(command)), file=sys.stderr, flush=True)
    environment = os.environ | variables | {"PYTHONPATH": child_path(), "PYTHONUTF8": "1", STARTED_BY: SCRIPT}
    os.execve(command[0], command, environment)
