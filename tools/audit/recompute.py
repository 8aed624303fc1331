"""Checks I5 for every token: another process recomputes the log-probs, and this module compares them.

A process of its own, since an audit imports none of the code that it judges.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.isolation import CHILD
from tools.audit.findings import Findings
from tools.run import Run
from tools.surviving_history import undone_places
from tools.terminal import compute_environment

TOLERANCE = 1e-4  # largest difference of a log-prob from that of the version stamped on it


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The result of tools/offline/recompute_logprobs.py: counts by version, and the first tokens that differ."""

    told: dict[str, Any]
    digests: Mapping[int, str]  # of the versions, by the journal

    @property
    def n_tokens(self) -> int:
        return sum(tally["n_tokens"] for tally in self.told["versions"])

    @property
    def max_error(self) -> float:
        return max((tally["max_error"] for tally in self.told["versions"]), default=0.0)

    @property
    def neighbours(self) -> list[float]:
        """For each version and neighbour with other weights: the largest log-prob difference."""
        errors = []
        for tally in self.told["versions"]:
            for side, version in (("before", tally["version"] - 1), ("after", tally["version"] + 1)):
                mine, other = self.digests.get(tally["version"]), self.digests.get(version)
                if tally[side] is not None and (mine is None or mine != other):
                    errors.append(tally[side])
        return errors

    def sentence(self) -> str:
        """A sentence that follows the text of the verdict."""
        apart = sum(error > TOLERANCE for error in self.neighbours)
        words = (
            f"recomputed: {self.n_tokens} tokens within {self.max_error:.1e} of their version, "
            f"{apart} of {len(self.neighbours)} neighbours told apart"
        )
        if self.neighbours:
            words += f" (by {min(self.neighbours):.1e} at least)"
        for name, why in (("n_without_weights", "without kept weights"), ("n_kept_keys", "over kept keys")):
            if self.told[name]:
                words += f"; {self.told[name]} tokens {why} not checked"
        return words


def recompute(run: Run, findings: Findings, digests: Mapping[int, str]) -> Recomputed:
    """Run it and add a finding for each difference. Raises ConfigError if tokens or weights were not kept."""
    skip = sorted(place + 1 for place in undone_places(run, run.tokens()))  # their weights may have been made anew
    order = json.dumps({"run": str(run.folder.resolve()), "tolerance": TOLERANCE, "skip": skip}) + "\n"
    line = [*CHILD, "tools.offline.recompute_logprobs"]
    child = subprocess.run(
        line, input=order, text=True, env=compute_environment(), capture_output=True, check=False, encoding="utf-8"
    )
    if child.returncode:
        raise ConfigError(
            child.stderr.strip() or f"tools.offline.recompute_logprobs ended with code {child.returncode}"
        )
    found = Recomputed(json.loads(child.stdout.splitlines()[-1]), digests)
    for off in found.told["off"]:
        text = (
            f"a token's log-prob is that of the version stamped on it, within {TOLERANCE:g}: {off['logp']:.6f} at "
            f"version {off['version']}, position {off['position']}; a fresh forward gives {off['fresh']:.6f}"
        )
        findings.add("I5", f"tokens.jsonl:{off['line']}", text, uid=off["uid"], sample=off["sample"])
    n_off = sum(tally["n_off"] for tally in found.told["versions"])
    if n_off:
        findings.n["I5"] += n_off - len(found.told["off"])
    return found
