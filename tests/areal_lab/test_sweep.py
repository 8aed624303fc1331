"""A given lag (areal_lab.loops.exact_lag) and sweeps over it (areal_lab.sweep)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.head import Head
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.ledger import Ledger
from areal_bus.errors import ConfigError
from areal_bus.transport.bus import Bus
from areal_lab.loops.exact_lag import ExactLagLoop
from areal_lab.settings import load
from areal_lab.sweep import __main__ as sweep
from areal_lab.sweep import border
from areal_lab.sweep.comparison import summaries
from areal_lab.sweep.plan import Job, jobs_of, read_sweep, with_seeds
from areal_lab.sweep.results import Result, ResultFile, area
from areal_lab.sweep.runner import SweepProgress
from areal_lab.sweep.starting import loop_of
from tools.offline.synchronous_reference import ReferenceStep, SynchronousReference
from tools.report.facts.seeds import paired

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "sweeps" / "lag-base.toml"
SMALL = {
    "model.scratch.hidden_size": 16,
    "model.scratch.layers": 1,
    "model.scratch.heads": 2,
    "data.batch_size": 3,
    "data.limit": 200,
    "gconfig.n_samples": 2,
    "gconfig.max_new_tokens": 4,
    "learner.warmup.steps": 2,
    "run.total_train_steps": 6,
    "evaluate.limit": 3,
    "evaluate.every_steps": 4,
    "actor.ppo_n_minibatches": 1,
}


def options(**changes: object) -> list[str]:
    return [f"{key}={value}" for key, value in SMALL.items()] + [
        f"{key.replace('__', '.')}={value}" for key, value in changes.items()
    ]


def train(folder: Path, *, warm_ups: Path | None = None, **changes: object) -> tuple[list[ReferenceStep], ExactLagLoop]:
    folder.mkdir(exist_ok=True)
    loop = ExactLagLoop(load(BASE, options(**changes)), BASE.parent, folder, warm_ups=warm_ups)
    steps = list(loop.train())
    loop.journal.close()
    return steps, loop


def versions(step: ReferenceStep) -> list[set[int]]:
    """For each group: the versions that sampled its tokens."""
    return [{version for t, _, _ in group for version, _ in t.spans} for group in step.groups]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2, 9])
def test_each_batch_is_sampled_by_exactly_the_given_lag(tmp_path: Path, lag: int) -> None:
    steps, _ = train(tmp_path, rollout__exact_lag=lag)
    clocks = range(6)
    assert [versions(step) for step in steps] == [[{max(clock - lag, 0)}] * 3 for clock in clocks]
    assert all(step.stats["n_tokens_masked"] == 0 for step in steps)


def test_a_mixture_draws_a_lag_for_each_prompt_and_repeats(tmp_path: Path) -> None:
    steps, loop = train(tmp_path / "a", rollout__exact_lag="[0, 0, 3]")
    again, repeated = train(tmp_path / "b", rollout__exact_lag="[0, 0, 3]")
    lags = [clock - version for clock, step in enumerate(steps) for (version,) in versions(step) if clock >= 3]
    assert set(lags) == {0, 3}
    assert [versions(step) for step in steps] == [versions(step) for step in again]
    assert loop.digest == repeated.digest


def test_without_lag_it_is_the_synchronous_reference_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no head, gate, ledger or bus."""
    steps, _ = train(tmp_path, rollout__exact_lag=0)
    config = load(BASE, options(rollout__max_head_offpolicyness=0))
    for part in (Head, Gate, Ledger, Bus):
        monkeypatch.delattr(part, "__init__")
    reference = SynchronousReference(config, BASE.parent, tmp_path / "reference", n_generators=1)
    assert [step.digest for step in reference.run()] == [step.digest for step in steps]


def test_a_config_with_a_gpu_is_refused_where_torch_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"gpus_per_host = 1 needs a GPU, .* finds none: run on a machine that has one"
    ):
        train(tmp_path, topology__gpus_per_host=1)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_first_update(tmp_path: Path) -> None:
    """Other samples may follow: a GPU rounds in another order."""
    warm_ups = tmp_path / "weights"
    (cpu, *_), _ = train(tmp_path / "cpu", warm_ups=warm_ups, rollout__exact_lag=2)
    (gpu, *_), loop = train(tmp_path / "gpu", warm_ups=warm_ups, rollout__exact_lag=2, topology__gpus_per_host=1)
    assert loop._policy.device.type == "cuda"
    assert versions(gpu) == versions(cpu)
    assert gpu.stats["grad_norm"] > 0
    assert gpu.stats["mismatch_kl"] < 1e-4


