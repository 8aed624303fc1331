"""The generated parts of docs/algorithms.md: algorithms, their parts, and which parts go together."""

import inspect
import json
import re
from pathlib import Path

from actors.learner.algorithms.advantages import ESTIMATORS
from actors.learner.algorithms.corrections import CORRECTIONS
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from areal_bus.config.algorithms import refusals
from areal_bus.config.loader import load
from areal_bus.config.sections import Config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "algorithms"
RUN = ROOT / "configs" / "tiny.toml"  # what each algorithm needs beside itself
COMMON = {
    "algorithm",
    "lr",
    "lr_warmup_steps",
    "behav_imp_weight_cap",
    "advantage",
    "loss",
    "correction",
    "aggregation",
}


def parts() -> str:
    """Each part with the first line of its docstring."""
    known: dict[str, dict[str, object]] = {
        "advantage": {name: one.estimate for name, one in ESTIMATORS.items()},
        "loss": dict(LOSSES),
        "correction": dict(CORRECTIONS),
        "aggregation": dict(AGGREGATIONS),
    }
    lines = []
    for kind, functions in known.items():
        lines.append(f"\n`actor.{kind}`:\n")
        for name, function in functions.items():
            first_line = (inspect.getdoc(function) or "").partition("\n")[0]
            lines.append(f"- `{name}`: {first_line}{note(kind, name)}")
    return "\n".join(lines).strip()


def note(kind: str, name: str) -> str:
    """What follows an estimator."""
    if kind != "advantage":
        return ""
    return {"": "", "mean": " Minus the batch's mean.", "std": " Normalised over the batch."}[
        ESTIMATORS[name].normalization
    ]


def combinations() -> str:
    """The pairs of loss and correction that the checks of the start refuse."""
    pairs = {(loss, name) for loss in LOSSES for name in CORRECTIONS if is_accepted(loss, name)}
    tied = [loss for loss in LOSSES if (loss, "none") in pairs and len([x for x, _ in pairs if x == loss]) == 1]
    lines = [f"`{loss}` goes with the correction `none` only." for loss in tied]
    for name in CORRECTIONS:
        accepted = [f"`{loss}`" for loss in LOSSES if (loss, name) in pairs]
        if len(accepted) < len(LOSSES) - len(tied):
            lines.append(f"The correction `{name}` goes with {', '.join(accepted)} only.")
    return " ".join([*lines, "Every other pair is accepted."])


def is_accepted(loss: str, correction: str) -> bool:
    actor = {"loss": loss, "correction": correction}
    config = Config.model_validate({"actor": actor})
    return next(refusals(config), None) is None


def algorithms() -> str:
    """Each shipped config: its paper, its parts and its other settings."""
    rows = ["| config, paper | advantage | loss | correction | aggregation | also |", "|---" * 6 + "|"]
    base = load([RUN, CONFIGS / "grpo.toml"], (), {})
    for file in sorted(CONFIGS.glob("*.toml")):
        config = load([RUN, file], ["teacher.path=TEACHER"] if file.stem == "distill" else (), {})
        actor = config.actor
        paper = re.search(r"arXiv ([0-9.]+[0-9])", file.read_text(encoding="utf-8").partition("\n")[0])
        link = f"[{file.stem}](https://arxiv.org/abs/{paper[1]})" if paper else file.stem
        columns = [actor.advantage, actor.loss, actor.correction or "decoupled", actor.aggregation]
        parts_ = " | ".join(f"`{column}`" for column in columns)
        rows.append(f"| {link} | {parts_} | {', '.join(others(config, base))} |")
    return "\n".join(rows)


def others(config: Config, base: Config) -> list[str]:
    """Settings of an algorithm besides its parts, as TOML."""
    found = []
    for section in ("actor", "data"):
        before = getattr(base, section).model_dump(mode="json")
        for key, value in getattr(config, section).model_dump(mode="json").items():
            if value != before[key] and key not in COMMON:
                found.append(f"`{key} = {json.dumps(value)}`")
    return found
