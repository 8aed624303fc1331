"""tools.watch: prompts counted along the ring, frames of any journal, the terminal view, the page and its access."""

import html
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from rich.console import Console

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from areal_bus.transport.web_server import HOST
from areal_lab.staleness.simulator import ring as simulator
from areal_lab.staleness.simulator.scenario import draw
from tests.support.browser import browse, needs_chromium
from tests.tools.test_export import Ring
from tools.alarms.rules import WINDOW
from tools.run import Run
from tools.watch import __main__ as watch
from tools.watch import screen
from tools.watch.live_run import LiveRun, thinned
from tools.watch.metrics import labels
from tools.watch.ring_flow import RingFlow, Stage
from tools.watch.screen import sparkline
from tools.watch.server import PageServer

ROOT = Path(__file__).parents[2]
LIVE = (Stage.WAITING, Stage.GENERATORS, Stage.REWARDS, Stage.READY)
Out = pytest.CaptureFixture[str]


# prompts in the ring


@pytest.mark.parametrize("seed", range(40))
def test_the_stages_add_up_to_the_heads_counts(seed: int) -> None:
    """Schedules with all kinds of faults. After an orderly end every prompt is trained or refunded."""
    ring = simulator.Ring(draw(seed))
    ring.records = []
    assert not ring.run().violations
    flow, n_trained = RingFlow(), 0
    for _, record in ring.records:
        flow.take({"role": "head", "event": str(record.event), **record.fields})
        counts = flow.counts()
        if record.event == Event.ADMIT:
            counted = sum(counts[stage] for stage in LIVE), counts[Stage.TRAINING]
            assert counted == (record.fields["live"], record.fields["in_training"]), record
        n_trained = counts[Stage.TRAINED]
    if ring.end is not None and ring.end.code == 0:
        assert sum(counts[stage] for stage in LIVE) + counts[Stage.TRAINING] == 0
        assert n_trained > 0 or not any(record.event == Event.PUBLISH for _, record in ring.records)


def test_a_prompt_moves_through_every_stage() -> None:
    flow = RingFlow()

    def after(event: str, **fields: object) -> list[Stage]:
        flow.take({"role": "head", "event": event, "uid": 7, "attempt": 0} | fields)
        return [stage for stage, n in flow.counts().items() if n]

    assert after("admit", live=1) == [Stage.WAITING]
    assert after("lease", holder="generator-0.0", n=2) == [Stage.GENERATORS]
    assert after("sampled", sample=0) == [Stage.GENERATORS]
    assert after("member", name="generator-0.0", state="dead") == [Stage.WAITING]
    assert after("lease", holder="generator-1.0", n=2, attempt=1) == [Stage.GENERATORS]
    assert after("sampled", sample=0) == [Stage.GENERATORS]  # late, of the lease before
    for sample in (0, 1):
        after("sampled", sample=sample, attempt=1)
    assert after("member", name="reward-0.0", state="healthy") == [Stage.REWARDS]
    assert after("ready") == [Stage.READY]
    after("batch", step=0)
    assert after("trajectory", step=0) == [Stage.TRAINING]
    assert after("publish", version=1) == [Stage.TRAINED]
    assert after("term", version=0, open=[7], kept=[[0, 1]]) == [Stage.READY]  # the update is undone
    assert after("refund") == []


# frames


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    made = Ring(tmp_path / "ring")
    made.update(0.5)
    made.update(0.75)
    return made


def test_a_frame_follows_a_growing_journal_and_a_rollback(ring: Ring) -> None:
    live = LiveRun(Run(ring.folder))
    assert live.frame().curves["rollout/reward"] == [(1, 0.5), (2, 0.75)]
    head = ring.folder / "journal" / "head-0.0.jsonl"
    with head.open("a") as file:
        file.write('{"t":1,"wall":2000,"role":"head","event":"upd')  # torn: more may follow
    assert live.frame().version == 2
    with head.open("r+b") as file:
        file.truncate(head.stat().st_size - len('{"t":1,"wall":2000,"role":"head","event":"upd'))
    ring.go_back(1)
    ring.update(0.25)
    frame = live.frame()
    assert (frame.term, frame.version, frame.published) == (1, 2, 2)
    assert frame.curves["rollout/reward"] == [(1, 0.5), (2, 0.25)]
    assert json.loads(json.dumps(frame.flow)) == frame.flow


