"""Writes a checkpoint's model as a verified Hugging Face folder.

The checkpoint is verified here; `tools/offline/save_hf.py` converts it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.storage import versioned_dirs
from tools import run, terminal

EPILOG = """\
The folder loads in plain transformers, SGLang and vLLM. It is written whole or not at all.
--dtype float32 takes the learner's float32 weights, also where the checkpoint's model is rounded to bfloat16.

examples:
  python -m tools.save_hf runs/latest my-model
  python -m tools.save_hf runs/demo/checkpoints/step-000012 my-model --dtype bfloat16"""


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser("python -m tools.save_hf", __doc__, EPILOG)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint, or a run (its newest checkpoint)")
    p.add_argument("folder", metavar="FOLDER", help="where to write; must not exist, or be empty")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (that of the checkpoint)"
    )
    p.add_argument("--shard-gb", type=float, default=5.0, metavar="X", help="size of a weights file at most, in GB (5)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.shard_gb <= 0:
        raise ConfigError(f"--shard-gb is above 0: got {args.shard_gb:g}")
    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER must not exist or be empty: {folder} has content; name another, or remove it")
    checkpoint = find_checkpoint(args.checkpoint)
    try:
        versioned_dirs.verify(checkpoint)
        from tools.offline.save_hf import save_hf  # imports torch

        save_hf(checkpoint.resolve(), folder.absolute(), dtype=args.dtype or "", shard_gb=args.shard_gb)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return 0


def find_checkpoint(argument: str) -> Path:
    """The folder of a checkpoint; of a run, its newest. Raises ConfigError."""
    given = Path(argument)
    if versioned_dirs.NAME.fullmatch(given.resolve().name) and given.is_dir():
        return given
    for folder in (given, run.LATEST.parent / argument):
        if folder.is_dir() and (found := list(versioned_dirs.versions(folder / "checkpoints").values())):
            return found[0]
    if given.is_dir() and run.Run(given).journals():
        raise ConfigError(f"missing checkpoint: {given} has written none yet (checkpoint.every_s, every_steps)")
    raise ConfigError(f"unknown CHECKPOINT {argument}: give a folder like runs/demo/checkpoints/step-000012, or a run")


if __name__ == "__main__":
    terminal.end_computing(main)
