import json
from pathlib import Path
from typing import Any

import pytest

from areal_bus.errors import ConfigError
from tools.breakdown import __main__ as breakdown
from tools.breakdown.incarnations import read_incarnations

Out = pytest.CaptureFixture[str]


def write_lines(path: Path, who: dict[str, Any], *events: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**who, **event}, separators=(",", ":")) + "\n" for event in events]
    path.write_text("".join(lines), encoding="utf-8")


def write_incarnation(path: Path, *events: dict[str, Any]) -> None:
    write_lines(path, {"role": "learner", "rank": 0, "inc": 0}, *events)


START = {"event": "start", "t": 50.0}


def test_labels_are_shown_as_shares_of_the_wall_time(tmp_path: Path, capsys: Out) -> None:
    write_incarnation(
        tmp_path / "journal" / "learner-0.0.jsonl",
        START,
        {"event": "spans", "t": 54.0, "s_train": 3.0, "s_wait": 1.0},
        {"event": "spans", "t": 60.0, "s_train": 4.5, "s_push": 1.5},
        {"event": "end", "t": 60.0, "wall_s": 10.0},
    )
    assert breakdown.main([str(tmp_path), "--all"]) == 0
    text = capsys.readouterr().out
    lines = text[: text.index("By role")].splitlines()
    assert "learner-0.0   10.0 s   ended" in lines
    assert [line.split()[:4] for line in lines if "#" in line] == [
        ["train", "7.50", "s", "75.0%"],
        ["push", "1.50", "s", "15.0%"],
        ["wait", "1.00", "s", "10.0%"],
    ]


@pytest.mark.parametrize(("s_train", "code"), [(9.95, 0), (10.09, 0), (9.85, 1), (10.15, 1)])
def test_labels_that_do_not_sum_to_the_wall_time_are_an_error(
    s_train: float, code: int, tmp_path: Path, capsys: Out
) -> None:
    write_incarnation(
        tmp_path / "journal" / "learner-0.0.jsonl",
        START,
        {"event": "spans", "t": 60.0, "s_train": s_train},
        {"event": "end", "t": 60.0, "wall_s": 10.0},
    )
    assert breakdown.main([str(tmp_path)]) == code
    assert ("I12: labels must sum to the wall time within 1%: learner-0.0" in capsys.readouterr().out) == bool(code)