@pytest.mark.slow
def test_runs_with_the_same_warm_up_share_its_weights(tmp_path: Path) -> None:
    alone, _ = train(tmp_path / "alone")
    first, _ = train(tmp_path / "first", warm_ups=tmp_path / "weights", actor__lr=1e-4)
    second, _ = train(tmp_path / "second", warm_ups=tmp_path / "weights")
    assert [step.digest for step in second] == [step.digest for step in alone]
    assert first[-1].digest != second[-1].digest
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_an_evaluation_counts_a_failed_reward_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text("def score(prompt, completion, row):\n    raise ValueError('no verdict')\n")
    failing = load(BASE, options(reward__function="failing:score", reward__on_error=0.5))
    loop = ExactLagLoop(failing, tmp_path, tmp_path / "run")
    loop._evaluate("before")
    loop.journal.close()
    (line,) = list((tmp_path / "run" / "journal").glob("*.jsonl"))
    assert '"n":12,"n_failed":12,"n_asked":12,"n_missing":12,"accuracy":null' in line.read_text()


def sweep_file(folder: Path, text: str) -> Path:
    """A sweep beside its config."""
    (folder / "base.toml").write_text(BASE.read_text())
    (folder / "sweep.toml").write_text(text)
    return folder / "sweep.toml"


def jobs_in(file: Path) -> list[Job]:
    return jobs_of(read_sweep(file), file)


SMALL_SET = "\n".join(f'"{key}" = {value}' for key, value in SMALL.items())
HEAD, LAGS = 'config = "base.toml"\n', '[grid]\n"rollout.exact_lag" = [0, 1]'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seeds = 2", 'it needs config = "FILE.toml"'),
        ('config = "base.toml"', "has no axis: add [grid]"),
        ('config = "base.toml"\n[grid]\n"actor.lrr" = [1]', r"cell (actor.lrr = 1): unknown key actor.lrr"),
        ('config = "base.toml"\n[grid]\n"rollout.exact_lag" = [0, 65]', "cell (rollout.exact_lag = 65): rollout.exact"),
        ('config = "none.toml"\n[grid]\n"actor.lr" = [1]', "none.toml"),
        ('config = "base.toml"\ngrid = 3', "grid: Input should be a valid dictionary"),
        ("config = ", "is not TOML"),
        (f"{HEAD}seeds = 0\n{LAGS}", "missing seeds of a sweep: seeds = 0"),
        (f"{HEAD}seeds = []\n{LAGS}", "missing seeds of a sweep"),
        (f'{HEAD}[grid]\n"rollout.exact_lag" = []', "missing values of the axis rollout.exact_lag"),
        (f'{HEAD}metric = "avg"\n{LAGS}', "metric is one of avg_at_k, maj_at_k"),
        (f'{HEAD}x = "lag"\n{LAGS}', "x must name an axis: 'lag' is none of rollout.exact_lag"),
        (f"{HEAD}baseline = {{ lag = 0 }}\n{LAGS}", "baseline must name an axis: 'lag' is none of rollout.exact_lag"),
        (
            f'{HEAD}baseline = {{ "rollout.exact_lag" = 2 }}\n{LAGS}',
            "baseline must be a value of rollout.exact_lag: 2 ",
        ),
        (f'{HEAD}set = {{ "evaluate.after" = false }}\n{LAGS}', "set evaluate.after = true"),
        (f'{HEAD}set = {{ "run.seed" = 7 }}\n{LAGS}', "a sweep has its seeds in `seeds`: remove run.seed from [set]"),
    ],
)
def test_a_wrong_sweep_is_refused_by_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jobs_in(sweep_file(tmp_path, text))
    assert sentence in str(caught.value)


