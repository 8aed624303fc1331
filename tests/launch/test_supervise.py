"""The supervisor of a rank, with small scripts as actors."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.context import PROGRESS_FD, TURNS_FD, Context, HeartbeatState
from actors.runtime.process import BAD_INPUT, CRASHED, LEFT, OVER, RESTART, code_of
from actors.runtime.user_failures import Fault, keep_fault
from areal_bus import errors
from areal_bus.config.sections import LaunchConfig, WatchdogConfig
from launch.plan.environment import actor_environment
from launch.run import supervise
from launch.run.job_end import describe_exit
from launch.run.restart_policy import COPY_TRIES, RestartBackoff, StallTimer, SupervisedActor
from launch.run.supervise import Supervisor, SupervisorTimes

ROOT = Path(__file__).parents[2]
TIMES = SupervisorTimes()
OVERS = (errors.ActorFailed, errors.NonFinite, errors.CheckpointError, errors.UserCodeFailed)
READ = "import json, os, sys, signal, time; line = sys.stdin.readline(); inc = json.loads(line)['incarnation']; "
LEAVE = f"sys.exit({LEFT})"
WAIT = READ + "sys.stdin.read()"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STUBBORN = READ + "signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w').close(); time.sleep(60)"
TICK = READ + f"turns = int(os.environ['{TURNS_FD}']); os.eventfd_write(turns, 1); "
REPORT_PROGRESS = f"os.write(int(os.environ['{PROGRESS_FD}']), b'1'); "
SUPERVISOR = """
import json, sys
from pathlib import Path
from areal_bus.config.sections import LaunchConfig, WatchdogConfig
from launch.run import supervise
from tests.launch.test_supervise import context

settings = json.loads(sys.argv[3])
watchdog = WatchdogConfig(**settings.pop("watchdog", {}))

class Announced(supervise.Signals):
    def __enter__(self):
        super().__enter__()
        print(rank.actors[0].child.process.pid, flush=True)
        return self