def test_lines_of_an_older_schema_leave_gaps_not_errors(ring: Ring) -> None:
    ring.line("head", "admit", uid=1)
    ring.line("head", "term", version=1, open=[1], kept="none")
    ring.line("head", "member", state="dead")
    ring.line("head", "trajectory", step=2)
    assert LiveRun(Run(ring.folder)).frame().version is not None


def test_long_curves_are_thinned_to_means_and_keep_their_ends() -> None:
    points = [(version, float(version)) for version in range(1, 1001)]
    thin = thinned(points, 100)
    assert (len(thin), thin[0], thin[-1]) == (100, (10, 5.5), (1000, 995.5))
    assert thinned(points[:100], 100) == points[:100]
    assert sparkline([(1, 0.0), (2, 1.0), (3, 0.5)]) == "▁█▅"
    assert sparkline([(1, 2.0), (2, 2.0)]) == "▁▁"


# the terminal


def test_once_prints_ring_curves_actors_and_samples_as_plain_text(ring: Ring, capsys: Out) -> None:
    samples = ring.folder / "samples" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"4"', '"4 \\u001b[31m"'))
    assert watch.main([str(ring.folder), "--once"]) == 0
    out = capsys.readouterr().out
    for text in ("prompts in the ring", "rollout/reward", "▁█", "generator-0.0", "newest samples", "| 2+2?"):
        assert text in out
    assert "\x1b" not in out  # a model's output does not control the terminal
    assert "4 \\x1b[31m" in out


def raise_alarm(ring: Ring) -> None:
    """A window of updates with masked tokens."""
    for version in range(3, 3 + WINDOW):
        ring.line("learner", "step", version=version, masked_share=0.5)


def test_the_terminal_has_a_line_for_an_alarm(ring: Ring, capsys: Out) -> None:
    raise_alarm(ring)
    assert watch.main([str(ring.folder), "--once"]) == 0
    said = "alarm masked_tokens since version 7: 50.0% of the tokens are too old to train"
    assert said in capsys.readouterr().out
    ring.line("head", "end", code=0, reason="done", wall_s=1.0)
    assert watch.main([str(ring.folder)]) == 0
    assert capsys.readouterr().out.count(said) == 1


