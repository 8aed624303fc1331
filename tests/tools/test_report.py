"""tools.report: facts and verdicts of real and made journals, the pages of runs and sweeps, and the file in a browser.

The tests in a browser are skipped where there is no Chromium on the path.
"""

import json
import math
import re
import shutil
from array import array
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.config.loader import fields
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.sweep.results import Result
from tests.support.browser import browse, needs_chromium
from tests.tools.test_export import Ring
from tools.breakdown.incarnations import read_all
from tools.report import __main__ as report
from tools.report.facts.curves import MOST, Curve, StepBins, VersionClock
from tools.report.facts.notable_samples import N_DISAGREEMENTS
from tools.report.facts.run_facts import RunFacts, read_facts
from tools.report.facts.seeds import groups_of, mean_and_range
from tools.report.facts.settings_rows import setting_rows
from tools.report.page.charts import CHARACTER, LEFT, number, y_axis
from tools.report.page.curve_cards import Plot, with_spread, within
from tools.report.page.parts import render
from tools.report.page.run_page import run_page, second_opinion
from tools.report.page.time_cards import time_section
from tools.report.verdict import judge
from tools.report.verdict.health import remarks_on
from tools.report.verdict.learning import whether_it_learns
from tools.report.verdict.remarks import Grade
from tools.run import Run

ROOT = Path(__file__).parents[2]
SECTIONS = (
    "health",
    "alarms",
    "curves",
    "time",
    "push",
    "generators",
    "tokens",
    "ages",
    "refunds",
    "incidents",
    "samples",
    "settings",
)
HOSTILE = '</pre><script>document.title="taken"</script><img src=x onerror=alert(1)> \x1b[31m \ud800 \u202e'
Out = pytest.CaptureFixture[str]


def copied(journals: Path, folder: Path, name: str = "push-bound") -> Path:
    """A copy of a real run that a test may change, with texts of two samples."""
    shutil.copytree(journals / name, folder / name)
    lines = (folder / name / "journal" / "head-0.0.jsonl").read_text().splitlines()
    scored = [json.loads(line) for line in lines if '"event":"scored"' in line]
    (folder / name / "samples").mkdir()
    with (folder / name / "samples" / "samples.jsonl").open("w") as file:
        for line in scored:
            ids = {"version": 0, "uid": line["uid"], "sample": line["sample"], "attempt": line["attempt"]}
            sample = {"kind": "train", "evaluation": "", "step": 0} | ids
            told = {"prompt": "1+1=", "completion": HOSTILE, "reward": 0.0, "correct": False, "status": "value"}
            told["answer"] = "2 apples"
            sample |= told | {"finish": "stop", "versions": [[0, 4]], "n_tokens": 4}
            file.write(json.dumps(sample, separators=(",", ":")) + "\n")
    return folder / name


def page_of(folder: Path) -> str:
    facts = read_facts(Run(folder))
    return render(run_page(facts, judge(facts))).decode()


# facts


@given(st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 10)), min_size=1, max_size=60))
@settings(max_examples=50)
def test_bins_widen_and_keep_their_sum(values: list[tuple[int, float]]) -> None:
    bins = StepBins()
    for version, value in values:
        bins.add("a", version, value)
    assert bins.total("a") == pytest.approx(math.fsum(value for _, value in values))
    assert max(bins.sums["a"]) < MOST


@given(st.lists(st.floats(0, 100), max_size=20), st.floats(-10, 100), st.floats(0, 50))
@settings(max_examples=50)
def test_a_span_is_split_without_loss_at_the_updates_within_it(walls: list[float], begin: float, length: float) -> None:
    clock = VersionClock()
    for version, wall in enumerate(sorted(walls), start=1):
        clock.update(wall, version)
    parts = list(clock.split(begin, begin + length))
    assert math.fsum(seconds for _, seconds in parts) == pytest.approx(length, abs=1e-6)
    assert all(seconds >= 0 for _, seconds in parts)
    assert [version for version, _ in parts] == sorted(version for version, _ in parts)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(1, 60))