def test_jobs_with_another_metric_or_number_of_ranks_are_other_jobs(tmp_path: Path) -> None:

    def digests(line: str) -> set[str]:
        return {job.digest for job in jobs_in(sweep_file(tmp_path, f"{HEAD}{line}\n{LAGS}"))}

    plain, reward, ranks = map(digests, ("", 'metric = "reward"', "ranks = 3"))
    assert plain == digests('metric = "avg_at_k"\nranks = 4')
    assert not plain & reward
    assert not plain & ranks
    assert not reward & ranks


@pytest.mark.parametrize(
    ("name", "loop"), [("lag", "exact_lag"), ("lag-lr", "exact_lag"), ("algorithms", ""), ("policies", "virtual_time")]
)
def test_the_shipped_sweeps_can_run(name: str, loop: str) -> None:
    jobs = jobs_in(BASE.with_name(f"{name}.toml"))
    assert len(jobs) >= 12
    assert not loop or loop_of(jobs[-1].load()) == f"areal_lab.loops.{loop}"  # each was read for its name and digest


def test_blocks_inherit_and_a_job_of_two_blocks_runs_once(tmp_path: Path) -> None:
    file = sweep_file(
        tmp_path,
        """
config = "base.toml"
seeds = [3, 5]
[set]
"actor.lr" = 1e-3
[grid]
"rollout.exact_lag" = [0, 4]
[[block]]
[[block]]
grid = { "rollout.exact_lag" = [4, 8] }
[[block]]
seeds = 1
variants = { loss = { naive = { "actor.use_decoupled_loss" = false } } }
""",
    )
    jobs = jobs_in(file)
    found = [(job.seed, *job.cell.values()) for job in jobs]
    assert found == [(1, "0", "naive"), (1, "4", "naive"), *[(seed, lag) for seed in (3, 5) for lag in ("0", "4", "8")]]
    assert jobs[0].load().actor.lr == 1e-3
    assert not jobs[0].load().actor.use_decoupled_loss
    fewer = jobs_of(with_seeds(read_sweep(file), 1), file)
    assert {job.seed for job in fewer} == {1}


def test_a_dry_run_lists_the_jobs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    line = [str(BASE.with_name("lag.toml")), "--out", str(out), "--dry-run"]
    assert sweep.main(line) == 0
    assert "18 jobs (18 in one process): 0 done, 18 to do" in capsys.readouterr().out
    assert not out.exists()
    job, other, *_ = jobs_in(BASE.with_name("lag.toml"))
    ResultFile(out / "results.jsonl").add(Result(job.digest, dict(job.cell), 1, score=0.5))
    ResultFile(out / "results.jsonl").add(Result(other.digest, dict(other.cell), 1, error="killed by SIGKILL"))
    assert sweep.main(line) == 0
    assert "1 done, 16 to do, 1 failed and run again" in capsys.readouterr().out


def test_the_time_left_follows_from_the_jobs_of_each_kind() -> None:
    progress = SweepProgress(8, n_cores=4)
    assert progress.left_s([1] * 8, []) is None
    progress.add(1, 1.0, is_done=False)
    assert progress.left_s([1] * 7, []) is None
    progress.add(1, 10.0, is_done=True)
    assert progress.left_s([1, 1], [(1, 4.0), (1, 12.0)]) == (10 + 10 + 6 + 0) / 4
    assert progress.left_s([], [(1, 1.0)]) == 9  # one job does not end sooner on more cores
    progress.add(4, 100.0, is_done=True)
    assert progress.left_s([4, 4, 1], []) == (2 * 4 * 100 + 10) / 4


SCORES = st.dictionaries(st.integers(1, 20), st.floats(0, 1), min_size=2)


@given(SCORES, st.floats(-1, 1))
def test_a_paired_difference_of_a_shift_is_the_shift(scores: dict[int, float], shift: float) -> None:
    found = paired({seed: score + shift for seed, score in scores.items()}, scores)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.mean == pytest.approx(shift, abs=1e-9)
    assert found.low <= found.mean <= found.high
    assert found.n == len(scores)


def test_the_verdict_follows_from_the_interval() -> None:
    def verdict(*differences: float) -> str:
        found = paired(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
        assert found is not None
        return found.verdict

    assert verdict(0.1, -0.1, 0.05) == "no difference seen"
    assert verdict(-0.10, -0.11, -0.12) == "lower"
    assert verdict(0.10, 0.11, 0.12) == "higher"
    assert verdict(0.1) == "one seed only"
    three = paired({1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.0, 2: 0.0, 3: 0.0, 4: 9.0})
    assert three is not None
    assert three.low == pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5)