def test_without_a_terminal_it_prints_lines_until_the_run_ends(ring: Ring, capsys: Out) -> None:
    ring.line("head", "end", code=0, reason="done", wall_s=1.0)
    assert watch.main([str(ring.folder)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "version 2; prompts: 0 waiting" in first
    assert "rollout/reward 0.75" in first
    assert last.endswith("it ended: done")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--every", "0"], "--every must be at least 0.2 s"),
        (["--web", "--once"], "leave out --web"),
        (["--port", "80"], "--port needs --web"),
        (["--web", "--port", "70000"], "between 0 and 65535"),
    ],
)
def test_wrong_options_are_refused(ring: Ring, options: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        watch.main([str(ring.folder), *options])


# the page


@contextmanager
def served(folder: Path) -> Iterator[PageServer]:
    with PageServer(LiveRun(Run(folder))) as server:
        yield server


def test_metrics_have_the_form_of_prometheus_and_the_figures_of_the_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALBUS_WATCH_TOKEN", "always the same")
    ring = Ring(tmp_path)
    ring.update(0.5)
    with served(ring.folder) as server, urlopen(f"http://127.0.0.1:{server.port}/metrics?token=always+the+same") as got:
        assert got.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = got.read().decode()
    line = re.compile(r"(areal_bus_\w+)(?:\{\w+=\"[^\"\\\n]*\"\})? (-?\d\S*)|# (HELP|TYPE) (areal_bus_\w+) .+")
    parsed = [line.fullmatch(one) for one in text.splitlines()]
    assert all(parsed), text
    assert text.endswith("\n")
    kinds = [one[4] for one in parsed if one is not None and one[3] == "TYPE"]
    assert len(kinds) == len(set(kinds))
    assert {one[1] for one in parsed if one is not None and one[1]} == set(kinds)
    assert "areal_bus_version 1.0" in text
    assert 'areal_bus_figure{series="rollout/reward"} 0.5' in text
    assert 'areal_bus_prompts{stage="waiting"} ' in text
    assert sum(float(value) for value in re.findall(r"^areal_bus_run_state\S* (.+)$", text, re.M)) == 1.0


def test_label_values_are_escaped() -> None:
    assert labels({"name": 'a "b"\\\n'}) == '{name="a \\"b\\"\\\\\\n"}'


def status(server: PageServer, path: str, **headers: str) -> int:
    link = http.client.HTTPConnection(HOST, server.port, timeout=10)
    try:
        link.request("GET", path, headers=headers)
        return link.getresponse().status
    finally:
        link.close()


def test_the_page_needs_its_token_and_its_own_name(ring: Ring) -> None:
    with served(ring.folder) as server:
        token = f"?token={server.token}"
        paths = ("/", "/frame.json", "/samples", "/other")
        assert [status(server, path + token) for path in paths] == [200, 200, 200, 404]
        for path in (
            "/",
            "/frame.json",
            "/samples",
            "/?token=",
            f"/{token}x",
            "/?token=%C3%A9",
            f"/frame.json?other={server.token}",
        ):
            assert status(server, path) == 403
        assert status(server, f"/{token}", Host=f"example.org:{server.port}") == 403
        with pytest.raises(ConfigError, match="--port must be free"):
            PageServer(LiveRun(Run(ring.folder)), server.port)


def test_the_page_of_episodes_filters_and_shows_a_prompt_in_flight(ring: Ring) -> None:
    ring.line("head", "lease", uid=700, attempt=0, holder="generator-0.0", born=2, n=4)
    with served(ring.folder) as server:

        def page(**query: str) -> str:
            words = urlencode({"token": server.token, **query})
            with urlopen(f"http://{HOST}:{server.port}/samples?{words}") as answer:
                return str(answer.read().decode())

        assert (page().count("<article"), page(text="2+2").count("<article")) == (1, 2)  # the newest step, the run
        assert page(text="no such text").count("<article") == 0
        assert "no logged sample matches --text no such text" in page(text="no such text")
        assert "invalid filter: unknown verdict &#39;maybe&#39;" in page(verdict="maybe")
        assert "invalid filter: invalid literal" in page(uid="x")
        in_flight = page(uid="700")
        assert "No sample of this prompt is logged yet." in in_flight
        assert "attempt 0 leased to generator-0.0: 4 samples" in in_flight
        link = re.search(r'<h4><a href="(samples[?][^"]+)"', page())
        assert link is not None
        with urlopen(f"http://{HOST}:{server.port}/{html.unescape(link[1])}") as answer:
            assert answer.read().count(b"<article") == 1


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser_shows_the_run_and_runs_no_text_of_a_model(
    ring: Ring, tmp_path: Path, scheme: str
) -> None:
    samples = ring.folder / "samples" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"4"', '"<img src=x onerror=document.title=1><b>bold</b>"'))
    raise_alarm(ring)
    with served(ring.folder) as server:
        page = browse(server.url, tmp_path, "--dump-dom", light=scheme == "light")
    assert page.count("<polyline") >= 3
    assert "<title>2 ring</title>" in page
    for text in (
        "in generators",
        "rollout/reward",
        "generator-0.0",
        "version 7",
        "masked_tokens since",
        "&lt;b&gt;bold&lt;/b&gt;",
    ):
        assert text in page
    assert "<img" not in page


@contextmanager
def started(line: list[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that takes SIGINT, also where this one ignores it (in a shell's background); killed at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(line, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_serves_until_it_is_interrupted(ring: Ring) -> None:
    line = [sys.executable, "-m", "tools.watch", str(ring.folder), "--web"]
    with started(line) as process:
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", process.stdout.readline())
        assert said is not None
        link = http.client.HTTPConnection(HOST, int(said[1]), timeout=30)
        link.request("GET", f"/frame.json?token={said[2]}")
        assert json.loads(link.getresponse().read())["version"] == 2
        link.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_the_time_left_is_that_of_the_steps_so_far(tmp_path: Path) -> None:
    """Two updates, 1.1 s apart in the made journal, and eight are left."""
    ring = Ring(tmp_path / "run")
    (ring.folder / "config.json").write_text(json.dumps({"run": {"total_train_steps": 10}}))
    ring.update(0.5)
    assert LiveRun(Run(ring.folder)).frame(now=1002.0).left_s is None
    ring.update(0.5)
    walls = [float(line["wall"]) for line in Run(ring.folder).events("update")]
    frame = LiveRun(Run(ring.folder)).frame(now=1003.0)
    assert frame.left_s == pytest.approx(8 * (walls[1] - walls[0]))
    narrow = Console(width=70)
    with narrow.capture() as captured:
        narrow.print(screen.render(replace(frame, verdict="learner-0 waits"), 70))
    shown = " ".join(captured.get().split())
    for text in (" of 10, ", " left, ", "learner-0 waits", " prompts: "):
        assert text in shown
