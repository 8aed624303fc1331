"""tools.why: reports on runs that move, hang, have ended or were killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.storage.journal import Journal
from areal_bus.storage.machine import machine
from tools import why
from tools.run import Run

NOW = 2000.0
HERE = machine()
ROOT = Path(__file__).parents[2]


class Forge:
    """Journals by hand: `write` adds a line of a process at a wall time."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        (folder / "journal").mkdir()
        self._seq: dict[str, int] = {}

    def write(self, name: str, wall: float, event: str, /, **fields: Any) -> None:
        role, _, rest = name.partition("-")
        rank, inc = map(int, rest.split("."))
        self._seq[name] = 0 if event == "start" else self._seq[name] + 1
        who = {"role": role, "rank": rank, "inc": inc, "seq": self._seq[name]}
        line = {"t": wall, "wall": wall, "term": 0, **who, "event": event, **fields}
        with self.path(name).open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def path(self, name: str) -> Path:
        return self.run.folder / "journal" / f"{name}.jsonl"

    def start(self, *names: str, wall: float = 1000.0) -> None:
        for name in names:
            self.write(name, wall, "start", schema=1, pid=1)

    def wait(self, wall: float, *waits: tuple[str, str, str, float], verdict: str = "", n: int | None = None) -> None:
        for i, (who, what, on, since_s) in enumerate(waits):
            fields = {"who": who, "what": what, "on": on, "since_s": since_s, "detail": "", "verdict": verdict}
            self.write("head-0.0", wall, "wait", i=i, n=len(waits) if n is None else n, **fields)

    def stall(self, wall: float, verdict: str, *, scope: str = "ring", action: str = "warn") -> None:
        self.write(
            "head-0.0", wall, "stall", scope=scope, stalled_s=300.0, verdict=verdict, on="reward-0.0", action=action
        )

    def look(self, now: float = NOW) -> why.WhyReport:
        return why.make_report(self.run, now)


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A run that trains: every process has just written."""
    made = Forge(tmp_path)
    made.start("head-0.0", "learner-0.0", "reward-0.0", "generator-0.0")
    for name in ("learner-0.0", "reward-0.0", "generator-0.0"):
        made.write("head-0.0", 1001.0, "joined", name=name, host="here", pid=1)
        made.write("head-0.0", 1001.0, "member", name=name, state="healthy", why="ready")
        made.write(name, NOW - 1, "spans", s_idle=0.2, s_work=0.8)
    made.write("head-0.0", NOW - 9, "update", version=4, u=4)
    made.write("head-0.0", NOW - 8, "publish", version=3, v=3, members=1)
    made.wait(NOW - 2, ("learner-0", "3 trajectories of step 4", "generator-0.0", 30.0), verdict="learner-0 waits")
    made.write("head-0.0", NOW - 1, "spans", s_wait=0.9, s_decide=0.1)
    return made


def test_a_run_that_moves_is_alive_and_shows_its_waits_and_actors(forge: Forge) -> None:
    report = forge.look()
    assert (report.state, report.is_well, report.version, report.published) == ("alive", True, 4, 3)
    assert report.waits == [why.WaitLine("learner-0", "3 trajectories of step 4", "generator-0.0", "", 30.0)]
    assert report.waits_age_s == 2.0
    assert report.verdict == "learner-0 waits"
    assert [(a.name, a.state, a.silent_s, a.doing, a.n_lives) for a in report.actors] == [
        ("generator-0.0", "healthy", 1.0, "work", 1),
        ("head-0.0", "", 1.0, "wait", 1),
        ("learner-0.0", "healthy", 1.0, "work", 1),
        ("reward-0.0", "healthy", 1.0, "work", 1),
    ]


def test_a_stalled_run_shows_its_verdict_until_it_moves_again(forge: Forge) -> None:
    forge.stall(NOW - 1, "nothing has moved for 300 s: reward-0 silent")
    report = forge.look()
    assert (report.state, report.is_well) == ("stalled", False)
    assert report.sentence == "it is stalled: nothing has moved for 300 s: reward-0 silent"
    forge.stall(NOW - 0.5, "", action="over")
    assert forge.look().state == "alive"
    assert [text.partition(" ")[2].partition(" ")[2] for text in forge.look().stalls] == [
        "nothing has moved for 300 s: reward-0 silent (warn)"
    ]


def test_a_stalled_member_or_an_empty_register_does_not_make_the_ring_stalled(forge: Forge) -> None:
    forge.stall(NOW - 1, "generator-0 has made no progress for 120 s", scope="member")
    forge.wait(NOW - 0.5, ("", "", "", 0.0), n=0)
    report = forge.look()
    assert (report.state, report.waits) == ("alive", [])
    assert "generator-0 has made no progress for 120 s" in report.stalls[0]


def test_a_killed_run_is_dead_and_shows_its_waits(forge: Forge) -> None:
    report = forge.look(NOW + 599)
    assert (report.state, report.is_well) == ("dead", False)
    why_dead = "there is no end line: it was killed, or its host is gone"
    assert report.sentence == f"it is dead: no process has written for 10 min, and {why_dead}"
    assert report.waits == [why.WaitLine("learner-0", "3 trajectories of step 4", "generator-0.0", "", 30.0)]


def test_unchanged_waits_continue(forge: Forge) -> None:
    forge.write("head-0.0", NOW + 30, "spans", s_wait=1.0)
    assert forge.look(NOW + 30).waits[0].since_s == 62.0


def test_a_silent_head_is_a_stall_while_others_write(forge: Forge) -> None:
    for name in ("learner-0.0", "generator-0.0"):
        forge.write(name, NOW + 20, "spans", s_idle=1.0)
    report = forge.look(NOW + 20)
    assert report.state == "stalled"
    assert (
        report.sentence == "the head has been silent for 21 s; generator-0.0, learner-0.0 still write and wait for it"
    )


def test_lines_of_a_host_whose_clock_is_ahead_have_age_0(forge: Forge) -> None:
    report = forge.look(NOW - 3)  # its lines come from up to 2 s ahead
    assert (report.waits_age_s, report.verdict_age_s) == (0.0, 0.0)
    assert "waits, 0.0 s ago" in why.report_lines(report)


@pytest.mark.parametrize(
    ("code", "reason", "state"), [(0, "done", "ended"), (1, "48 prompts in a row ended without a reward", "failed")]
)
def test_a_run_that_ended_shows_its_reason_and_is_well_with_code_0(
    forge: Forge, code: int, reason: str, state: str
) -> None:
    forge.write("head-0.0", NOW, "end", wall_s=1000.0, code=code, reason=reason)
    report = forge.look(NOW + 9999)
    assert (report.state, report.sentence, report.is_well) == (state, f"it ended: {reason}", code == 0)
    assert {actor.state for actor in report.actors} == {""}  # not "healthy"
    assert not report.waits


def test_a_head_that_failed_shows_its_error_also_without_a_code(forge: Forge) -> None:
    forge.write("head-0.0", NOW, "failed", error="OSError: no space left")
    assert "the head failed: OSError: no space left" in forge.look(NOW + 100).sentence
    forge.write("head-0.0", NOW, "end", wall_s=1000.0)
    assert forge.look().sentence == "it ended: OSError: no space left"


def test_a_resumed_run_has_the_state_of_its_last_start(forge: Forge) -> None:
    forge.write("head-0.0", NOW - 1, "end", wall_s=1000.0, code=0, reason="drained at version 4")
    forge.start("head-0.1", "generator-0.1", wall=NOW + 50)
    forge.write("head-0.1", NOW + 51, "term", term=1, version=4)
    forge.write("head-0.1", NOW + 52, "member", name="generator-0.1", state="stale", why="ready")
    report = forge.look(NOW + 55)
    assert (report.state, report.term, report.version, report.waits) == ("alive", 1, 4, [])
    assert [(a.name, a.state, a.n_lives) for a in report.actors][:2] == [
        ("generator-0.1", "stale", 2),
        ("head-0.1", "", 2),
    ]
    assert [text.rpartition(" ")[2] for text in report.restarts] == ["generator-0.1", "head-0.1"]


def test_refusals_are_counted_and_the_last_one_shown_without_control_characters(forge: Forge) -> None:
    forge.write("head-0.0", NOW, "refused", what="Scored", sender="reward-0.0", why="late")
    forge.write("head-0.0", NOW, "refused", what="Join", sender="\x1b[31mstranger", why="who")
    report = forge.look()
    assert report.n_refused == 2
    shown = "\n".join(why.report_lines(report))
    assert "2 messages refused, the last: Join of \\x1b[31mstranger: who" in shown
    assert "\x1b" not in shown
    forge.write("head-0.0", NOW, "end", wall_s=1000.0, code=0, reason="done")
    report = forge.look()
    assert (report.state, report.n_refused) == ("ended", 2)
    assert "refused" not in "\n".join(why.report_lines(report)), "after a clean end they were late"


def test_torn_lines_and_an_incomplete_register_are_skipped(forge: Forge, capsys: pytest.CaptureFixture[str]) -> None:
    forge.wait(NOW - 0.5, ("generators", "a push", "learner-0.0", 1.0), n=3, verdict="half")
    for name in ("head-0.0", "generator-0.0"):
        with forge.path(name).open("a") as file:
            file.write('{"t":1,"wall":99999,"event":"stall","sco')
    report = forge.look()
    assert (report.state, report.verdict) == ("alive", "learner-0 waits")
    assert [actor.silent_s for actor in report.actors][:2] == [1.0, 0.5]
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("damage", ['"soon"', "[]", "NaN", "1e999"])
def test_damaged_lines_are_skipped_with_a_warning(
    forge: Forge, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """A start line whose `wall` is text was a traceback; whatever else is damaged must be none either."""
    whole = forge.look()
    files = {name: forge.path(name).read_text() for name in ("head-0.0", "generator-0.0")}
    for name, text in files.items():
        for key in re.findall(r'"(\w+)":', "".join(dict.fromkeys(re.findall(r'"\w+":', text)))):
            if key != "event":
                forge.path(name).write_text(re.sub(rf'"{key}":[^,}}]+', f'"{key}":{damage}', text))
                assert why.report_lines(forge.look()), (name, key)
        forge.path(name).write_text(text)
    assert ", which is broken" in capsys.readouterr().err
    lines = files["generator-0.0"].splitlines(keepends=True)
    broken = re.sub(r'"wall":[^,]+', f'"wall":{damage}', lines[0])
    forge.path("generator-0.0").write_text(broken + "".join(lines))
    assert forge.look() == whole


def test_a_run_begins_before_the_head_has_written(tmp_path: Path) -> None:
    forge = Forge(tmp_path)
    forge.start("generator-0.0", wall=NOW - 1)
    report = forge.look()
    assert (report.state, report.sentence) == ("alive", "it begins: no head has written yet")
    assert forge.look(NOW + 60).state == "dead"


def test_a_run_of_one_process_with_a_given_lag_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", role="reference", index=0, incarnation=0)
    assert why.make_report(Run(tmp_path), NOW).state == "alive"
    journal.close()
    assert why.make_report(Run(tmp_path), NOW).state == "ended"


def test_the_end_of_a_long_file_is_found(forge: Forge) -> None:
    for i in range(9000):
        forge.write("generator-0.0", NOW + i / 1e4, "request", uid=i, sample=0, attempt=0)
    forge.write("generator-0.0", NOW + 1, "spans", s_generate=1.0)
    actor = forge.look(NOW + 3).actors[0]
    assert (actor.name, actor.silent_s, actor.doing) == ("generator-0.0", 2.0, "generate")
    assert forge.path("generator-0.0").stat().st_size > 3 * why.TAIL_BYTES


# processes of this host


def local(folder: Path, *, begins: str = "", where: str = HERE) -> tuple[Forge, "subprocess.Popen[bytes]"]:
    """A run that trains, whose head and learner are one process of this host that holds both files."""
    made = Forge(folder)
    paths = [made.path(name) for name in ("head-0.0", "learner-0.0")]
    hold = f"{begins}\nimport sys; files = [open(x, 'a') for x in sys.argv[1:]]; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", hold, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    if not begins:
        process.stdout.readline()
    for name in ("head-0.0", "learner-0.0"):
        made.write(name, NOW, "start", schema=1, pid=process.pid, machine=where)
    made.write("head-0.0", NOW, "joined", name="learner-0.0", host=socket.gethostname(), pid=process.pid)
    return made, process


def test_a_stopped_process_is_in_the_headline_at_once(tmp_path: Path) -> None:
    forge, process = local(tmp_path)
    try:
        forge.write("head-0.0", NOW + 300, "spans", s_wait=1.0)
        assert forge.look(NOW + 300).state == "alive"  # a learner that computes writes nothing
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        report = forge.look()
        assert (report.state, report.is_well) == ("stalled", False)
        assert report.sentence == (
            "it is stalled: head-0.0, learner-0.0 are stopped by SIGSTOP or a debugger "
            f"(to continue: kill -CONT {process.pid})"
        )
        assert {actor.process for actor in report.actors} == {"stopped"}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("where", [HERE, "another boot net:[1]", ""])
def test_a_process_is_gone_only_where_it_ran_on_this_machine(tmp_path: Path, where: str) -> None:
    """A machine of the same host name has other processes."""
    forge, process = local(tmp_path, where=where)
    process.kill()
    process.communicate()
    assert {actor.process for actor in forge.look().actors} == {"gone" if where == HERE else ""}


def test_a_stopped_worker_of_an_actor_is_in_the_headline_at_once(tmp_path: Path) -> None:
    forge, process = local(tmp_path, begins="import subprocess as s; print(s.Popen(['sleep', '600']).pid, flush=True)")
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.stdout.readline()  # the journals are open
    try:
        os.kill(worker, signal.SIGSTOP)
        while Path(f"/proc/{worker}/stat").read_text(encoding="utf-8").split()[2] != "T":
            pass
        report = forge.look()
        assert (report.state, report.is_well) == ("stalled", False)
        assert report.sentence.startswith("it is stalled: a worker process of ")
        assert report.sentence.endswith(f"is stopped by SIGSTOP or a debugger (to continue: kill -CONT {worker})")
    finally:
        os.kill(worker, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_without_processes_is_dead_at_once_or_interrupted_by_a_signal(tmp_path: Path, asked: bool) -> None:
    forge, process = local(tmp_path)
    (tmp_path / "origin.json").write_text('{"folder": "x"}')
    if not asked:
        (tmp_path / "pid").write_text("1\n")  # what ends in order removes it
    process.kill()
    process.communicate()
    report = forge.look()
    assert (report.state, report.is_well) == ("interrupted" if asked else "dead", False)
    expected = "it was interrupted by a signal (Ctrl-C or SIGTERM)" if asked else "it was killed, or its host is gone"
    assert expected in report.sentence


# the command


def test_the_command_reads_a_live_journal_and_exits_with_its_code(tmp_path: Path) -> None:
    book = Journal(tmp_path / "journal", role="head", index=0, incarnation=0)
    wait = {"i": 0, "n": 1, "who": "the ring", "what": "reward-0", "on": "reward-0", "since_s": 1.0, "detail": "x"}
    book.write(Event.WAIT, **wait, verdict="the ring waits for reward-0")
    done = subprocess.run(
        [sys.executable, "-m", "tools.why", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "it is alive and moves" in done.stdout
    assert "the ring waits for reward-0" in done.stdout
    book.close(code=3, reason="an error")
    command = [sys.executable, "-c", "from launch.commands.cli import main; raise SystemExit(main())", "why"]
    done = subprocess.run([*command, str(tmp_path), "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["state"], told["sentence"]) == ("failed", "it ended: an error")
    done = subprocess.run([*command, str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_a_job_that_user_code_ended_shows_the_error_and_no_signal(forge: Forge) -> None:  # item 13
    folder = forge.run.folder
    (folder / "origin.json").write_text('{"folder": "x"}')
    (folder / "logs").mkdir()
    (folder / "logs" / "learner-0.0.error.txt").write_text("Traceback\nAttributeError: no ppo_updat\n")
    report = forge.look(now=NOW + 100)
    assert report.state == "failed"
    assert "learner-0.0: AttributeError: no ppo_updat; full traceback: " in report.sentence