@settings(max_examples=50)
def test_bins_of_a_curve_keep_mean_range_and_end(values: list[float], most: int) -> None:
    curve = Curve(array("q", range(len(values))), array("d", values))
    bins = curve.bins(most)
    assert len(bins) == min(most, len(values))
    assert (bins[-1].x, min(one.low for one in bins)) == (len(values) - 1, min(values))
    assert max(one.high for one in bins) == max(values)
    assert all(one.low <= one.mean + 1e-6 and one.mean <= one.high + 1e-6 for one in bins)


@pytest.mark.parametrize("name", ["generation-bound", "learner-bound", "push-bound"])
def test_seconds_by_step_sum_to_those_of_the_breakdown(journals: Path, name: str) -> None:
    facts = read_facts(Run(journals / name))
    for actor in read_all(Run(journals / name)):
        bins = facts.time.labels[actor.name.partition(".")[0]]
        found: dict[str, float] = {}
        for label in bins.sums:
            found[label.partition(":")[0]] = found.get(label.partition(":")[0], 0.0) + bins.total(label)
        assert found == pytest.approx({label: s for label, s in actor.spans.items() if s > 0}, abs=1e-6)
    trained, masked = facts.ages.tokens()
    assert trained.total() + masked.total() == sum(facts.curve("rollout/n_tokens").values)
    slots = facts.setting("rollout.max_concurrent_rollouts")
    assert isinstance(slots, int)
    assert all(bins.total("samples") / bins.total("seconds") > 0 for bins in facts.time.in_flight.values())


def test_the_page_has_the_share_of_prompt_tokens_that_were_reused(journals: Path) -> None:
    facts = read_facts(Run(journals / "push-bound"))
    assert "reused" not in time_section(facts).note
    ids = {"role": "generator", "rank": 0, "wall": 0.0, "uid": 0, "attempt": 0, "event": "completion"}
    for sample in range(3):
        facts.time.take(ids | {"sample": sample, "n_prompt": 500, "n_reused": 123 * sample})
    assert "the keys of 24.6% of 1,500 prompt tokens" in time_section(facts).note


# verdicts


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("generation-bound", "Sampling limits"),
        ("learner-bound", "The learner limits"),
        ("push-bound", "The weight push"),
    ],
)
def test_the_verdict_names_the_bottleneck_of_each_real_run(journals: Path, name: str, sentence: str) -> None:
    verdict = judge(read_facts(Run(journals / name)))
    assert verdict.limit.sentence.startswith(sentence)
    assert set(verdict.limit.advice) <= set(verdict.advice)


def facts_with(**series: list[float]) -> RunFacts:
    """A run with these series, under names with _ for /."""
    facts = RunFacts(Run(Path("made")), "made")
    for name, values in series.items():
        curve = facts.curves.setdefault(name.replace("_", "/", 1), Curve())
        for version, value in enumerate(values):
            curve.add(version, value)
    return facts


RISING, FLAT = [0.1, 0.15, 0.12, 0.2, 0.5, 0.6, 0.7, 0.8, 0.82, 0.81], [0.3, 0.32, 0.29, 0.31, 0.3, 0.33, 0.29, 0.31]


@pytest.mark.parametrize(
    ("series", "grade", "words"),
    [
        ({"rollout_reward": RISING}, Grade.GOOD, "no held-out score"),
        ({"rollout_reward": FLAT}, Grade.NOTE, "No clear sign"),
        ({"rollout_reward": RISING[::-1]}, Grade.BAD, "Reward falls"),
        ({"rollout_reward": [0.5, 0.6]}, Grade.NOTE, "Too early"),
        ({"eval_accuracy": [0.2, 0.9], "eval_n": [100, 100]}, Grade.GOOD, "held-out score rises"),
        (
            {"rollout_reward": RISING, "eval_accuracy": [0.9, 0.2], "eval_n": [100, 100]},
            Grade.BAD,
            "exploit the reward",
        ),
        ({"rollout_reward": RISING, "eval_accuracy": [0.5, 0.52], "eval_n": [50, 50]}, Grade.NOTE, "no clear change"),
    ],
)
def test_learning_is_judged_against_its_standard_error(
    series: dict[str, list[float]], grade: Grade, words: str
) -> None:
    remark = whether_it_learns(facts_with(**series))
    assert (remark.grade, words in remark.sentence) == (grade, True), remark


