"""Rows over data.max_prompt_tokens are dropped in a run: their prompts are refunded, and no uid is shifted."""

import json
from pathlib import Path

import pytest

from areal_bus.core.rows import RowOrder
from tests.faults.ring import History, Ring

N_ROWS, LONG, STEPS = 16, (1, 6, 11), 3


def rows(folder: Path) -> Path:
    """Words to be reversed; some are longer than the limit of 8 tokens."""
    words = ["abcdefghijk" if number in LONG else f"{chr(97 + number)}bc" for number in range(N_ROWS)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": word, "answer": word[::-1]}) + "\n" for word in words))
    return file


def refunded(ring: Ring, history: History) -> list[int]:
    """The rows of the prompts that were refunded as too long."""
    lines = ring.lines("refund", role="head", reason="prompt_too_long")
    assert all(line["n_scored"] == line["n_tokens_dropped"] == 0 and not line["again"] for line in lines)
    return sorted({history.admitted[line["uid"]][1] for line in lines if line["uid"] in history.admitted})


@pytest.mark.soak
def test_rows_over_the_limit_are_refunded_and_no_uid_is_shifted_by_them_nor_by_a_resume(tmp_path: Path) -> None:
    data = (
        "data.task=''",
        f"data.path='{rows(tmp_path)}'",
        "data.long_prompts=drop",
        f"run.total_train_steps={STEPS}",
        "checkpoint.every_steps=1",
        "rollout.max_head_offpolicyness=0",  # no row is drawn again because it is too old
    )
    ring = Ring(tmp_path, *data)
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for("publish", version=2)
        ring.wait_for("checkpoint", role="learner", step=2)
        ring.kill_all()
        ring.hold_learner(None)
        ring.start("--resume", str(ring.run))
        ring.finish()
        history = ring.check_survived()
    assert f"{len(LONG)} of {N_ROWS} rows are dropped: " in ring.output
    order = RowOrder(N_ROWS, seed=1, shuffle=True)
    assert history.admitted == {uid: order.row(uid) for uid in history.admitted}  # the order of a run without long rows
    long = {uid for uid, (_, row) in history.admitted.items() if row in LONG}
    assert long
    assert not long & set(history.trained)
    assert refunded(ring, history) == sorted({history.admitted[uid][1] for uid in long})
    assert len(history.trained) == 4 * STEPS
    assert set(history.rows().values()) == {1}
    assert "ended untrained" not in ring.output  # no sign that something is wrong
