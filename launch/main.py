"""The command line: read the settings, check them against the ranks, then run this rank or print and end.

Every rank runs this. A fault in the settings shows on all ranks alike, so rank 0 alone speaks and all end with 2.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from areal_bus.config.loader import load, resolve
from areal_bus.config.sections import Config, RunConfig
from areal_bus.errors import ConfigError
from launch.bootstrap import rank_and_size
from launch.dry_run import Page, look_ahead
from launch.elastic import join
from launch.rank import refuse, run
from launch.resume import AUTO
from launch.runs import CONFIG, ORIGIN, no_run, read_object
from launch.settings_help import explain
from launch.topology import check_count, least_ranks

OPTIONS = ("--set", "--dry-run", "--all", "--resume", "--join", "--key", "--explain", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 an actor or the start failed, 2 the input cannot run, 128 + N ended by signal N."""
    rank = 0
    try:
        rank, size = rank_and_size()
        options = read_words(arguments)
        check_alone(options)
        if options.explain is not None:
            return say(rank, explain(options.explain))
        if options.join is not None:
            return join(options.join, options.key)
        config, file = settings(options.config, options.resume, options.set)
        if options.dry_run:
            return show_plan(rank, look_ahead(config, file, size if size > 1 else None, every=options.all))
        check_size(config, size, options.config or f"--resume {options.resume}")
    except ConfigError as error:
        return refuse(rank, error)
    return run(config, file)


def read_words(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises ConfigError for words that are no option."""
    options, over = parser().parse_known_args(arguments)
    for word in over:
        if not word.startswith("-"):
            raise ConfigError(f"one CONFIG.toml is read: {options.config} is one, and {word} another")
        near = difflib.get_close_matches(word.partition("=")[0], OPTIONS, 1, 0.6)
        raise ConfigError(f"unknown option {word}" + (f": the nearest is {near[0]}" if near else "; --help has all"))
    return options


def check_alone(options: argparse.Namespace) -> None:
    """Raises ConfigError for words that would count for nothing."""
    given = {
        "CONFIG.toml": options.config is not None,
        "--set": bool(options.set),
        "--dry-run": options.dry_run,
        "--all": options.all,
        "--resume": options.resume is not None,
        "--join": options.join is not None,
        "--key": options.key is not None,
        "--explain": options.explain is not None,
    }
    for option, alone, why in (
        ("--explain", ("--explain",), "prints what a setting means, and does nothing else"),
        ("--join", ("--join", "--key"), "takes all settings from the job that it joins"),
    ):
        over = [name for name, is_given in given.items() if is_given and name not in alone]
        if given[option] and over:
            raise ConfigError(f"{option} {why}: leave out {', '.join(over)}")
    if given["--all"] and not given["--dry-run"]:
        raise ConfigError("--all prints every setting of a --dry-run, which is not given")
    if given["--key"] and not given["--join"]:
        raise ConfigError("--key is the invitation for --join, which is not given")
    for option, what in (
        ("resume", f"the folder of a run, or {AUTO}"),
        ("join", "the folder of a running job, or its head's endpoint"),
        ("key", "the invitation, RUN/join.json"),
        ("explain", "a setting (actor.lr) or a section (actor)"),
    ):
        if getattr(options, option) == "":
            raise ConfigError(f'--{option} takes {what}: got ""')


def settings(file: str | None, resume: str | None, overrides: Sequence[str]) -> tuple[Config, Path]:
    """The settings and the file they come from; a run that is resumed without one keeps its own. Raises ConfigError."""
    overrides = [*overrides, *([f"run.resume={resume}"] if resume else [])]
    if file is not None:
        return load(file, overrides), Path(file)
    if not resume or resume == AUTO:
        raise ConfigError("a config file is needed: python -m areal_bus.launch configs/demo.toml")
    if not (Path(resume) / CONFIG).is_file():
        raise ConfigError(f"--resume takes the folder of a run: {no_run(resume, RunConfig().folder)}")
    tree, origin = read_object(Path(resume) / CONFIG), read_object(Path(resume) / ORIGIN)
    if "config" not in origin:
        raise ConfigError(f"--resume takes the folder of a run: {resume} has no {ORIGIN}")
    return resolve(tree, str(Path(resume) / CONFIG), overrides), Path(origin["config"])


class Parser(argparse.ArgumentParser):
    """Leaves it to `main` to refuse: in one line, by one rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> Parser:
    parser = Parser(
        prog="areal_bus.launch",
        description="Train a language model: mpirun -np 4 python -m areal_bus.launch configs/demo.toml",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the settings; docs/config.md has all keys")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument(
        "--dry-run", action="store_true", help="print ranks, GPUs, memory and changed settings; start nothing"
    )
    parser.add_argument("--all", action="store_true", help="for --dry-run: every setting, and how memory is counted")
    parser.add_argument(
        "--resume", metavar="RUN", help='go on with this run, with its own settings unless CONFIG.toml is given; "auto"'
    )
    parser.add_argument(
        "--join",
        metavar="ENDPOINT",
        help="be one more generator of a running job: the head's endpoint, or the run's folder",
    )
    parser.add_argument("--key", metavar="FILE", help="for --join: the invitation, RUN/join.json")
    parser.add_argument("--explain", metavar="KEY", help="print what a setting (or a section) means")
    return parser


def say(rank: int, text: str) -> int:
    if rank == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show_plan(rank: int, page: Page) -> int:
    say(rank, page.text)
    if not page.is_too_large:
        return 0
    rule = "a GPU, or a host, must hold what is planned for it"
    return refuse(rank, ConfigError(f"{rule}: the line with DOES NOT FIT names the memory and what to change"))


def check_size(config: Config, size: int, file: str) -> None:
    """Raises ConfigError unless there are as many ranks as the topology takes."""
    least = least_ranks(config.topology)
    if size == 1 and least > 1:
        raise ConfigError(
            f"this topology takes {'exactly' if config.topology.ranks else 'at least'} {least} ranks, and none were "
            f"started together: run mpirun -np {least} python -m areal_bus.launch {file}"
        )
    check_count(config.topology, size)
    if config.topology.tensor_parallel > 1 and config.rollout.engine == "builtin":
        raise ConfigError(
            'rollout.engine = "builtin" computes on one GPU: topology.tensor_parallel is '
            f"{config.topology.tensor_parallel}; set it to 1, or take a server's engine (--dry-run plans with either)"
        )