@pytest.mark.parametrize(
    ("series", "words"),
    [
        ({"rollout_truncated_share": [0.9] * 8}, "cut at gconfig"),
        ({"train_ess": [0.2] * 8}, "dominate"),
        ({"train_grad_norm": [1.0, math.nan]}, "not finite"),
    ],
)
def test_each_rule_of_health_finds_its_fault_and_is_silent_otherwise(
    series: dict[str, list[float]], words: str
) -> None:
    assert words in remarks_on(facts_with(**series))[0].sentence
    healthy = {name: [0.95] * 12 if name == "train_ess" else [0.05] * 12 for name in series}
    assert [remark.grade for remark in remarks_on(facts_with(**healthy))] == [Grade.GOOD]


def test_deaths_undone_versions_and_refunds_are_reported(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring")
    for reward in (0.5, 0.75, 0.6):
        ring.update(reward)
    ring.line("head", "member", name="generator-0.0", state="dead", why="silent for 9 s")
    ring.line("generator", "start", schema=1, pid=2)
    ring.line("head", "refund", uid=1, reason="reward_error", n_tokens_dropped=9)
    ring.go_back(1)
    ring.update(0.9)
    facts = read_facts(Run(ring.folder))
    assert list(facts.curve("rollout/reward").values) == [0.5, 0.9]
    assert (facts.incidents.n_of["death"], facts.incidents.n_of["restart"], facts.incidents.n_undone) == (1, 1, 2)
    assert sum(facts.ages.trajectories().values()) == 0  # the lines of this journal have no n_masked
    sentences = " ".join(remark.sentence for remark in remarks_on(facts))
    assert "2 versions were trained again" in sentences
    assert "reward_error" in sentences
    page = page_of(ring.folder)
    assert "the breakdown needs the field" in page or "Where the time went" in page
    for text in ("silent for 9 s", "the reward function raised an error", "2 versions are undone"):
        assert text in page


# the page of a run


def test_the_page_has_every_part_loads_nothing_and_shows_texts_as_text(journals: Path, tmp_path: Path) -> None:
    folder = copied(journals, tmp_path)
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert len(page) < 3_000_000
    assert re.findall(r'<section id="(\w+)"', page) == ["verdict", *SECTIONS]
    for text in ("The weight push limits the run", "What to change", "Samples in flight",
                 "Trajectories, by their oldest", "Slowest", "entered the loss",
                 "Length bias under the policy mask, eta 0", "Surprisingly good",
                 "rollout.max_head_offpolicyness", "learner-0", "generator-1"):  # fmt: skip
        assert text in page
    assert page.count('<svg class="chart"') > 25
    assert "default-src &#39;none&#39;" in page
    markup = re.sub(r"<pre[^>]*>.*?</pre>", "", page, flags=re.S)
    assert not re.search(r'(src|href)=(?!"#|"episodes/)|url\(|@import|\sstyle=|\son\w+=["\']', markup)
    assert "<img" not in page
    assert page.count("<script>") == 1
    assert "&lt;script&gt;document.title" in page
    assert "\x1b" not in page
    assert "\\x1b[31m \\ud800 \\u202e" in page
    assert "answer of the row" in page
    assert "2 apples" in page
    assert '<article class="wrong">' in page
    links = set(re.findall(r'href="(episodes/[^"]+)"', page))
    assert links == {f"episodes/{path.name}" for path in (folder / "episodes").iterdir()} != set()
    assert all("&lt;script&gt;document.title" in (folder / link).read_text(encoding="utf-8") for link in links)


def test_the_page_lists_alarms_with_samples_and_links_recordings_below_the_run(journals: Path, tmp_path: Path) -> None:
    folder = copied(journals, tmp_path, "generation-bound")
    journal = folder / "journal" / "learner-0.0.jsonl"
    line = json.loads(journal.read_text().splitlines()[-1]) | {"event": "profile", "first": 2, "last": 3}
    with journal.open("a") as file:
        for name in ("profiles/learner-0.0-step-000002.json.gz", "profiles/../../x.json.gz", 'profiles/"><b>.json.gz'):
            file.write(json.dumps(line | {"file": name}, separators=(",", ":")) + "\n")
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    link = '<a href="profiles/learner-0.0-step-000002.json.gz">learner-0.0, steps 2 to 3</a>'
    assert re.findall(r'<a href="(?!#|episodes/).*?</a>', page) == [link]
    assert ">masked_tokens</td>" in page
    alarm = next(one for one in judge(read_facts(Run(folder))).health if "Alarm masked_tokens" in one.evidence)
    assert alarm.grade == (Grade.BAD if "and holds" in alarm.evidence else Grade.NOTE)
    assert alarm.advice[0] in judge(read_facts(Run(folder))).advice
    assert "masked_tokens: samples to read" in page


def test_changed_settings_are_listed_with_their_defaults() -> None:
    rows = {row.key: row for row in setting_rows({"actor": {"lr": 0.5, "clip": 1}, "rollout": {"engine": "builtin"}})}
    assert rows["actor.lr"].is_changed
    assert rows["actor.lr"].default != "0.5"
    assert not rows["rollout.engine"].is_changed
    assert "no such key" in rows["actor.clip"].meaning
    unset = setting_rows(Config().model_dump(mode="json"))  # a section that is not set is no unknown key
    assert [row.key for row in unset if "no such key" in row.meaning] == []
    assert {row.key for row in unset} <= set(fields())


def test_a_run_whose_held_out_score_fell_or_that_stopped_early_is_not_advised_to_train_longer(tmp_path: Path) -> None:
    scores = [0.4, 0.5, 0.49, 0.48]
    remark = whether_it_learns(facts_with(rollout_reward=[0.5] * 10, eval_avg_at_k=scores))
    assert "The best evaluation is 0.5, at version " in remark.evidence
    assert not any("Train longer" in line for line in remark.advice)
    assert any("before you train longer" in line for line in remark.advice)
    still = whether_it_learns(facts_with(rollout_reward=[0.5] * 10, eval_avg_at_k=[0.5, 0.5]))
    assert any("Train longer" in line for line in still.advice)
    ring = Ring(tmp_path / "run")
    ring.update(0.5)
    reason = "stopped at version 8, because avg_at_k did not improve in 2 evaluations"
    ring.line("head", "end", code=0, reason=reason, wall_s=1.0)
    stopped = read_facts(Run(ring.folder))
    stopped.curves = facts_with(
        rollout_reward=[0.5] * 8, eval_avg_at_k=[0.5, 0.5, 0.49]
    ).curves  # the first is the best
    advice = whether_it_learns(stopped).advice
    assert not any("Train longer" in line for line in advice)
    assert any(reason in line for line in advice)


@pytest.mark.parametrize("is_share", [True, False])
def test_a_band_ends_at_the_values_that_it_is_about(is_share: bool) -> None:
    """A deviation of 0.4 around 0.9 ends at the largest reward, and around a share at 1."""
    curves = facts_with(rollout_reward=[0.9, 0.1], spread=[0.4, 0.4], least=[0.0, 0.0], most=[1.0, 1.0]).curves
    bounds = ("", "") if is_share else ("least", "most")
    plot = Plot("Reward", [("rollout/reward", "mean")], "spread", "", bounds, is_share)
    bins = within(
        with_spread(curves["rollout/reward"].bins(), curves["rollout/reward"], curves["spread"]), curves, plot
    )
    assert [(one.low, one.high) for one in bins] == [(0.5, 1.0), (0.0, 0.5)]


@given(st.floats(-1e13, 1e13))
def test_a_tick_fits_left_of_its_axis(value: float) -> None:
    assert CHARACTER * len(number(value)) <= LEFT - 4


def test_a_torn_journal_one_that_lacks_fields_and_one_that_begins_give_a_page(journals: Path, tmp_path: Path) -> None:
    folder = copied(journals, tmp_path)
    whole = judge(read_facts(Run(folder)))
    for path in (folder / "journal").glob("*.jsonl"):
        with path.open("ab") as file:
            file.write(b'{"t":1,"wall":2e9,"role":"head","event":"upd')
    assert judge(read_facts(Run(folder))).limit == whole.limit
    head = folder / "journal" / "head-0.0.jsonl"
    head.write_text(head.read_text().replace('"catch_up":false', '"was":false').replace('"n_masked"', '"was"'))
    page = page_of(folder)
    assert "the breakdown needs the field &#39;catch_up&#39;" in page
    assert "No trajectory was trained" in page
    for path in (folder / "journal").glob("*.jsonl"):
        first = path.read_bytes().split(b"\n")[0]
        path.write_bytes(first + b"\n")
    page = page_of(folder)
    for text in (
        "fewer than two updates",
        "Too early to tell",
        "No update and no evaluation yet",
        "No push was published",
    ):
        assert text in page


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["empty"], "missing journal"),
        (["nowhere"], "nowhere does not exist"),
        (["run", "run"], "duplicate run"),
        (["old"], "has schema 2"),
        (["run", "--x", "lr"], "must be a sweep's folder"),
        (["run", "--output", "nowhere/a.html"], "the report must be writable"),
        (["sweep", "run"], "a sweep has a report of its own"),
        (["sweep"], "results.jsonl has no line"),
    ],
)
def test_bad_input_is_one_sentence(
    names: list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "sweep"):
        Path(name).mkdir()
    Path("sweep/results.jsonl").write_text("torn", encoding="utf-8")
    Ring(tmp_path / "run").update(0.5)
    Ring(tmp_path / "old")
    for path in (tmp_path / "old" / "journal").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"schema":1', '"schema":2'))
    with pytest.raises(ConfigError, match=rule):
        report.main(names)


