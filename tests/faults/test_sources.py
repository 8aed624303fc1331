"""A ring of two sources with settings of their own: a generator is killed, then the whole job, which is resumed."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.faults.ring import Ring
from tools import run as runs
from tools.offline.recompute_logprobs import RecomputeOrder, recompute
from tools.report.__main__ import as_json

OWN = {"hot": (2, 6, 1.0), "cold": (4, 12, 0.3)}  # samples of a group, tokens of a completion, temperature
MORE = {
    "hot": 'reward="verdicts:score", normalize_with="one", truncated_samples="mask"',
    "cold": 'reward="reverse", normalize_with="other", mask_repetition=0.9, workflow="own_turn:Turn"',
}
TABLES = ", ".join(
    f'{{name="{name}", task="reverse", weight=1, {MORE[name]}, gconfig={{n_samples={n}, max_new_tokens={most}, '
    f"temperature={heat}}}, evaluate={{n_samples=2, max_new_tokens=8, temperature=0.7}}}}"
    for name, (n, most, heat) in OWN.items()
)
TURN = """
class Turn:
    def __init__(self, config): ...

    async def episode(self, row, ask):
        ids = ask.tokenizer(row["question"] + ">")["input_ids"]
        turn = await ask(ids, max_new_tokens=ask.gconfig.max_new_tokens)
        from actors.workflows.protocol import Episode
        return Episode(text=turn.text)
"""
SETTINGS = (
    *("actor.normalize_batch=true", "actor.mask_repetition=0.5"),
    *('data.task=""', f"data.source=[{TABLES}]", "data.held_out=4", "evaluate.after=true", "journal.tokens=true"),
    *("run.total_train_steps=8", "checkpoint.every_steps=1", "checkpoint.keep=20"),
)


@pytest.mark.slow
def test_two_sources_keep_their_own_settings_over_a_kill_and_a_resume(tmp_path: Path) -> None:
    for name, text in {
        "own_turn.py": TURN,
        "verdicts.py": Path(__file__).with_name("verdicts.py").read_text(encoding="utf-8"),
        "ring.toml": f"extends = {json.dumps(str(Path(__file__).with_name('ring.toml')))}\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ring = Ring(tmp_path, *SETTINGS, config=tmp_path / "ring.toml")
    ring.hold_learner(5)
    with ring.started():
        ring.wait_for("publish", version=2)
        ring.kill("generator-0")
        ring.wait_for("publish", version=5)
        ring.kill_all()
        ring.hold_learner(None)
        ring.start("--resume", str(ring.run))
        ring.finish()
    assert {name: one.findings for name, one in ring.audited().items() if one.findings} == {}
    check_groups(ring)
    updates = ring.lines("update", role="head")
    assert all("repeated_share" in one for one in updates)
    assert {name for one in updates for name in one if name.startswith("reward/")} == {"reward/hot", "reward/cold"}
    found = recompute(RecomputeOrder(str(ring.run), tolerance=1e-3))
    assert sum(one.n_tokens for one in found.versions.values()) > 100
    assert found.off == []
    report = as_json(runs.find(str(ring.run)))
    own = {one["source"]: one for one in report["sources"]}
    assert own.keys() == OWN.keys()
    assert own["cold"]["entropy"] < own["hot"]["entropy"]
    assert all(own[name]["mean_tokens"] <= most for name, (_, most, _) in OWN.items())


def check_groups(ring: Ring) -> None:
    """Each trained group has the size and the length of its source; evaluations have their own."""
    source = {line["uid"]: line["source"] for line in ring.lines("admit", role="head")}
    groups = defaultdict(set)
    for line in ring.lines("trajectory", role="head"):
        n, most, _ = OWN[source[line["uid"]]]
        assert line["n_tokens"] <= most
        groups[line["step"], line["uid"]].add(line["sample"])
        assert line["sample"] < n
    assert {(source[uid], len(samples)) for (_, uid), samples in groups.items()} == {("hot", 2), ("cold", 4)}
    evaluated = [line for line in ring.lines("scored", role="head") if line.get("evaluation")]
    assert {line["evaluation"] for line in evaluated} == {"after:hot", "after:cold"}
    assert max(line["n_tokens"] for line in evaluated) <= 8
    assert {line["sample"] for line in evaluated} == {0, 1}