def test_a_killed_actor_is_measured_up_to_its_last_label(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "journal" / "learner-0.0.jsonl"
    write_incarnation(path, START, {"event": "spans", "t": 54.0, "s_train": 4.0}, {"event": "step", "t": 90.0})
    with path.open("a") as file:
        file.write('{"event":"spans","t":91.0,"s_tr')
    assert breakdown.main([str(tmp_path), "--all"]) == 0
    assert "learner-0.0   4.0 s   no end line (running or killed)" in capsys.readouterr().out


def test_incarnations_in_one_file_are_separated_and_an_error_is_shown(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "journal" / "learner-0.0.jsonl"
    again = {"event": "start", "t": 500.0}
    write_incarnation(
        path, START, {"event": "spans", "t": 54.0, "s_a": 4.0}, again, {"event": "failed", "t": 500.1, "error": "no"}
    )
    assert [one.measured_s for one in read_incarnations(path)] == [4.0, 0.0]
    head = tmp_path / "other" / "head-0.0.jsonl"
    write_incarnation(head, START, {"event": "failed", "t": 51.0, "error": "no", "name": "generator-0.0"})
    assert [one.error for one in read_incarnations(head)] == [None], "it reports an error of another actor"
    assert breakdown.main([str(tmp_path), "--all"]) == 0
    assert "learner-0.0   0.0 s   failed: no\n  no labelled second yet" in capsys.readouterr().out


# a ring: by role, by step, stragglers, causes, pushes, FLOPs

HEAD = {"role": "head", "rank": 0, "inc": 0}


def write_ring(folder: Path, *, n_generators: int) -> None:
    """Two steps of 10 s. Generator 1 samples at half the rate of the others; generator 2 was idle for 4 s."""
    journal = folder / "journal"
    figures = {"n_tokens_trained": 90.0, "n_tokens_computed": 100.0, "n_tokens_forward": 50.0}
    write_lines(
        journal / "head-0.0.jsonl",
        HEAD,
        {"event": "start", "t": 0.0},
        *(
            line
            for k in range(2)
            for line in (
                {"event": "admit", "t": 10 * k - 0.5, "uid": k},
                {"event": "sampled", "t": 10 * k + 3.0, "uid": k, "sample": 0},
                {"event": "scored", "t": 10 * k + 4.5, "uid": k, "sample": 0},
                {"event": "ready", "t": 10 * k + 4.5, "uid": k},
                {"event": "batch", "t": 10 * k + 5.0, "clock": k},
                {"event": "update", "t": 10 * k + 9.0, "version": k + 1, **figures},
                {"event": "push", "t": 10 * k + 9.25, "version": k + 1, "catch_up": False},
                {"event": "publish", "t": 10 * k + 9.5, "version": k + 1},
            )
        ),
        {"event": "spans", "t": 20.0, "s_wait": 20.0},
    )
    for i in range(n_generators):
        idle = 4.0 if i == 2 else 1.0
        write_lines(
            journal / f"generator-{i}.0.jsonl",
            {"role": "generator", "rank": i, "inc": 0},
            {"event": "start", "t": 0.0},
            {"event": "completion", "t": 1.0, "n_tokens": 100 if i == 1 else 200},
            {"event": "pushed", "t": 9.5, "receive_s": 0.5, "stall_s": 0.25},
            {"event": "spans", "t": 20.0, "s_generate": 20 - idle, "s_idle": idle, "w_idle:prompt": idle},
        )
    write_lines(
        journal / "learner-0.0.jsonl",
        {"role": "learner", "rank": 0, "inc": 0},
        {"event": "start", "t": 0.0},
        {"event": "model", "t": 0.5, "n_params": 1000, "dtype": "float32", "device": "cpu"},
        {"event": "pushed", "t": 9.5, "receive_s": 0.5, "stall_s": 0.0, "sent_bytes": 4_000_000},
        {"event": "pushed", "t": 19.5, "receive_s": 0.5, "stall_s": 0.0, "sent_bytes": 100_000, "delta_from": 1},
        {"event": "spans", "t": 20.0, "s_wait_batch": 11.0, "s_backward": 8.0, "s_snapshot": 1.0},
    )


def test_a_ring_is_summed_by_role_by_step_and_by_cause(tmp_path: Path, capsys: Out) -> None:
    write_ring(tmp_path, n_generators=3)
    assert breakdown.main([str(tmp_path), "--json", "--peak-tflops", "1e-6"]) == 0
    told = json.loads(capsys.readouterr().out)
    idle = next(one for one in told["roles"] if (one["role"], one["label"]) == ("generator", "idle"))
    assert (idle["seconds"], idle["share"], idle["highest_name"]) == (6.0, 0.1, "generator-2.0")
    assert [(one["name"], one["rate"]) for one in told["stragglers"]] == [("generator-1.0", pytest.approx(100 / 19))]
    # the second batch was asked for at 9.0 and taken at 15.0; its prompt was admitted at 9.5, at the publish of
    # version 1, and its last sample waited 1.5 s for its reward
    assert {name: figure["sum"] for name, figure in told["steps"].items()} == {
        "step_s": 10.0,
        "wait_sampling_s": 4.0,
        "wait_reward_s": 1.5,
        "wait_push_s": 0.5,
        "update_s": 8.0,
        "pushed_s": 0.5,
    }
    assert {(one["role"], one["cause"]): one["seconds"] for one in told["waits"]} == {
        ("learner", "sampling"): 4.0,
        ("learner", "reward"): 1.5,
        ("learner", "push"): 0.5,
        ("generator", "prompt"): 6.0,
    }
    assert told["pushes"] == {
        "n": 2,
        "published_s": 0.5,
        "receive_s": 1.5,
        "stall_s": 0.75,
        "stall_share": 0.0125,
        "snapshot_s": 1.0,
        "snapshot_share": 0.05,
        "sent_bytes": 4_100_000,
        "n_sent": 2,
        "n_deltas": 1,
    }
    learner, generator = told["flops"]
    assert learner["mfu"] == pytest.approx(2 * 1000 * (6 * 100 + 2 * 50) / 8 / 1e6)
    assert generator["mfu"] == pytest.approx(2 * 1000 * 500 / 54 / 1e6)


def test_after_a_change_of_the_split_the_ranks_of_each_step_count(tmp_path: Path, capsys: Out) -> None:
    """The rank of generator 1 learns from version 1 on: a rank of the second step, not of the first."""
    write_ring(tmp_path, n_generators=2)
    journal = tmp_path / "journal"
    start, *lines = [json.loads(text) for text in (journal / "head-0.0.jsonl").read_text().splitlines()]
    split = {"event": "split", "most_generators": 2}
    first = split | {"t": 0.0, "split": 0, "learners": 1, "generators": 2, "version": 0, "why": "start"}
    second = split | {"t": 9.6, "split": 1, "learners": 2, "generators": 1, "version": 1, "why": "change"}
    at = next(i for i, line in enumerate(lines) if line["t"] > 9.6)
    write_lines(journal / "head-0.0.jsonl", HEAD, start, first, *lines[:at], second, *lines[at:])
    for rank, inc, t, busy_s in ((0, 0, 0.0, 8.0), (0, 1, 10.0, 4.0), (1, 1, 10.0, 4.0)):
        write_lines(
            journal / f"learner-{rank}.{inc}.jsonl",
            {"role": "learner", "rank": rank, "inc": inc, "term": inc + 1},
            {"event": "start", "t": t},
            {"event": "model", "t": t, "n_params": 1000, "dtype": "float32", "device": "cpu"},
            {"event": "spans", "t": t + 10.0, "s_wait_batch": 10.0 - busy_s, "s_backward": busy_s},
        )
    assert breakdown.main([str(tmp_path), "--json", "--peak-tflops", "1e-6"]) == 0
    told = json.loads(capsys.readouterr().out)
    learner, generator = told["flops"]
    assert (learner["seconds"], learner["n_processes"], generator["n_processes"]) == (4.0 + 2 * 4.0, 2, 1)
    assert learner["mfu"] == pytest.approx(2 * 1000 * (6 * 100 + 2 * 50) / 12 / 1e6)
    assert [one["name"] for one in told["stragglers"]] == ["generator-1.0"]


def test_256_processes_take_no_more_lines_than_a_few(tmp_path: Path, capsys: Out) -> None:
    write_ring(tmp_path, n_generators=3)
    assert breakdown.main([str(tmp_path)]) == 0
    few = capsys.readouterr().out
    assert "MFU not known: give the peak" in few
    assert "2.05 MB  to each member, mean of 2 pushes; 1 sent only what changed" in few
    write_ring(tmp_path, n_generators=256)
    assert breakdown.main([str(tmp_path)]) == 0
    many = capsys.readouterr().out
    assert len(many.splitlines()) == len(few.splitlines())
    assert "generator x 256  generate" in many
    assert "generator-1.0: 5.263 tokens per second of generate, the median is 10.53" in many
    assert breakdown.main([str(tmp_path), "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 256 * 4


def test_an_undone_step_and_the_wait_across_a_head_restart_do_not_count(tmp_path: Path, capsys: Out) -> None:
    write_ring(tmp_path, n_generators=1)
    again = (
        {"event": "start", "t": 1000.0},
        {"event": "term", "t": 1000.0, "version": 1},
        {"event": "batch", "t": 1005.0, "clock": 1},
        {"event": "update", "t": 1006.0, "version": 2},
        {"event": "spans", "t": 1006.0, "s_wait": 6.0},
    )
    write_lines(tmp_path / "journal" / "head-0.1.jsonl", HEAD | {"inc": 1}, *again)
    assert breakdown.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n_steps"] == 2
    assert told["steps"]["update_s"]["sum"] == 5.0
    assert "step_s" not in told["steps"]


def test_another_schema_and_a_peak_of_zero_are_refused(tmp_path: Path, capsys: Out) -> None:
    write_incarnation(tmp_path / "journal" / "learner-0.0.jsonl", START | {"schema": 2})
    with pytest.raises(ConfigError, match=r"this version reads journals of schema 1: .*learner-0.0.jsonl has schema 2"):
        breakdown.main([str(tmp_path)])
    with pytest.raises(SystemExit):
        breakdown.main([str(tmp_path), "--peak-tflops", "0"])
    assert "the peak of a process is above 0: got 0" in capsys.readouterr().err
