"""Proofs with a server: the plain loop takes its tokens, and its log-probs are judged by position."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_bus.config.loader import load
from tests.servers import serves_model
from tests.servers.stand_alone import interpreter
from tests.tools.trust.plain import ROOT, TINY, settings, train_plain
from tools.offline.synchronous_reference import SynchronousReference, write_lines
from tools.trust import prove
from tools.trust.batches import Step, differences, steps_of_loop
from tools.trust.mismatch import LEAST, Mismatch, gaps_of

MULTI_TURN = ROOT / "configs" / "multi-turn.toml"


def train_again(recorded: Path, folder: Path, config: Path = TINY, **changes: object) -> list[Step]:
    """The steps of a loop that takes the tokens of this one."""
    folder.mkdir()
    loaded = load(config, settings(**changes))
    loop = SynchronousReference(loaded, config.parent, folder, n_generators=1, recorded=recorded)
    write_lines(loop, loop.run(), folder)
    loop.close()
    return steps_of_loop(folder)


def judged(steps: Sequence[Step], tolerance: float = 1e-3) -> Mismatch:
    return Mismatch("sglang", tolerance, gaps_of(steps), "decoupled", "none", ())


@pytest.mark.parametrize("config", [TINY, MULTI_TURN], ids=["one turn", "several turns"])
def test_a_loop_that_takes_recorded_tokens_is_the_same_and_finds_its_own_log_probs(
    tmp_path: Path, config: Path
) -> None:
    """Also over turns; and a prompt or a reward that differs is named, as the loop makes those anew."""
    recorded = train_plain(tmp_path / "recorded", config=config)
    before, again = steps_of_loop(recorded), train_again(recorded, tmp_path / "again", config)
    assert [differences(one, other) for one, other in zip(before, again, strict=True)] == [{}, {}, {}]
    found = judged(again)
    assert found.fault is None
    assert 0 < (found.largest or 0) < 1e-4
    assert sum(gap.n for gap in found.gaps) == sum(len(s.logps) for step in again for s in step.samples)
    other = train_again(recorded, tmp_path / "other", config, data__largest=4)
    assert "prompts" in differences(before[0], other[0])


def planted(steps: Sequence[Step], offset: float, at: slice) -> list[Step]:
    """The steps of a server whose log-probs are off at these positions."""

    def off(logps: np.ndarray) -> np.ndarray:
        changed = np.array(logps)
        changed[at] += np.float32(offset)
        return changed

    return [replace(step, samples=[replace(s, logps=off(s.logps)) for s in step.samples]) for step in steps]


def test_a_planted_offset_is_found_where_it_begins(tmp_path: Path) -> None:
    recorded = train_plain(tmp_path / "recorded")
    steps = train_again(recorded, tmp_path / "again")
    for at, first in ((slice(None), 0), (slice(1, 2), 1), (slice(2, None), 2)):
        for offset in (0.05, -0.05, float("nan")):
            fault = judged(planted(steps, offset, at)).fault
            assert fault is not None
            assert fault.first == first
            assert fault.n >= LEAST
    assert (
        "differ from the learner's by 0.05 on average at position 0 (27 tokens)"
        in judged(planted(steps, 0.05, slice(None))).sentence
    )
    assert judged(planted(steps, 0.01, slice(None)), 0.03).fault is None


@pytest.mark.slow
@pytest.mark.parametrize("offset", [pytest.param(0.0, marks=pytest.mark.soak), 0.02])
def test_the_command_proves_a_ring_with_a_server_and_finds_one_that_counts_wrong(
    offset: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offset of 0.05 is refused by the ring itself, at its first update with a signal."""
    monkeypatch.chdir(ROOT)
    python = interpreter(tmp_path, f"export OFFSET={offset}", serves_model.__file__)
    given = [
        f"engine.python={python}", "launch.timeout_s=500", "learner.warmup.steps=20", "model.scratch.layers=1",
        "model.scratch.hidden_size=32", "rollout.engine=sglang",
    ]  # fmt: skip
    words = ["configs/tiny.toml", "--steps", "2", "--json", "--output", str(tmp_path / "proof")]
    assert prove.main([*words, *(word for one in given for word in ("--set", one))]) == int(offset != 0)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    server = found["server"]
    assert found["bit_equal"]
    assert server["within_tolerance"] == (offset == 0)
    assert server["by_position"][0]["mean"] == pytest.approx(offset, abs=1e-4)
    assert (server["correction"], server["other_correction"]["correction"]) == ("decoupled", "none")
    assert len(server["other_correction"]["steps"]) == 2
    page = (tmp_path / "proof" / "prove.html").read_text(encoding="utf-8")
    assert "Log-probs of the server and of the learner" in page
