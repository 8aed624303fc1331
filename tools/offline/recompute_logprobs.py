"""Recomputes log-probs by transformers with each token's version (I5): `python -m tools.offline.recompute_logprobs`.

A RecomputeOrder as a JSON line in, a JSON object as the last line out. Needs journal.tokens and all checkpoints.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.models.loading import load_model
from actors.runtime.process import leave
from areal_bus.config.removed import saved
from areal_bus.config.sections import Config
from areal_bus.config.stages import sampling_of
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.trajectories import split, within

BATCH = 64  # samples in one forward
MAX_LISTED = 5  # tokens over the tolerance that are listed


@dataclass(frozen=True, slots=True)
class RecomputeOrder:
    """A run and its tolerance."""

    run: str  # folder
    tolerance: float
    skip: Sequence[int] = ()  # lines of tokens.jsonl
    device: str = "cpu"


@dataclass(slots=True)
class LoggedSample:
    """A trajectory of a line of tokens.jsonl. Shapes: T tokens, n sampled tokens."""

    line: int
    uid: int
    sample: int
    temperature: float
    ids: list[int]  # (T,)
    at: list[int]  # (n,) positions of the sampled tokens
    logps: list[float]  # (n,)
    versions: list[int]  # (n,)
    checked: int  # number of leading sampled tokens that can be checked


@dataclass(slots=True)
class VersionTally:
    """The errors of the tokens of one version, as largest absolute differences of log-probs."""

    version: int
    n_tokens: int = 0
    max_error: float = 0.0
    n_off: int = 0  # tokens over the tolerance
    before: float | None = None  # error with the weights of the version before; None without them
    after: float | None = None  # error with the weights of the version after


@dataclass(slots=True)
class Result:
    versions: dict[int, VersionTally] = field(default_factory=dict)
    off: list[dict[str, Any]] = field(default_factory=list)  # the first tokens over the tolerance
    n_without_weights: int = 0
    n_kept_keys: int = (
        0  # sampled with a KV cache of older weights (rollout.on_update = "keep"): no single version to check
    )


def recompute(order: RecomputeOrder) -> Result:
    """Recompute each token with its version and both neighbours. Raises ConfigError when files are missing."""
    run = Path(order.run)
    config = saved((run / "config.json").read_text(encoding="utf-8"))
    skip = set(order.skip)
    samples = [s for s in read(run / "samples" / "tokens.jsonl", config) if s.line not in skip]
    folders = weights(run)
    stamped = {version for sample in samples for version in sample.versions}
    result = Result(n_kept_keys=sum(len(s.versions) - s.checked for s in samples))
    result.n_without_weights = sum(v not in folders for s in samples for v in s.versions[: s.checked])
    for version in sorted(stamped & folders.keys()):
        result.versions[version] = VersionTally(version)
    for version, folder in sorted(folders.items()):
        near = {version - 1, version, version + 1} & result.versions.keys()
        mine = sorted((s for s in samples if near & set(s.versions)), key=lambda s: len(s.ids))
        if not mine:
            continue
        model = load_model(str(folder), config.model.dtype, order.device)
        for first in range(0, len(mine), BATCH):
            part = mine[first : first + BATCH]
            for sample, recomputed in zip(part, forward(model, part, order.device), strict=True):
                compare(result, sample, recomputed, version, order.tolerance)
    return result


def read(path: Path, config: Config) -> Iterator[LoggedSample]:
    """The logged samples; an incomplete last line is skipped."""
    if not path.is_file():
        raise ConfigError(f"missing token log {path}: run with journal.tokens = true")
    keeps_keys = config.rollout.on_update == "keep"
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            line = json.loads(text)
            stamped = [version for version, n in line["versions"] for _ in range(n)]
            heat = sampling_of(config, line.get("source", ""), line["evaluation"]).temperature or 1.0
            for one in split(line["segments"], line.get("trajectories", [])):
                ids = [line["ids"][i] for i in within(one.tokens)]
                logps, versions = ([values[i] for i in within(one.sampled)] for values in (line["logps"], stamped))
                checked = versions.count(versions[0]) if keeps_keys and versions else len(versions)
                at = list(within(one.places))
                yield LoggedSample(number, line["uid"], line["sample"], heat, ids, at, logps, versions, checked)


def weights(run: Path) -> dict[int, Path]:
    """Version -> model folder of each checkpoint."""
    folders = versioned_dirs.versions(run / "checkpoints")
    found = {version: folder / "model" for version, folder in folders.items() if (folder / "model").exists()}
    if not found:
        raise ConfigError(
            f"no checkpoints in {run / 'checkpoints'}: the run must have one of each version; run with "
            "checkpoint.every_steps = 1 and checkpoint.keep above the number of steps"
        )
    return found


@torch.no_grad()
def forward(model: Any, samples: Sequence[LoggedSample], device: str) -> list[list[float]]:
    """Log-probs of the sampled tokens. Right padding, which causal attention hides from all tokens."""
    longest = max(len(sample.ids) for sample in samples)
    ids_BT = torch.zeros(len(samples), longest, dtype=torch.long, device=device)
    for row, sample in enumerate(samples):
        ids_BT[row, : len(sample.ids)] = torch.tensor(sample.ids, device=device)
    logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits.float()
    recomputed = []
    for row, sample in enumerate(samples):
        at_n = torch.tensor(sample.at, dtype=torch.long, device=device)
        logp_nV = torch.log_softmax(logits_BTV[row, at_n - 1] / sample.temperature, dim=-1)
        recomputed.append(logp_nV.gather(-1, ids_BT[row, at_n, None])[:, 0].tolist())
    return recomputed


def compare(result: Result, sample: LoggedSample, recomputed: Sequence[float], version: int, tolerance: float) -> None:
    """Compare log-probs: tokens of `version` must agree; those of its neighbours show the effect of one update."""
    known = zip(sample.versions[: sample.checked], sample.logps, recomputed, sample.at, strict=False)
    for stamped, logp, now, at in known:
        tally = result.versions.get(stamped)
        if tally is None or abs(stamped - version) > 1:
            continue
        error = abs(logp - now)
        if stamped == version:
            tally.n_tokens += 1
            tally.max_error = max(tally.max_error, error)
            if not error <= tolerance:
                tally.n_off += 1
                if len(result.off) < MAX_LISTED:
                    ids = {"line": sample.line, "uid": sample.uid, "sample": sample.sample}
                    result.off.append({**ids, "position": at, "version": version, "logp": logp, "fresh": now})
        elif stamped == version + 1:
            tally.before = max(tally.before or 0.0, error)
        else:
            tally.after = max(tally.after or 0.0, error)


def main() -> int:
    order = RecomputeOrder(**json.loads(sys.stdin.readline()))
    try:
        result = recompute(order)
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    record = asdict(result) | {"versions": [asdict(tally) for tally in result.versions.values()]}
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    leave(main())
