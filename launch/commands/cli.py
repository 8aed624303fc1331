"""The console script: `areal-bus COMMAND ...` runs the command's module. Imports none itself, to start fast."""

import difflib
import importlib
import importlib.metadata
import os
import runpy
import shlex
import sys

import areal_bus.launch
from areal_bus.errors import ConfigError
from areal_bus.process import standard_streams
from areal_bus.process.commands import SCRIPT
from areal_bus.process.isolation import ROOT

USAGE = f"usage: {SCRIPT} COMMAND ...    {SCRIPT} COMMAND --help shows the options of one"
OPTIONS = {"--version": "the versions of this package, Python and torch", "--help": "this list"}
LAUNCH = "launch"  # areal_bus.launch, which is loaded already
BENCHMARKS = "benchmarks"  # a package of the checkout that is not installed, as the tests are
CHECK_ENGINE = "tests.check_engine"
COMMANDS = {
    "demo": ("launch.commands.demo", "train a small model on this machine, in a minute or two; no GPU needed"),
    "init": (
        "launch.commands.starter",
        "write a config, data and a reward that learn in two minutes into a new folder",
    ),
    "run": (
        "launch.commands.local_job",
        "train by CONFIG.toml: starts mpirun with what it needs here (-np N, --set, --resume)",
    ),
    "serve": ("areal_serve", "serve the Tinker API: your training loop is the client, models and samples are here"),
    "doctor": (
        "launch.commands.doctor",
        "check this machine: versions, GPUs, mpirun, folders, ports, clock, limits; what would fail, and the remedy",
    ),
    "manifest": ("launch.commands.manifest", "write the files of a job for Kubernetes, SkyPilot or Slurm (--to)"),
    "samples": ("tools.samples", "show sampled completions"),
    "prompt": (
        "tools.prompt",
        "show the life of one prompt: leases, samples, verdicts, its batch or why it was refunded",
    ),
    "watch": ("tools.watch", "watch a run live, in the terminal or in a browser (--web)"),
    "breakdown": ("tools.breakdown", "show where the time went: by role, by step, by cause"),
    "alarms": ("tools.alarms", "show what goes wrong in a run, once or along with it"),
    "runs": ("tools.runs", "list all runs: steps, best held-out score, eta, tokens/s, state (--sort, --json)"),
    "report": ("tools.report", "write a run, several runs or a sweep as one HTML page with a verdict"),
    "timeline": ("tools.timeline", "write a run as a Chrome trace for ui.perfetto.dev"),
    "why": ("tools.why", "show whether a run is alive, stalled, dead or over, and which actor waits for which"),
    "export": ("tools.export", "write a run's scalars to TensorBoard, W&B, Trackio, CSV or Parquet"),
    "save-hf": ("tools.save_hf", "write the model of a checkpoint as a Hugging Face folder"),
    "evaluate": ("tools.evaluate", "score a model or a run on a file of problems"),
    "tasks": ("tools.tasks", "list the named tasks, or check a file of one with its own reward"),
    "convert": ("areal_convert", "write the settings of verl, TRL or AReaL as TOML, and list what has no counterpart"),
    "audit": ("tools.audit", "check a run's journal against the invariants"),
    "prove": ("tools.trust.prove", "show that the ring at eta = 0 is the plain synchronous loop, for your config"),
    "replay": ("tools.trust.replay", "train again from a checkpoint with the recorded batches, the same or changed"),
    "certify": ("tools.trust.certify", "certify a finished run: files, hash chains, invariants, tokens, evaluations"),
    "verify": ("tools.trust.verify", "compare a certificate with its run"),
    "simulate": ("areal_lab.simulate", "predict throughput and lag for each split and eta, in virtual time"),
    "adapt": ("areal_lab.adapt", "simulate the planner of the split against fixed splits and a clairvoyant schedule"),
    "sweep": ("areal_lab.sweep", "run a grid of settings with several seeds and compare the cells"),
    "chaos": ("areal_lab.chaos", "run a job under random kills, stops and cuts: ETTR, losses, recovery times, audit"),
    "staleness": ("areal_lab.staleness", "simulate rings with faults under each staleness policy"),
    "bench": (BENCHMARKS, "run a benchmark; the last line is one JSON object (in a checkout only)"),
    "check-engine": (
        CHECK_ENGINE,
        "hold your engine, module:function, to the rules of all engines (in a checkout only)",
    ),
    LAUNCH: ("areal_bus.launch", "train, as a rank of your own mpirun or srun"),
}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if command in ("-V", "--version"):
        print(version_line())
        return 0
    if command not in COMMANDS:
        print(f"error: {unknown(command)}", file=sys.stderr)
        return 2
    sys.argv = [f"{SCRIPT} {command}", *sys.argv[2:]]
    module = COMMANDS[command][0]
    if command == LAUNCH:
        return areal_bus.launch.main()
    if module in (BENCHMARKS, CHECK_ENGINE):
        package = module.partition(".")[0]
        if not (ROOT / package).is_dir():
            print(f"error: missing package {package}: it is in the source tree only, not installed", file=sys.stderr)
            return 2
        sys.path.append(str(ROOT))
    if not module.startswith("launch."):  # a tool ends the process by itself
        runpy.run_module(module, run_name="__main__", alter_sys=False)
        return 0
    standard_streams.secure()
    try:
        return int(importlib.import_module(module).main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def help_text() -> str:
    rows = {name: what for name, (_, what) in COMMANDS.items()} | OPTIONS
    return "\n".join([USAGE, "", *(f"  {name:12} {what}" for name, what in rows.items())])


def version_line() -> str:
    """Without importing torch."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{SCRIPT} {areal_bus.__version__} (Python {python}, torch {importlib.metadata.version('torch')})"


def unknown(command: str) -> str:
    """The sentence for a command that is none, with the nearest one."""
    if command.endswith(".toml") or os.path.isdir(command):
        return f"a command comes first: {SCRIPT} run {shlex.quote(command)}"
    near = difflib.get_close_matches(command, [*COMMANDS, *OPTIONS], 1, 0.5)
    if near:
        return f"there is no command {command!r}: the nearest is {near[0]}; {SCRIPT} --help lists all"
    return f"there is no command {command!r}: the commands are {', '.join(COMMANDS)}"