supervise.Signals = Announced
rank = supervise.Supervisor(rank=3, launch=LaunchConfig(**settings), watchdog=watchdog, run=Path(sys.argv[4]))
rank.times = supervise.SupervisorTimes(poll_s=0.1)
rank.command = [sys.executable, "-c", sys.argv[1]]
rank.start(context(index=0, role=sys.argv[2]))
sys.exit(rank.wait())
"""
ACTOR = """
import sys, threading
from actors.runtime.start import end_with_supervisor
sys.stdin.readline()
threading.Thread(target=end_with_supervisor, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
"""


def context(*, index: int = 0, role: str = "reward", run: Path | str = "/nowhere") -> Context:
    return Context(
        role=role,
        index=index,
        incarnation=0,
        rank=3,
        job="j",
        head="ipc:///nowhere",
        address="127.0.0.1",
        interface="lo",
        device="cpu",
        n_generators=1,
        n_rewards=1,
        n_learners=1,
        run_folder=str(run),
        config_folder="/nowhere",
        model_folder="/nowhere",
    )


def make(
    *codes: str,
    run: Path | str = "/nowhere",
    roles: tuple[str, ...] = (),
    times: SupervisorTimes = TIMES,
    **settings: Any,
) -> Supervisor:
    """A supervisor whose actors run these lines of Python, by default without restarts."""
    launch = LaunchConfig(**{"max_restarts": 0, **settings})
    supervisor = Supervisor(rank=3, launch=launch, run=Path(run), times=times)
    for index, code in enumerate(codes):
        supervisor.command = [sys.executable, "-c", code]
        supervisor.start(context(index=index, role=roles[index] if roles else "reward", run=run))
    return supervisor


def outcome(*codes: str, **settings: Any) -> int:
    return make(*codes, **settings).wait()


@contextlib.contextmanager
def rank(
    code: str, *, role: str = "reward", run: Path | str = "/nowhere", **settings: Any
) -> "Iterator[subprocess.Popen[str]]":
    """A supervisor in a subprocess; its first line is the pid of its actor."""
    command = [sys.executable, "-c", SUPERVISOR, code, role, json.dumps(settings), str(run)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def summarize(run: Path, **summary: Any) -> None:
    (run / "summary.json").write_text(json.dumps(summary))


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def ends_within(pid: int, timeout_s: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def test_an_actor_without_restarts_left_ends_the_others_and_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = make(WAIT, READ + "sys.exit(7)")
    assert supervisor.wait() == 1
    assert capfd.readouterr().err == "rank 3 (reward-1): ended with exit code 7; launch.max_restarts is 0\n"
    assert supervisor.actors[0].child is not None
    assert gone(supervisor.actors[0].child.process.pid)


HEAD_AND_LEARNER = {"roles": ("head", "learner"), "times": SupervisorTimes(poll_s=0.02, over_s=0.1)}
ENDS: dict[str, tuple[int, list[str], dict[str, Any], int | None]] = {
    # code of the rank; its actors; settings; code of the summary that is there before
    "bad input is final": (2, [f"{READ}sys.exit(inc or {BAD_INPUT})"], {"max_restarts": 5}, None),
    "a failed job is final": (1, [f"{READ}sys.exit(inc or {OVER})"], {"max_restarts": 5}, None),
    "a killed one restarts": (0, [f"{READ}inc or {KILL}; {LEAVE}"], {"max_restarts": 1}, None),
    "progress resets the count": (
        0,
        [f"{READ}inc == 4 and {LEAVE}; {REPORT_PROGRESS}{KILL}"],
        {"max_restarts": 1},
        None,
    ),
    "asking for a restart is no crash": (0, [f"{READ}sys.exit({LEFT} if inc == 2 else {RESTART})"], {}, None),
    "none restarts after the job": (0, [READ + KILL, f"{READ}sys.exit({RESTART})"], {"max_restarts": 5}, 1),
    "as the job, which failed": (1, [READ + KILL], {"roles": ("head",)}, 1),
    "as the job, which ended well": (0, [READ + KILL], {"roles": ("head",)}, 0),
    "as the head, without a summary": (0, [READ, WAIT], HEAD_AND_LEARNER, None),
    "as the head, which failed": (1, [f"{READ}sys.exit({OVER})", WAIT], HEAD_AND_LEARNER, None),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_of_a_rank_follows_from_its_actors_and_the_job(
    end: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, actors, how, summary = ENDS[end]
    if summary is not None:
        summarize(tmp_path, code=summary)
    assert outcome(*actors, run=tmp_path, **how) == code
    errors = capfd.readouterr().err
    if end == "a killed one restarts":
        assert errors == "rank 3 (reward-0): killed by SIGKILL; started again as reward-0.1\n"
    elif end == "none restarts after the job":
        assert errors == ""


def test_errors_have_the_codes_of_the_contract() -> None:
    codes = {kind: code_of(kind("x")) for kind in vars(errors).values() if isinstance(kind, type)}
    assert codes.pop(errors.ConfigError) == 2
    assert [codes.pop(kind) for kind in OVERS] == [3] * len(OVERS)
    assert (codes.pop(errors.Restart), codes.pop(errors.EvictedForGood)) == (75, 76)
    assert set(codes.values()) == {code_of(OSError("x"))} == {1}


def test_what_the_workers_of_a_killed_actor_started_is_killed_before_it_is_restarted(tmp_path: Path) -> None:
    """A server of an agent, in a session of its own, kept mpirun from its end."""
    begun = (
        "import subprocess; from actors.processes.worker_process import MARK, new_mark; "
        "server = subprocess.Popen(['sleep', '1000'], start_new_session=True, env={**os.environ, MARK: new_mark()}); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(server.pid)); {KILL}"
    )
    code = f"{READ}\nif not inc:\n    {begun}\n{LEAVE}"
    assert outcome(code, max_restarts=1) == 0
    assert ends_within(int((tmp_path / "pid").read_text(encoding="utf-8")), 60.0)


def test_a_second_failure_at_the_same_place_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A training loop with a typo was restarted six times."""
    for incarnation, reached in enumerate((0, 3, 3)):
        keep_fault(tmp_path / "logs", f"reward-0.{incarnation}", Fault("mine/my.py:9", reached))
    assert outcome(READ + REPORT_PROGRESS + "sys.exit(1)", run=tmp_path, max_restarts=5) == 1
    output = capfd.readouterr().err.splitlines()
    assert output[:2] == [
        "rank 3 (reward-0): ended with exit code 1; started again as reward-0.1",
        "rank 3 (reward-0): ended with exit code 1; started again as reward-0.2",  # it had made progress
    ]
    assert "mine/my.py:9 failed twice without an update in between: the job ends" in output[2]


def test_an_actor_that_keeps_dying_ends_the_rank_with_its_last_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "reward-0.2.error.txt").write_text("Traceback\nOSError: no room\n")
    assert outcome(READ + "sys.exit(1)", run=tmp_path, max_restarts=2) == 1
    output = capfd.readouterr().err.splitlines()
    assert output[:2] == [
        "rank 3 (reward-0): ended with exit code 1; started again as reward-0.1",
        "rank 3 (reward-0): ended with exit code 1; starts again in 0.5 s as reward-0.2",
    ]
    assert output[2] == (
        "rank 3 (reward-0): ended with exit code 1 (OSError: no room); that is 3 in a row without progress in between, "
        "and launch.max_restarts is 2"
    )