# several runs


def made_run(folder: Path, rewards: list[float], **config: object) -> Path:
    ring = Ring(folder)
    for reward in rewards:
        ring.update(reward)
    (folder / "config.json").write_text(json.dumps({"run": {"seed": 1}, "actor": {"lr": 0.5}} | config))
    return folder


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(tmp_path: Path, capsys: Out) -> None:
    one = made_run(tmp_path / "one", [0.1, 0.2, 0.3])
    two = made_run(tmp_path / "two", [0.3, 0.4], run={"seed": 2, "name": "two"})
    other = made_run(tmp_path / "other", [0.9, 0.9, 0.9], actor={"lr": 0.25})
    facts = [read_facts(Run(folder)) for folder in (one, two, other)]
    first, second = groups_of(facts)
    assert (first.name, second.name) == ("one (seeds 1, 2)", "other")
    bins = mean_and_range(first.curves("rollout/reward"))
    assert [(one.x, one.mean, one.low, one.high) for one in bins] == [
        (1, pytest.approx(0.2), 0.1, 0.3), (2, pytest.approx(0.3), 0.2, 0.4), (3, 0.3, 0.3, 0.3)]  # fmt: skip
    assert report.main([str(one), str(two), str(other)]) == 0
    page = (one / "comparison.html").read_text()
    assert "one (seeds 1, 2)" in page
    assert '<path class="band c0"' in page
    assert re.search(r"<td>actor.lr</td><td>0.5</td><td>0.25</td>", page)
    assert "scores highest, but it is not certain" in capsys.readouterr().out