def test_a_cell_is_compared_with_the_baseline_of_its_other_axes() -> None:
    def result(lag: str, loss: str, score: float) -> Result:
        return Result(f"{lag}{loss}", {"lag": lag, "loss": loss}, 1, score=score)

    found = summaries([result("0", "a", 0.5), result("4", "a", 0.25), result("4", "b", 0.125)], {"lag": "0"})
    assert [one.is_baseline for one in found] == [True, False, False]
    assert area([(0, 0.0), (10, 1.0), (30, 1.0)]) == pytest.approx((5 + 20) / 30)  # the mean over versions
    assert area([(0, 1.0)]) is None
    assert found[1].against is not None
    assert found[1].against.mean == -0.25
    assert found[2].against is None  # its baseline has not run


@pytest.mark.slow
def test_a_ring_is_a_job_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = SMALL_SET.replace('"run.total_train_steps" = 6', '"run.total_train_steps" = 3')
    grid = '"rollout.exact_lag" = []\n[grid]\n"rollout.max_head_offpolicyness" = [1]\n'
    file = sweep_file(tmp_path, f"{HEAD}seeds = 1\nranks = 3\n[set]\n{few}\n{grid}")
    assert sweep.main([str(file), "--out", str(tmp_path / "out"), "--keep"]) == 0
    assert "[1/1] max_head_offpolicyness-1.seed-1-" in capsys.readouterr().out
    (result,) = ResultFile(tmp_path / "out" / "results.jsonl").read().values()
    assert (result.n_updates, result.error) == (3, "")
    assert result.score is not None


@given(st.sampled_from(border.XS[150:330]), st.sampled_from(border.POWERS))
def test_the_border_of_scores_that_follow_it_is_found(x: float, power: float) -> None:
    true = border.Fit(x, power, 0.0)
    lags, rates = (0, 1, 4, 16), (x / 16, x / 4, x)
    scores = {(lag, lr): {seed: 0.1 * seed * true.share(lag * lr) for seed in (1, 2)} for lag in lags for lr in rates}
    found = border.fit(border.shares(scores, [1, 2]))
    assert found.x == pytest.approx(x, rel=0.04)
    assert found.power == power
    assert found.error < 1e-6


def test_the_border_of_the_published_table_is_that_of_one_task() -> None:
    table = ROOT / "docs" / "tolerance" / "runs.csv"
    with pytest.raises(ConfigError, match="choose by a column, for example --where task=reverse"):
        border.read_scores(table, "rloo-naive")
    scores = border.read_scores(table, "rloo-naive", {"task": "reverse", "family": "llama"})
    found = border.fit(border.shares(scores, [1, 2, 3, 4, 5]))
    assert found.x == pytest.approx(1.57e-3, rel=0.01)  # docs/tolerance.md
    assert found.error < 0.05


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_ends_with_table_csv_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = '[baseline]\n"rollout.exact_lag" = 0\n[grid]\n"rollout.exact_lag" = [0, 2]\n'
    file = sweep_file(tmp_path, f"{HEAD}seeds = 1\n[set]\n{SMALL_SET}\n{axes}")
    line = [str(file), "--out", str(tmp_path / "out"), "--cores", "1"]
    command, pipe = [sys.executable, "-m", "areal_lab.sweep", *line], subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert next(line for line in process.stdout if line.startswith("[")).startswith("[1/2]")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 130
        assert process.stderr.read().endswith("stopped: 1 of 2 jobs are done; the same line goes on\n")
    results = tmp_path / "out" / "results.jsonl"
    (first,) = results.read_text().splitlines()

    assert sweep.main(line) == 0
    out = capsys.readouterr().out
    assert next(text for text in out.splitlines() if text.startswith("[")).startswith("[2/2]")
    assert results.read_text().splitlines()[0] == first
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 3
    assert "baseline" in out
    assert "one seed only" in out
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    assert "<svg" in (tmp_path / "out" / "plot.svg").read_text()

    assert sweep.main([*line, "--report"]) == 0
    assert sweep.main([*line, "--dry-run"]) == 0
    assert "2 jobs (2 in one process): 2 done, 0 to do" in capsys.readouterr().out