def test_a_learner_that_went_back_to_disk_gets_no_memory_before_it_has_made_progress_there() -> None:
    """Else each of its copies would count as progress, though the next fall back to disk undoes them."""
    actor = SupervisedActor(context(role="learner"), (), RestartBackoff(5), StallTimer(WatchdogConfig()))
    for progressed, has_memory in ((True, True), (False, True), (False, False), (False, False), (True, True)):
        actor.backoff.next_delay_s(crashed=True, progressed=progressed)
        if actor.backoff.n_crashes > COPY_TRIES:
            actor.drop_memory()
        assert (actor.take_memory() is not None) is has_memory
    actor.drop_memory()


def test_the_sixth_crash_in_a_row_is_final() -> None:
    backoff = RestartBackoff(5)
    assert [backoff.next_delay_s(crashed=True, progressed=False) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 4.0, None]
    again = RestartBackoff(5)
    pauses = [again.next_delay_s(crashed=True, progressed=n % 4 == 3) for n in range(40)]
    assert None not in pauses
    asks = RestartBackoff(0)
    assert [asks.next_delay_s(crashed=False, progressed=False) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_only_progress_that_a_restart_does_not_undo_is_reported_to_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(PROGRESS_FD, str(write))
    pulse = HeartbeatState()
    assert PROGRESS_FD not in os.environ  # its child processes must not write to this pipe
    pulse.progress += 1
    pulse.progress += 1
    assert not select.select([read], [], [], 0)[0]
    pulse.report_progress()
    pulse.report_progress()
    assert os.read(read, 10) == b"1"
    assert (os.read(read, 10), pulse.heartbeat().progress, HeartbeatState().progress) == (b"", 2, 0)
    os.close(read)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reward", "learner"])
def test_an_actor_that_ends_with_0_before_the_job_is_over_is_restarted(
    role: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reward that a forged Stop ended counted as done, and the ring stalled for ever."""
    times = SupervisorTimes(summary_s=0.05)
    assert outcome(READ + f"inc == 2 and {LEAVE}", roles=(role,), times=times, max_restarts=5) == 0
    again = f"rank 3 ({role}-0): ended with exit code 0 before the job was over; "
    assert capfd.readouterr().err == (
        f"{again}started again as {role}-0.1\n{again}starts again in 0.5 s as {role}-0.2\n"
    )


def test_a_late_summary_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A network file system shows RUN/summary.json late: no actor is restarted for that."""
    supervisor = make(READ, run=tmp_path, times=SupervisorTimes(poll_s=0.02, summary_s=60.0))
    child = supervisor.actors[0].child
    assert child is not None
    assert ends_within(child.process.pid, 10)
    threading.Timer(0.2, summarize, [tmp_path], {"code": 0}).start()
    assert supervisor.wait() == 0
    assert capfd.readouterr().err == ""


def test_a_summary_of_the_last_start_does_not_end_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A network file system still shows it."""
    summarize(tmp_path, code=1, job="the last start")
    times = SupervisorTimes(poll_s=0.02, summary_s=60.0, over_s=0.0)
    supervisor = make(READ + "sys.exit(1 - inc)", run=tmp_path, max_restarts=1, times=times)
    supervisor.job = "this start"
    supervisor.at_poll = lambda: (
        summarize(tmp_path, code=0, job="this start") if supervisor.actors[0].stopped is not None else None
    )
    assert supervisor.wait() == 0
    assert "started again as reward-0.1" in capfd.readouterr().err


def test_the_end_by_every_signal_has_words() -> None:
    assert [describe_exit(-number) for number in (9, 35)] == ["killed by SIGKILL", "killed by signal 35"]
    assert all(describe_exit(-number).startswith("killed by ") for number in range(1, 65))


def test_an_actor_that_waits_for_a_head_that_is_gone_is_ended(tmp_path: Path) -> None:
    summarize(tmp_path, code=0)
    supervisor = make(WAIT, run=tmp_path, times=SupervisorTimes(poll_s=0.05, over_s=0.05))
    assert supervisor.wait() == 0
    assert supervisor.actors[0].child is not None
    assert gone(supervisor.actors[0].child.process.pid)


def test_a_head_gets_time_to_end_the_job(tmp_path: Path) -> None:
    head = READ + f"sys.stdin.readline(); open({str(tmp_path / 'output')!r}, 'w')"
    supervisor = make(head, READ + f"sys.exit({OVER})", roles=("head", "learner"))
    child = supervisor.actors[0].child
    assert child is not None
    os.write(child.stdin, b"the learner failed\n")
    assert supervisor.wait() == 1
    assert (tmp_path / "output").exists()


def test_an_actor_that_ignores_sigterm_is_killed_after_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.3)
    began, met = time.monotonic(), str(tmp_path / "met")
    os.mkfifo(met)  # the second fails once the first ignores SIGTERM
    supervisor = make(STUBBORN.format(met), READ + f"open({met!r}).read(); sys.exit(1)")
    assert supervisor.wait() == 1
    assert supervisor.actors[0].child is not None
    assert supervisor.actors[0].child.process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 10


def test_an_actor_ends_with_a_supervisor_that_is_killed() -> None:
    with rank(ACTOR) as process:
        child = int(line(process))
        assert line(process) == "up\n"
        process.kill()
        assert ends_within(child, 10)


def test_actors_get_no_variables_of_the_launcher_and_one_thread() -> None:
    outer = {"OMPI_X": "1", "PMIX_Y": "1", "PMI_RANK": "1", "RANK": "0", "HOME": "/h", "PYTHONPATH": "/mine"}
    inner = actor_environment(outer, gpus=(), cpu=True)
    assert not [name for name in inner if name.startswith(("OMPI", "PMI")) or name == "RANK"]
    assert inner["HOME"] == "/h"
    assert inner["PYTHONPATH"] == f"{ROOT}:/mine"
    assert (inner["OMP_NUM_THREADS"], inner["OMP_WAIT_POLICY"], inner["CUDA_VISIBLE_DEVICES"]) == ("1", "PASSIVE", "")


def test_an_actor_prints_a_line_in_one_write() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a write is a datagram
    program = "from areal_bus.process.standard_streams import secure; secure(); print('version 1:', 2)"
    inner = actor_environment(os.environ | {"PYTHONUNBUFFERED": "1"}, gpus=(), cpu=True)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], stdout=theirs, env=inner, check=True)
        ours.setblocking(False)
        assert ours.recv(100) == b"version 1: 2\n"


def test_an_actor_sees_only_its_gpus() -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "4,5, 6,GPU-7"}
    assert actor_environment(seen, gpus=(2, 3), cpu=False)["CUDA_VISIBLE_DEVICES"] == "6,GPU-7"
    assert actor_environment({}, gpus=(2, 3), cpu=False)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_process_that_cannot_be_started_counts_as_a_crash(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = make(READ + KILL, max_restarts=1)
    supervisor.command = ["/nowhere/python"]
    assert supervisor.wait() == 1
    output = capfd.readouterr().err.splitlines()
    assert output[0] == "rank 3 (reward-0): killed by SIGKILL; started again as reward-0.1"
    assert output[1].startswith("rank 3 (reward-0): the process of reward-0.1 must start: [Errno 2] No such file")
    assert output[1].endswith("that is 2 in a row without progress in between, and launch.max_restarts is 1")


# a head that makes no progress


def test_a_stall_is_reported_at_growing_intervals_and_its_end_once() -> None:
    timer = StallTimer(WatchdogConfig(progress_s=10, stall_s=30, act_s=30))
    looks = {t: timer.update(float(t), moved=t in (0, 50)) for t in range(0, 56, 5)}
    assert [t for t, found in looks.items() if found.warns] == [10, 20, 40]
    assert [t for t, found in looks.items() if found.aborts] == [30]
    assert [(t, found.stalled_s) for t, found in looks.items() if found.recovered] == [(50, 50.0)]


def test_a_pause_of_the_supervisor_is_not_a_stall() -> None:
    timer = StallTimer(WatchdogConfig(progress_s=10))
    looks = [timer.update(t, moved=False) for t in (0.0, 5.0, 500.0, 504.0)]
    assert [found.stalled_s for found in looks] == [0.0, 5.0, 5.0, 9.0]
    assert not any(found.warns for found in looks)


STALLING_HEAD = (
    TICK
    + """
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
        yield
for _ in until({go!r}): pass
for _ in until({end!r}): os.eventfd_write(turns, 1)
"""
)


def test_a_stalled_head_is_reported_and_its_recovery_too(tmp_path: Path) -> None:
    go, end = tmp_path / "go", tmp_path / "end"
    head = STALLING_HEAD.format(go=str(go), end=str(end))
    with rank(head, role="head", watchdog={"progress_s": 0.6}) as process:
        assert process.stderr is not None
        output = process.stderr.readline()
        assert re.fullmatch(r"rank 3: warning: head-0 has made no progress for \d+ s: all actors wait for it\n", output)
        go.touch()
        lines = iter(process.stderr.readline, "")
        assert next(line for line in lines if "warning" not in line).startswith(
            "rank 3: head-0 makes progress again, after "
        )
        end.touch()
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("action", "code"), [("abort", 1), ("warn", 0)])
def test_a_stalled_head_ends_the_job_only_with_action_abort(tmp_path: Path, action: str, code: int) -> None:
    end = tmp_path / "end"
    head = STALLING_HEAD.format(go=str(end), end=str(end))
    watchdog = {"action": action, "progress_s": 0.5, "stall_s": 1, "act_s": 1}
    with rank(head, role="head", watchdog=watchdog) as process:
        pid = int(line(process))
        assert process.stderr is not None
        for output in iter(process.stderr.readline, ""):
            if int(output.split(" progress for ")[-1].split()[0]) > 1:  # beyond act_s
                end.touch()
        assert process.wait(20) == code
    assert ends_within(pid, 10)
    assert end.exists() == (code == 0)


def test_the_cause_is_the_last_line_of_a_job_that_another_rank_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = make(WAIT, run=tmp_path, roles=("head",))
    head._print_resume_hint(signal.SIGTERM)
    assert "rank 3: SIGTERM: ends at once" in capfd.readouterr().err
    head.n_ranks = 4
    head._print_resume_hint(signal.SIGTERM)
    assert "rank 3: Ctrl-C or SIGTERM: ends at once" in capfd.readouterr().err
    failed = tmp_path / "logs" / "reward-0.0.error.txt"
    failed.parent.mkdir()
    failed.write_text("Traceback\nKeyError: 'gold'\n", encoding="utf-8")
    assert make("raise SystemExit(1)", run=tmp_path).wait() == CRASHED
    capfd.readouterr()
    head._print_resume_hint(signal.SIGTERM)
    *_, hint, cause = capfd.readouterr().err.strip().splitlines()
    assert (hint.startswith("rank 3: ends at once"), "SIGTERM" in hint) == (True, False)
    assert cause.startswith("the job ended because of rank 3: reward-0 ended with exit code 1 (KeyError: 'gold'); ")
    head.job = "the next start"
    head._print_resume_hint(signal.SIGINT)
    assert capfd.readouterr().err.startswith("rank 3: Ctrl-C: ends at once")
    (tmp_path / "summary.json").write_text(
        '{"code": 1, "sentence": "no rows", "job": "the next start"}', encoding="utf-8"
    )
    head._print_resume_hint(signal.SIGTERM)
    assert capfd.readouterr().err.endswith("the job ended because of no rows\n")
    head.end()


def test_a_rank_whose_actor_was_stopped_ends_without_a_summary_when_the_job_is_gone(tmp_path: Path) -> None:
    """The disk was full at the end: the head's rank has removed RUN/pid, and no summary comes."""
    (tmp_path / "pid").write_text("1\n", encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    times = SupervisorTimes(poll_s=0.02, summary_s=0.1, over_s=0.1)
    supervisor = make(READ + "sys.stdin.read() if inc else None", run=tmp_path, max_restarts=5, times=times)
    supervisor.waits_for_job = True

    def end_job() -> None:
        if supervisor.actors[0].context.incarnation:  # it was restarted, and waits for a head that is gone
            (tmp_path / "pid").unlink(missing_ok=True)

    supervisor.at_poll = end_job
    assert supervisor.wait() == 0
