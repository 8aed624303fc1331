"""The command line of every rank: loads and checks the settings; all ranks end with 2 on a fault, rank 0 prints."""

import argparse
import difflib
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from areal_bus.config.learner import ActorConfig
from areal_bus.config.loader import load, read, resolve
from areal_bus.config.names.engines import kind_of
from areal_bus.config.names.packaged import FOLDER, announce, find_config
from areal_bus.config.removed import left_out
from areal_bus.config.sections import Config, RunConfig
from areal_bus.errors import ConfigError
from areal_bus.process.commands import start_command
from areal_bus.storage.atomic_file import read_object
from launch.commands.dry_run import PlanPage, make_plan_page
from launch.commands.settings_help import explain
from launch.commands.slurm import sbatch_file
from launch.plan.topology import check_count, min_ranks
from launch.run.bootstrap import rank_and_size
from launch.run.elastic import join_job
from launch.run.rank import report_error, run_rank
from launch.run.resume import AUTO
from launch.run.runs import CONFIG, ORIGIN, run_name, why_no_run

OPTIONS = ("--set", "--dry-run", "--all", "--slurm", "--resume", "--join", "--key", "--explain", "--serve", "--port",
           "--help")  # fmt: skip
SERVER = "areal_serve.ranks"  # found by name: it imports this package


def main(arguments: Sequence[str] | None = None, *, n_ranks: int | None = None) -> int:
    """Exit code: 0 success, 1 actor or start failed, 2 invalid input, 128 + N: signal N. `n_ranks`: for --dry-run."""
    rank = 0
    try:
        rank, size = rank_and_size()
        size = n_ranks or size
        options = parse_arguments(arguments)
        check_combinations(options)
        if options.explain is not None:
            return print_on_rank_0(rank, explain_key(options))
        if options.join is not None:
            return join_job(options.join, options.key)
        if options.serve:
            return int(importlib.import_module(SERVER).main(options))
        config, file = load_settings(options.config, options.resume, options.set)
        if rank == 0:
            for name in options.config:
                announce(name, find_config(name))
        if rank == 0 and (warning := staleness_warning(config)):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        if options.dry_run:
            return show_plan(rank, make_plan_page(config, file, size if size > 1 else None, every=options.all))
        if options.slurm:
            files = list(map(find_config, options.config)) or [file]
            return print_on_rank_0(rank, sbatch_file(config, files, options.set, name=run_name(config, file)))
        check_rank_count(config, size, start_words(options))
    except ConfigError as error:
        return report_error(rank, error)
    return run_rank(config, file)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises ConfigError for unknown options."""
    options, unknown = parser().parse_known_args(arguments)
    if split := next((key for key in options.set if "=" not in key), None):
        value = next((word for word in (*unknown, *options.config) if not word.endswith(".toml")), "VALUE")
        raise ConfigError(f"--set takes one word, SECTION.KEY=VALUE: --set {shlex.quote(f'{split}={value}')}")
    for word in (*unknown, *options.config):
        if "." in word.partition("=")[0] and "=" in word and not word.endswith(".toml"):  # as other systems take them
            raise ConfigError(f"a setting needs --set before it: --set {shlex.quote(word.lstrip('-+'))}")
    for word in unknown:
        if not word.startswith("-"):
            raise ConfigError(f"name the CONFIG.toml files one after the other: {word} is apart from the others")
        near = difflib.get_close_matches(word, OPTIONS, 1, 0.75)
        rule = f"the nearest is {near[0]}" if near else "settings are given as --set SECTION.KEY=VALUE; see --help"
        raise ConfigError(f"unknown option {word}: {rule}")
    return options


def check_combinations(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that another option would make ineffective."""
    given = {"CONFIG.toml": bool(options.config)}
    for option in OPTIONS:
        value = getattr(options, option.lstrip("-").replace("-", "_"), None)
        given[option] = value not in (None, False, 0, [])  # "" was given
    for option, allowed, why in (
        ("--explain", ("CONFIG.toml", "--set"), "prints the meaning of a setting, and starts nothing"),
        ("--join", ("--key",), "takes all settings from the job that it joins"),
        ("--serve", ("--port", "CONFIG.toml", "--set", "--resume"), "serves the Tinker API (docs/tinker.md)"),
    ):
        ineffective = [name for name, is_given in given.items() if is_given and name not in (option, *allowed)]
        if given[option] and ineffective:
            raise ConfigError(f"{option} {why}: leave out {', '.join(ineffective)}")
    if given["--slurm"] and (given["--dry-run"] or given["--resume"]):
        raise ConfigError("--slurm prints an sbatch file with run.resume=auto: leave out --dry-run and --resume")
    for option, needed, why in (
        ("--all", "--dry-run", "prints every setting there"),
        ("--port", "--serve", "is the port of the Tinker API"),
        ("--key", "--join", "is the invitation for it"),
    ):
        if given[option] and not given[needed]:
            raise ConfigError(f"{option} needs {needed}: it {why}")
    for option, what in (
        ("resume", f"the folder of a run, or {AUTO}"),
        ("join", "the folder of a running job, or its head's endpoint"),
        ("key", "the invitation, RUN/join.json"),
        ("explain", "a setting (actor.lr) or a section (actor)"),
    ):
        if getattr(options, option) == "":
            raise ConfigError(f'--{option} takes {what}: got ""')


