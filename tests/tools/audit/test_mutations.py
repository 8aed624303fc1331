"""tools.audit over a true run of which one field of one line is changed: every change is found.

UNKNOWN lists the fields that the audit cannot recompute, each with the reason. All others count.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from areal_bus.errors import ConfigError
from tests.tools.audit.forged_run import Forge, true_run
from tools import run
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict

MEASURED = "a measured duration, which no other line repeats"
TEXT = "a text for people"
REFUSED = "the head refuses what contradicts its state, and no other process records such a message"
UNKNOWN = {
    "*.*.wall": "clocks of hosts differ, and a clock may be set",
    "*.*.event": "readers pass over events that they do not know: the line is missing then",
    "*.end.reason": TEXT,
    "*.pushed.receive_s": MEASURED,
    "*.pushed.stall_s": MEASURED,
    "reward.score.score_s": MEASURED,
    "reward.score.error": TEXT,
    "head.scored.seconds": MEASURED,
    "head.start.pid": "no `joined` line repeats it: the head does not join itself",
    "head.start.host": "no `joined` line repeats it: the head does not join itself",
    "head.member.why": TEXT,
    "head.refund.error": TEXT,
    "head.push.view": "the number of a view of the members, which no other line has",
    "head.evaluation.maj_at_k": "a vote over the texts of answers, which are not in the journal",
    **{f"head.refused.{name}": REFUSED for name in ("what", "sender", "why", "uid", "sample", "attempt")},
}
OF_EVERY_LINE = ("t", "term", "role", "rank", "inc", "seq")


class Change(NamedTuple):
    """One field of one line of one process gets another value."""

    process: str
    line: int
    kind: str  # ROLE.EVENT.FIELD
    value: Any


def story() -> Forge:
    """The true run, with rows in a known order."""
    forge = true_run()
    forge.config["run"]["seed"] = 1
    forge.config["data"]["shuffle"] = False
    forge.config["evaluate"] = {"every_steps": 0}
    return forge


def save(folder: Path) -> Path:
    story().save(folder)
    (folder / "origin.json").write_text(json.dumps({"rows": 20}))
    return folder


def others(field: str, value: Any) -> list[Any]:
    """Other values of the same type, a small and a large step away."""
    if field == "t":
        return [value - 1e6, value + 1e6]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value + 1000]
    if isinstance(value, float):
        return [value + 1, value * 1.03 if value else 0.03]  # labels of a process sum to its wall time within 1 %
    if isinstance(value, str):
        return [{"healthy": "stale", "stale": "healthy"}.get(value, f"{value}x")]
    if value is None:
        return [True]
    return [value[:-1], [*value[:-1], value[-1] + 1]] if value else [[0]]


def changes(folder: Path) -> Iterator[Change]:
    """All single changes of fields that the audit claims to check."""
    forge = story()
    trained = {(line["uid"], line["sample"]) for line in forge.of("head-0.0", "trajectory")}
    refunded = {line["uid"] for line in forge.of("head-0.0", "refund")}
    for path in sorted((folder / "journal").glob("*.jsonl")):
        for i, text in enumerate(path.read_text().splitlines()):
            line = json.loads(text)
            for field, value in line.items():
                kind = f"{line['role']}.{line['event']}.{field}"
                if names_of(line["role"], line["event"], field) & UNKNOWN.keys() or is_idle(kind, line, trained):
                    continue
                for other in others(field, value):
                    if kind != "head.sampled.uid" or other not in refunded:  # these may leave a generator late
                        yield Change(path.stem, i, kind, other)


def names_of(role: str, event: str, field: str) -> set[str]:
    return {f"{role}.{event}.{field}", f"*.{event}.{field}", f"*.*.{field}"}


def is_idle(kind: str, line: dict[str, Any], trained: set[tuple[int, int]]) -> bool:
    """Whether the field of a verdict says nothing: without a value, or right and wrong of what no figure counts."""
    if kind not in ("head.scored.reward", "head.scored.correct"):
        return False
    is_counted = (line["uid"], line["sample"]) in trained or line.get("evaluation", "")
    return line["status"] != "value" or (kind == "head.scored.correct" and not is_counted)


def is_found(folder: Path, change: Change) -> bool:
    """Whether the audit rejects the run, or an invariant that held is no longer shown."""
    path = folder / "journal" / f"{change.process}.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    changed = json.loads(lines[change.line]) | {change.kind.rpartition(".")[2]: change.value}
    lines[change.line] = json.dumps(changed, separators=(",", ":")) + "\n"
    path.write_text("".join(lines))
    try:
        verdicts = judge(audit(run.find(str(folder)))).values()
    except ConfigError:
        return True
    finally:
        path.write_text(whole)
    return any(one.verdict is not InvariantVerdict.HOLDS for one in verdicts)


def test_200_single_changes_of_a_journal_are_found(tmp_path: Path) -> None:
    """One of each kind of field, then others drawn by a seed."""
    folder, rng = save(tmp_path / "run"), random.Random(41)
    assert {one.verdict for one in judge(audit(run.find(str(folder)))).values()} == {InvariantVerdict.HOLDS}
    possible = list(changes(folder))
    rng.shuffle(possible)
    first = {change.kind: change for change in possible if change.kind.rpartition(".")[2] not in OF_EVERY_LINE}
    chosen = [*first.values(), *possible[: 200 - len(first)]]
    assert len(chosen) == 200
    assert [change for change in chosen if not is_found(folder, change)] == []


@pytest.mark.soak
def test_every_single_change_of_a_journal_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    assert [change for change in changes(folder) if not is_found(folder, change)] == []


def test_fields_that_the_audit_cannot_know_are_those_of_the_journal(tmp_path: Path) -> None:
    """An entry of UNKNOWN is about a field that exists."""
    lines = [
        json.loads(text)
        for path in (save(tmp_path / "run") / "journal").iterdir()
        for text in path.read_text().splitlines()
    ]
    kinds = {kind for x in lines for field in x for kind in names_of(x["role"], x["event"], field)}
    assert UNKNOWN.keys() <= kinds
