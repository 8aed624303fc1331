"""Rings over two stages, killed in between and resumed: each prompt finishes under the limits it was admitted with."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.faults.ring import Ring
from tests.faults.test_resume import STEPS, SYNCHRONOUS, batches, differences, plain_batches, reference

SIZES = {0: (2, 6), 5: (3, 20)}  # first version -> samples of a group, tokens of a completion
TABLES = ", ".join(
    f"{{from_step={start}, gconfig={{n_samples={n}, max_new_tokens={most}}}, "
    f"learner={{max_tokens_per_mb={64 + start}}}}}"
    for start, (n, most) in SIZES.items()
)
STAGED = f"run.stage=[{TABLES}]"


def limits(born: int) -> tuple[int, int]:
    return SIZES[max(start for start in SIZES if start <= born)]


def killed_and_resumed(ring: Ring) -> None:
    """Killed as a whole when the second stage has begun, resumed from a checkpoint of the first one."""
    ring.hold_learner(6)
    with ring.started():
        ring.wait_for("stage", stage=1)
        ring.wait_for("publish", version=6)
        ring.kill_all()
        run = ring.run
        for version in (6, 5):  # the checkpoints on disk go back to version 4
            for path in (run / "checkpoints" / f"step-{version:06d}", run / "frontiers" / f"frontier-{version:06d}"):
                if path.exists():
                    path.rename(path.with_name(f"away-{path.name}"))
        ring.hold_learner(None)
        ring.start("--resume", str(run))
        ring.finish()
        assert ring.run == run


def first_from(version: int, ring: Ring, *, term: int) -> int:
    """The first version from this one on that is published: a slow push is replaced by that of the next version."""
    published = (line["version"] for line in ring.lines("publish", role="head", term=term))
    return int(next(found for found in published if found >= version))


def check_stages(ring: Ring) -> None:
    stages = [(line["stage"], line["version"]) for line in ring.lines("stage")]
    assert stages == [(0, 0), (1, first_from(5, ring, term=0)), (0, 4), (1, first_from(5, ring, term=1))]
    born, group = {}, defaultdict(set)
    for line in ring.lines("trajectory", role="head"):
        key = (line["step"], line["uid"])
        born[key] = line["born"]
        group[key].add(line["sample"])
        assert line["n_tokens"] <= limits(line["born"])[1]
        if line["finish"] == "length":
            assert line["n_tokens"] == limits(line["born"])[1]
    assert all(len(samples) == limits(born[key])[0] for key, samples in group.items())
    assert {limits(version) for version in born.values()} == set(SIZES.values())


@pytest.mark.soak
def test_at_eta_0_a_resumed_run_of_two_stages_is_bit_equal_to_one_without_a_break(tmp_path: Path) -> None:
    settings = [setting for setting in SYNCHRONOUS if "n_samples" not in setting]
    ring = Ring(tmp_path, *settings, STAGED)
    killed_and_resumed(ring)
    ring.check_survived()
    check_stages(ring)
    plain = reference(ring)
    assert sorted(plain) == list(range(STEPS + 1))
    assert differences(ring, plain) == {}
    assert batches(ring) == plain_batches(plain)