def load_settings(names: Sequence[str], resume: str | None, overrides: Sequence[str]) -> tuple[Config, Path]:
    """The settings and their file. --resume without a file uses the settings of the run. Raises ConfigError."""
    overrides = [*overrides, *([f"run.resume={resume}"] if resume else [])]
    if names:
        files = [find_config(name) for name in names]
        return load(files, overrides), own_file(files)
    if not resume or resume == AUTO:
        raise ConfigError("give a config file: python -m areal_bus.launch configs/demo.toml")
    if not (Path(resume) / CONFIG).is_file():
        raise ConfigError(f"--resume takes the folder of a run: {why_no_run(resume, RunConfig().folder)}")
    tree, origin = left_out(read_object(Path(resume) / CONFIG)), read_object(Path(resume) / ORIGIN)
    if "config" not in origin:
        raise ConfigError(f"--resume takes the folder of a run: {resume} has no {ORIGIN}")
    return resolve(tree, str(Path(resume) / CONFIG), overrides), Path(origin["config"])


def own_file(files: Sequence[Path]) -> Path:
    """The file that names the run and whose folder has the user's modules: the last that is not installed with us."""
    own = [file for file in files if not file.resolve().is_relative_to(FOLDER)]
    return (own or files)[-1]


def explain_key(options: argparse.Namespace) -> str:
    """The meaning of the key, and with files its value in them."""
    files = [find_config(name) for name in options.config]
    return explain(options.explain, read(files, options.set) if files or options.set else None)


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, so that `main` prints one line on one rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> Parser:
    parser = Parser(
        prog="areal_bus.launch",
        description="Train a language model: mpirun -np 4 python -m areal_bus.launch configs/demo.toml",
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG.toml",
        help="the settings; of several files a later one wins; docs/config.md has all keys",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument(
        "--dry-run", action="store_true", help="print ranks, GPUs, memory and changed settings; start nothing"
    )
    parser.add_argument("--all", action="store_true", help="for --dry-run: every setting, and how memory is counted")
    parser.add_argument(
        "--slurm", action="store_true", help="print an sbatch file that starts the job, drains, requeues and resumes it"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help='continue this run, with its own settings unless CONFIG.toml is given; "auto": the newest unfinished one',
    )
    parser.add_argument(
        "--join",
        metavar="ENDPOINT",
        help="run one more generator of a running job: the head's endpoint, or the run's folder",
    )
    parser.add_argument("--key", metavar="FILE", help="for --join: the invitation, RUN/join.json")
    parser.add_argument(
        "--serve", action="store_true", help="serve the Tinker API: rank 0 trains, the others sample; docs/tinker.md"
    )
    parser.add_argument("--port", type=int, default=0, help="for --serve: a free port without it")
    parser.add_argument(
        "--explain",
        metavar="KEY",
        help="print what a setting (or a section) means; with CONFIG.toml also its value there",
    )
    return parser


def print_on_rank_0(rank: int, text: str) -> int:
    if rank == 0:
        print(text, flush=True)
    return 0


def show_plan(rank: int, page: PlanPage) -> int:
    print_on_rank_0(rank, page.text)
    if not page.is_too_large:
        return 0
    rule = "the plan must fit the memory of its GPUs and hosts"
    return report_error(rank, ConfigError(f"{rule}: the line with DOES NOT FIT names the memory and what to change"))


def start_words(options: argparse.Namespace) -> list[str]:
    """The words of this start, for a command line that works."""
    words = [*options.config]
    words += ["--resume", options.resume] if options.resume else []
    return [*words, *(word for override in options.set for word in ("--set", override))]


def check_rank_count(config: Config, size: int, words: Sequence[str]) -> None:
    """Raises ConfigError unless the number of ranks fits the topology."""
    least = min_ranks(config.topology)
    if size == 1 and least > 1:
        needs = f"{'exactly' if config.topology.ranks else 'at least'} {least} ranks"
        command = start_command(words, least, by_script=True)
        raise ConfigError(f"this topology needs {needs}, and this is one process without mpirun: run {command}")
    check_count(config.topology, size)


NAIVE_BORDER = 2.7e-4  # eta * lr at which naive PPO had lost a tenth of its score: share 0.9 of the fitted curve
DECOUPLED_LR = 4e-4  # the lowest of the learning rates at which a lag cost decoupled PPO: lag 2; lag 1 at 8e-4
PAGE = "docs/tolerance.md (measured on a small model)"


def staleness_warning(config: Config) -> str:
    """One sentence when eta and actor.lr lie beyond the measured border; empty otherwise."""
    eta, actor = config.rollout.max_head_offpolicyness, config.actor
    if not eta or kind_of(config.rollout.engine).makes_up_tokens:
        return ""
    product = eta * actor.lr
    if is_naive(actor) and product > NAIVE_BORDER:
        lost = f"naive PPO lost a tenth of its score at eta * actor.lr = {NAIVE_BORDER:g} and half at 1.6e-3"
        remedy = "set actor.use_decoupled_loss = true, or lower either"
        return f"{lost}; this run has {product:.2g}: {remedy}; see {PAGE}"
    if not is_naive(actor) and actor.lr >= DECOUPLED_LR and product >= 2 * DECOUPLED_LR:
        lost = f"at actor.lr = {DECOUPLED_LR:g} a lag of 2, and at 8e-4 a lag of 1, also cost decoupled PPO"
        return f"{lost}; this run has actor.lr = {actor.lr:g} with eta = {eta}: lower either; see {PAGE}"
    return ""


def is_naive(actor: ActorConfig) -> bool:
    """Whether nothing corrects for the gap between proximal policy and sampler."""
    corrects = actor.correction not in ("", "none") or (actor.correction == "" and actor.use_decoupled_loss)
    return not corrects and actor.m2_threshold is None and actor.loss == "ppo"