def test_runs_of_different_tasks_are_overlaid_with_a_warning(tmp_path: Path, capsys: Out) -> None:
    one = made_run(tmp_path / "a" / "run", [0.1, 0.2, 0.3], data={"path": "a.jsonl"})
    two = made_run(tmp_path / "b" / "run", [0.3, 0.4, 0.5], data={"path": "b.jsonl"})
    assert report.main([str(one), str(two), "--output", str(tmp_path / "both.html")]) == 0
    assert "Their scores do not compare" in capsys.readouterr().out
    page = (tmp_path / "both.html").read_text()
    assert ">a/run<" in page
    assert ">b/run<" in page


# sweeps


def sweep_of(folder: Path) -> Path:
    """Two axes, three seeds; lag 4 is worse. One job failed, one cell has its run folders."""
    (folder / "runs").mkdir(parents=True)
    with (folder / "results.jsonl").open("w") as file:
        for seed in (1, 2, 3):
            for lag, score in (("0", 0.8), ("4", 0.3)):
                for loss in ("ppo", "gspo"):
                    digest = f"{seed}{lag}{loss}".ljust(16, "0")
                    better = 0.05 if loss == "gspo" else 0.0
                    cell, total = {"rollout.exact_lag": lag, "loss": loss}, score + better + seed / 1000
                    result = Result(digest, cell, seed, score=total, auc=score / 2, means={"ess": score})
                    file.write(json.dumps(asdict(result)) + "\n")
        failed = Result("x", {"rollout.exact_lag": "8", "loss": "ppo"}, 1, error="<b>it died")
        file.write(json.dumps(asdict(failed)) + "\n")
    for seed in (1, 2):
        made_run(folder / "runs" / f"lag-0.seed-{seed}-{seed}0gspo00", [0.1 * seed, 0.2 * seed])
    return folder


