"""A small plain loop, trained in this process, as `prove` and `replay` read it."""

import json
from pathlib import Path

from areal_bus.config.loader import load
from tools.offline.synchronous_reference import SynchronousReference, write_lines

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "tiny.toml"
SMALL = {
    "model.scratch.hidden_size": 16,
    "model.scratch.layers": 1,
    "model.scratch.heads": 2,
    "data.batch_size": 3,
    "data.limit": 200,
    "gconfig.n_samples": 3,
    "gconfig.max_new_tokens": 4,
    "learner.warmup.steps": 2,
    "run.total_train_steps": 3,
    "rollout.max_head_offpolicyness": 0,
    "journal.replay": "true",
}


def settings(**changes: object) -> list[str]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**SMALL, **named}.items()]


def train_plain(folder: Path, *, config: Path = TINY, modules: Path | None = None, **changes: object) -> Path:
    """The folder of a plain loop, with config and origin as a run has them."""
    folder.mkdir(parents=True)
    loaded = load(config, settings(**changes))
    (folder / "config.json").write_text(loaded.model_dump_json())
    (folder / "origin.json").write_text(json.dumps({"folder": str(modules or config.parent)}))
    loop = SynchronousReference(loaded, modules or config.parent, folder, n_generators=1)
    write_lines(loop, loop.run(), folder)
    loop.close()
    return folder
