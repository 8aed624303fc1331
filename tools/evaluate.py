"""Scores a model or a run on a file of problems.

Arguments and settings are read here; `tools/offline/evaluate.py` computes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_bus.config import loader as settings
from areal_bus.config import removed
from areal_bus.config.names import named_tasks
from areal_bus.config.names.named_tasks import is_generated
from areal_bus.config.names.packaged import find_and_announce
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.atomic_file import read_object
from tools import run, terminal

EPILOG = """\
The builtin engine samples, whatever rollout.engine is.
For a run, the settings of the run are used: prompt format, reward, seed, samples and temperature. With them and the
problems of the run's evaluation (evaluation/problems.jsonl, the default of --data), its final model gives the accuracy
that the run printed. For a model, the settings are the defaults or those of --config. On CPU it computes with
OMP_NUM_THREADS threads (1 when unset, as in a ring: more threads may change an answer by rounding).

examples:
  python -m tools.evaluate runs/latest
  python -m tools.evaluate runs/latest --data my-problems.jsonl --n-samples 4
  python -m tools.evaluate models/smollm2-135m-instruct --config configs/demo.toml --data my-problems.jsonl
  python -m tools.evaluate Qwen/Qwen2.5-0.5B-Instruct --data gsm8k.jsonl --reward math --max-new-tokens 300"""


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser("python -m tools.evaluate", __doc__, EPILOG)
    p.add_argument("model", metavar="MODEL_OR_RUN", help="model folder, Hugging Face id, or run (its exported model)")
    p.add_argument(
        "--data", metavar="FILE", help="JSON lines with question and answer (else those of --config, or of the run)"
    )
    p.add_argument("--task", metavar="NAME", help="a named task (tools.tasks list): its prompt, reward and protocol")
    p.add_argument("--config", metavar="FILE", help="settings to start from: a TOML file, or a run's config.json")
    p.add_argument("--modules", metavar="DIR", help="folder of the module of my:score (as at the run's start)")
    p.add_argument("--reward", metavar="NAME", help="reward function: exact, sums, reverse, math or module:function")
    p.add_argument("--n-samples", type=int, metavar="N", help="answers a problem (8)")
    p.add_argument("--temperature", type=float, metavar="X", help="sampling temperature (1)")
    p.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of an answer at most (256)")
    p.add_argument("--seed", type=int, metavar="N", help="seed of the sampling (1)")
    seeds = "answer with the seeds of this evaluation of a run (after)"
    p.add_argument("--evaluation", metavar="NAME", default="after", help=seeds)
    p.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute (auto)")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.config:
        args.config = str(find_and_announce(args.config))
    order = make_order(args)
    if (engine := order["config"].rollout.engine) != "builtin":
        print(
            f"note: the builtin engine samples here, not rollout.engine = {engine!r} of the settings", file=sys.stderr
        )
    from tools.offline.evaluate import EvaluateOrder, run  # imports torch

    return run(EvaluateOrder(**order), as_json=args.json)


def make_order(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of an EvaluateOrder (tools/offline/evaluate.py). Raises ConfigError."""
    where = find_run(args.model)
    named = named_tasks.NAMED_TASKS.get(args.task or "")
    own = str(where.folder / "evaluation" / "problems.jsonl") if where else None
    data = args.data or (named.hub if named else own) or None
    config, modules = load_config(args, where), modules_folder(args, where)
    if data is None and args.config:
        data = configured_problems(config, modules)
    if data is None and not is_generated(args.task or (config.data.task if args.config else "")):
        raise ConfigError("give a file of problems (JSON lines) with --data FILE, or as evaluate.path of --config")
    if where and data and data == own and not Path(data).is_file():
        raise ConfigError(f"missing problems: the run has no {data}; give a file with --data FILE")
    model = str(exported_model(where)) if where else args.model
    how = {"folder": args.modules or modules, "name": args.evaluation, "device": args.device}
    return {"model": model, "data": data or "", "config": config, **how}


def configured_problems(config: Config, folder: str) -> str | None:
    """evaluate.path of a config in this folder; None where it names none."""
    path = config.evaluate.path
    beside = Path(folder) / path
    return (str(beside) if beside.is_file() else path) or None


def modules_folder(args: argparse.Namespace, where: run.Run | None) -> str:
    """The folder of the user's modules: that of the config file; for a run, of the one that started it."""
    if not args.config:
        return str(where.origin().get("folder", ".")) if where else "."
    beside = Path(args.config).parent
    return str(run.Run(beside).origin().get("folder", beside))


def find_run(argument: str) -> run.Run | None:
    """The run that MODEL_OR_RUN names; None when it names a model."""
    for folder in (Path(argument), run.LATEST.parent / argument):
        if folder.is_dir() and run.Run(folder).journals():
            return run.Run(folder)
    return None


def exported_model(where: run.Run) -> Path:
    """The run's final model, else that of its newest checkpoint. Raises ConfigError when there is neither."""
    final = where.folder / "model"
    models = [folder / "model" for folder in versioned_dirs.versions(where.folder / "checkpoints").values()]
    found = [final] if final.is_dir() else [model for model in models if model.exists()]
    if not found:
        raise ConfigError(
            f"missing model in {where.folder}: neither model/ nor a checkpoint (none is written yet, or "
            "checkpoint.at_end = false)"
        )
    return found[0]


def load_config(args: argparse.Namespace, where: run.Run | None) -> Config:
    """The settings of --config, of the run, or the defaults, overridden by the options. Raises ConfigError."""
    if args.config:
        tree = read_settings(Path(args.config))
    else:
        tree = removed.left_out(where.config()) if where else {}
    apply_stages(tree, version_of(exported_model(where) if where else Path(args.model)))
    options = [
        ("--n-samples", "evaluate.n_samples", args.n_samples),
        ("--temperature", "evaluate.temperature", args.temperature),
        ("--limit", "evaluate.limit", args.limit),
        ("--max-new-tokens", "gconfig.max_new_tokens", args.max_new_tokens),
        ("--reward", "reward.function", args.reward),
        ("--seed", "run.seed", args.seed),
    ]
    given = [option for option in options if option[2] is not None]
    for origin, key, raw in settings.from_options(args.set):
        given.append((origin, key, settings.plain_value(key, raw, origin)))
    for origin, key, value in given:
        settings.put(tree, key, value, origin)
    if args.task:
        tree.setdefault("data", {})["task"] = args.task
    named_tasks.fill(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(settings.sentence(error, {key: origin for origin, key, _ in given}, "settings")) from None


def version_of(model: Path) -> int | None:
    """The version of a model in a checkpoint, RUN/checkpoints/step-N/model, or of a link to one; None for another."""
    found = versioned_dirs.NAME.fullmatch(model.resolve().parent.name)
    return int(found[1]) if found else None


def apply_stages(tree: dict[str, Any], version: int | None) -> None:
    """Set the settings of the stage that is in force at this version; None: of the last stage."""
    run_table = tree.get("run", {})
    for stage in run_table.pop("stage", ()) if isinstance(run_table, dict) else ():
        if version is None or stage["from_step"] <= version:
            for section in ("gconfig", "learner"):
                given = {key: value for key, value in stage[section].items() if value is not None}
                tree.setdefault(section, {}).update(given)


def read_settings(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from a run's config.json. Raises ConfigError."""
    if path.suffix != ".json":
        return settings.load(path).model_dump(mode="json")
    if not path.is_file():
        raise ConfigError(f"--config: file not found: {path}")
    return removed.left_out(read_object(path))


if __name__ == "__main__":
    terminal.end_computing(main)