def test_the_page_of_a_sweep_ranks_cells_and_draws_kept_runs(tmp_path: Path) -> None:
    assert report.main([str(sweep_of(tmp_path / "sweep"))]) == 0
    page = (tmp_path / "sweep" / "report.html").read_text()
    for text in ("exact_lag 0, loss gspo.", "Which axis matters most?</h2>\n<p class=\"sentence\">exact_lag.",
                 "1 of 13 failed", "&lt;b&gt;it died", "Score by exact_lag", "<h2>Curves</h2>",
                 "0 of the 3 other cells are not surely lower"):  # fmt: skip
        assert text in page
    assert report.main([str(tmp_path / "sweep"), "--x", "loss", "--output", str(tmp_path / "x.html")]) == 0
    assert "Score by loss" in (tmp_path / "x.html").read_text()
    with pytest.raises(ConfigError, match="--x must be an axis with several values: exact_lag, loss; got lr"):
        report.main([str(tmp_path / "sweep"), "--x", "lr"])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5))
@settings(max_examples=50)
def test_an_axis_holds_its_values_and_few_round_ticks(values: list[float]) -> None:
    axis = y_axis(values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 1 <= len(axis.ticks(4)) <= 12


# in a browser

PROBE = """<script>
addEventListener("load", () => {
  const chart = document.querySelector("svg[data-hover]"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
  const told = document.getElementById("hover").textContent;
  document.body.style.width = "380px";
  document.title = [document.body.scrollWidth, getComputedStyle(document.body).backgroundColor, told].join("|");
});
</script>"""


@pytest.mark.slow
@needs_chromium
def test_the_file_in_a_browser_light_dark_narrow_and_printed(journals: Path, tmp_path: Path) -> None:
    folder = copied(journals, tmp_path)
    assert report.main([str(folder)]) == 0
    page = folder / "report.html"
    printed = tmp_path / "report.pdf"
    browse(page.as_uri(), tmp_path, f"--print-to-pdf={printed}")
    assert printed.read_bytes().count(b"/Type /Page\n") >= 4
    probed = tmp_path / "probed.html"  # a script of the test cannot run under the page's own policy
    text = page.read_text()
    probed.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", f"{PROBE}</body>"))
    colours = []
    for light in (True, False):
        shown = browse(probed.as_uri(), tmp_path, "--dump-dom", "--window-size=1000,900", light=light)
        title = re.search("<title>(.*?)</title>", shown, re.S)
        assert title is not None
        width, colour, told = title[1].split("|")
        assert int(width) <= 380
        assert told.startswith("version ")
        assert "mean: " in told
        colours.append(colour)
    assert colours == ["rgb(246, 247, 249)", "rgb(20, 22, 26)"]


# size


def test_the_report_shows_the_samples_on_which_a_second_grader_disagrees_with_their_texts(tmp_path: Path) -> None:
    facts = RunFacts(Run(tmp_path), "run", {"reward": {"check": {"function": "math_verify"}}})
    told = {"event": "check", "sample": 0, "attempt": 0, "reward": 0.0, "correct": False}
    for uid in range(300):
        agrees = uid % 10 > 0
        texts = {} if agrees else {"prompt": "1+1", "completion": f"it is {uid}", "row": "{}"}
        value = {"check_reward": float(not agrees), "check_correct": not agrees, "agrees": agrees}
        facts.notable.take({**told, "uid": uid, "status": "value", **value, **texts})
    facts.notable.take({**told, "uid": 300, "status": "timeout", "error": "late"})
    title, cards = second_opinion(facts)
    assert title == "Second opinion (math_verify): 30 of 300 differ; it failed on 1 more"
    assert (len(cards), cards[0].heading) == (N_DISAGREEMENTS, "uid 290 sample 0")
    assert cards[0].facts == "reward 0, check 1 (wrong and right)"
    assert cards[0].texts[1][:2] == ("completion", "it is 290")
