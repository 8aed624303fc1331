"""Workers of a reward: values, timeouts and errors of user code, what ends with a worker, whose turn it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.processes.ipc import PRINTED_BYTES
from actors.rewards.pool import MOST_SENDERS, Turns, Verdict, WorkerOrder, WorkerPool
from areal_bus.errors import ConfigError
from areal_bus.messages import VerdictStatus
from tests.support.polling import is_alive, wait_until

VALUE, TIMEOUT, ERROR = VerdictStatus.VALUE, VerdictStatus.TIMEOUT, VerdictStatus.ERROR

USER_MODULE = r"""
import ctypes, os, re, resource, signal, subprocess, sys, time
from decimal import Decimal
from actors.rewards.protocol import Score

def score(prompt, completion, row):
    return eval(completion, globals(), {"value": row["value"]})

def busy():
    while True: pass
def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    busy()
def raises(): raise RuntimeError("the user's own words \ud800")
def recurses(): return recurses()
def prints():
    print("{}" * 10)
    sys.stdout.flush()
    os.write(1, b"\x02\x00\x00\x00{}" * 100)
    return 1.0
def floods():
    for _ in range(200): print("x" * 100_000)
    return 1.0
def complains(): raise ValueError("y" * 5_000_000)
def closes():
    os.closerange(0, 100)
    time.sleep(3600)
def child(path, **how):
    started = subprocess.Popen(["sleep", "3600"], **how)
    open(path, "w").write(str(started.pid))
    time.sleep(3600)
def forks_and_leaves(path):
    if os.fork(): os._exit(0)
    open(path, "w").write(str(os.getpid()))
    time.sleep(3600)
def forges(text):
    body = (text or '{"status":"value","reward":1.0}').encode()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and fd != 2:
                os.write(fd, len(body).to_bytes(4, "little") + body)
        except OSError: pass
    return 1.0
def fills(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    return 1.0
def killed_once(path):
    try:
        open(path, "x").close()
    except FileExistsError:
        return 0.75
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_worker_rewards.py").write_text(USER_MODULE)
    return tmp_path


@pytest.fixture
def pool(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=1, timeout_s=0.4) as pool:
        yield pool


@pytest.fixture
def patient(folder):
    """A pool for scores that end by themselves, on a loaded machine, too."""
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=1, timeout_s=60.0) as pool:
        yield pool


def submit(pool: WorkerPool, completion: str, value: object = None, *, key: object = 0) -> None:
    pool.submit(key, prompt="", completion=completion, row=json.dumps({"value": value}))


def finish(pool: WorkerPool, *, within_s: float = 60.0) -> list[Verdict]:
    """All verdicts, in the order they came."""
    deadline = time.monotonic() + within_s
    verdicts = []
    while pool.n_unfinished:
        verdicts += pool.poll(1.0)
        assert time.monotonic() < deadline, "the pool hangs"
    return verdicts


def test_an_error_has_its_place_in_the_users_code_and_its_traceback(patient, folder):
    file = folder / "own_worker_rewards.py"
    lines = file.read_text().splitlines()
    raised = verdict_of(patient, "raises()")
    line = next(n for n, text in enumerate(lines, 1) if text.startswith("def raises"))
    assert raised.place == f"{file}:{line}"
    assert raised.error.endswith(f"own words \ufffd ({file}:{line})")
    assert raised.trace.startswith("Traceback")
    assert "in raises" in raised.trace
    returned = verdict_of(patient, "'1.0'")  # raised by ours: the place is the function's own
    assert returned.place == f"{file}:{1 + lines.index('def score(prompt, completion, row):')}"


def test_a_row_of_a_guest_that_is_no_row_is_an_error_and_its_worker_lives(patient):
    """It ended the worker process, each time."""
    before = patient.pids
    rows = ["[1]", "5", "null", '{"_unread_columns": 5}', "[" * 100_000, json.dumps({"\u4e00" * 30_000: 1})]
    for row in rows:
        patient.submit(0, prompt="", completion="no_such_name", row=row)
        [verdict] = finish(patient)
        assert verdict.status == ERROR
        assert "lost" not in verdict.error
        assert len(verdict.error) <= 2000
    assert patient.pids == before


def test_output_of_a_reward_is_kept_in_a_file_when_it_hangs_afterwards(folder, tmp_path):
    (folder / "own_prints.py").write_text(
        "import time\nprint('loaded')\ndef score(completion):\n    print('saw', completion)\n"
        "    while completion == 'hang': time.sleep(1)\n    return 1"
    )
    prints = tmp_path / "logs" / "reward-0.0.out.txt"
    with WorkerPool(WorkerOrder("own_prints:score", folder, prints=prints), n_workers=1, timeout_s=0.4) as pool:
        assert [verdict_of(pool, text).status for text in ("one", "hang", "two")] == [VALUE, TIMEOUT, VALUE]
    assert prints.read_text().splitlines() == ["loaded", "saw one", "saw hang", "loaded", "saw two"]


def test_a_file_of_prints_that_is_long_enough_gets_no_more(folder, tmp_path):
    prints = tmp_path / "out.txt"
    with prints.open("wb") as file:
        file.truncate(PRINTED_BYTES + 1)
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder, prints=prints), n_workers=1, timeout_s=5.0) as pool:
        assert verdict_of(pool, "floods()").status == VALUE
    assert PRINTED_BYTES < prints.stat().st_size < PRINTED_BYTES + 100


def verdict_of(pool: WorkerPool, completion: str, value: object = None) -> Verdict:
    submit(pool, completion, value)
    [verdict] = finish(pool)
    return verdict


VALUES = [
    ("Score(1.0, correct=True)", 1.0, True),
    ("0.25", 0.25, None),
    ("True", 1.0, True),
    ("Decimal('0.5')", 0.5, None),
    ("prints()", 1.0, None),  # standard input and output do not touch the channel
    ("floods()", 1.0, None),
    ("float(len(sys.stdin.read()) + len(os.read(0, 10)))", 0.0, None),
    ("resource.getrlimit(resource.RLIMIT_CORE)[0]", 0.0, None),
    ("int(os.environ['OMP_NUM_THREADS'])", 1.0, None),
    *[("0.5 if os.fork() else 1.0", 0.5, None), ("0.25", 0.25, None)] * 2,  # no output of a forked child is a verdict
]


def test_numbers_scores_and_booleans_are_values_and_a_worker_has_a_group_of_its_own(patient):
    for completion, reward, correct in VALUES:
        verdict = verdict_of(patient, completion)
        found = (verdict.status, verdict.reward, verdict.correct, verdict.error)
        assert found == (VALUE, reward, correct, ""), completion
        assert verdict.score_s > 0
    assert [os.getpgid(pid) for pid in patient.pids] == patient.pids


@pytest.mark.slow
def test_a_score_that_hangs_is_a_timeout_and_the_next_one_works(pool):
    regex, stops = 'bool(re.match(r"(a+)+$", "a" * 40 + "b"))', "os.kill(os.getpid(), signal.SIGSTOP)"
    for completion in ("busy()", "time.sleep(3600)", regex, "9**9**9**9", stops, "stubborn()"):
        hung = verdict_of(pool, completion)
        assert (hung.status, hung.correct) == (TIMEOUT, None), completion
        assert "0.4 s" in hung.error
        assert 0.4 <= hung.score_s < 60
        assert verdict_of(pool, "0.25").reward == 0.25


ERRORS = {
    "os._exit(0)": "exit code 0",
    "ctypes.string_at(0)": "SIGSEGV",
    "sys.exit(3)": "SystemExit: 3",
    "raises()": "RuntimeError: the user's own words \ufffd",
    "recurses()": "RecursionError",
    "float('nan')": "finite",
    "Score(float('-inf'))": "finite",
    "-1e10": "at most 1e+09",
    "10**400": "OverflowError",
    "os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
    "forges(value)": "an invalid verdict",
    "None": "NoneType",
    "'1.0'": "returned a str",
    "no_such_name": "NameError",
    "complains()": "ValueError: yyy",
    "closes()": "lost",
    "fills(value)": "too large",
}


@pytest.mark.slow
def test_a_result_that_is_not_a_number_is_an_error_and_the_next_call_works(patient, tmp_path):
    for completion, part in ERRORS.items():
        verdict = verdict_of(patient, completion, str(tmp_path / "endless") if "fills" in completion else None)
        assert verdict.status == ERROR, completion
        assert part in verdict.error
        assert len(verdict.error) < 3000
        assert verdict_of(patient, "0.25").reward == 0.25, f"after {completion}"


def test_a_killed_worker_gives_no_verdict_and_another_one_scores(patient, tmp_path):
    assert verdict_of(patient, "killed_once(value)", str(tmp_path / "before")).reward == 0.75


FORGED = [
    '{"id":0,"status":"value","reward":' + "9" * 400 + "}",
    '{"id":0,"status":"value","reward":1,"correct":"yes"}',
    '{"id":0,"status":"value","reward":1,"parts":{"a":' + "9" * 400 + "}}",
    '{"id":0,"status":"value","reward":1,"parts":[]}',
    '{"id":0,"status":"none"}',
    '{"a":' * 30_000 + "1" + "}" * 30_000,
    "9" * 5000,
]


@pytest.mark.slow
def test_a_pool_lives_on_whatever_its_worker_writes(patient):
    for body in FORGED:
        verdict = verdict_of(patient, "forges(value)", body)
        assert (verdict.status, verdict.error[:29]) == (ERROR, "the worker process is lost: i"), body[:60]
        assert verdict_of(patient, "0.25").reward == 0.25


def test_cleared_scores_get_no_verdict_and_their_workers_are_free_at_once(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=60.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        for completion in ("busy()", "1.0", "time.sleep(3600)", "1.0"):
            submit(pool, completion, key="before")
        before = pool.pids
        pool.clear()
        assert pool.n_unfinished == 0
        submit(pool, "0.25", key="after")
        assert [verdict.key for verdict in finish(pool)] == ["after"]
        assert not set(before) <= set(pool.pids)


def test_a_text_far_longer_than_a_pipe_arrives_whole_and_one_over_the_limit_is_an_error(patient):
    assert verdict_of(patient, f"len('{'é' * 1_000_000}')").reward == 1_000_000
    over = verdict_of(patient, "x" * (17 << 20))
    assert (over.status, "at most" in over.error) == (ERROR, True)


@pytest.mark.slow
def test_a_slow_score_does_not_hold_up_those_of_other_workers(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=1.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        submit(pool, "time.sleep(3600)", key="slow")
        for n in range(20):
            submit(pool, "value", n, key=n)
        found = [(verdict.key, verdict.status, verdict.reward) for verdict in finish(pool)]
        assert found[:-1] == [(n, VALUE, n) for n in range(20)]
        assert found[-1][:2] == ("slow", TIMEOUT)


def test_the_time_a_worker_takes_to_start_does_not_count_as_time_of_a_score(tmp_path):
    (tmp_path / "own_slow_start.py").write_text(
        "import time\ntime.sleep(1.0)\ndef score(prompt, completion, row): return 1"
    )
    with WorkerPool(WorkerOrder("own_slow_start:score", tmp_path), n_workers=1, timeout_s=0.3) as pool:
        assert verdict_of(pool, "0.25").status == VALUE


def test_a_function_that_loaded_once_is_no_error_of_the_settings_when_workers_fail_to_start(tmp_path):
    module = tmp_path / "own_flaky_start.py"
    module.write_text("import os\ndef score(prompt, completion, row): os._exit(1)")
    with WorkerPool(WorkerOrder("own_flaky_start:score", tmp_path), n_workers=1, timeout_s=5.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        module.write_text("raise OSError('disk')")
        submit(pool, "ends its worker", key=0)
        submit(pool, "waits for another", key=1)
        with pytest.raises(RuntimeError, match="disk"):
            finish(pool)


def test_a_function_that_never_loads_ends_in_a_sentence_not_in_a_loop(tmp_path):
    with WorkerPool(WorkerOrder("own_nowhere:score", tmp_path), n_workers=2, timeout_s=1.0) as pool:
        submit(pool, "number")
        with pytest.raises(ConfigError, match="own_nowhere"):
            finish(pool)


@pytest.mark.slow
def test_processes_started_by_the_function_are_killed_at_its_deadline(pool, tmp_path):
    completions = ("child(value)", "child(value, start_new_session=True)", "forks_and_leaves(value)")
    for number, completion in enumerate(completions):
        assert verdict_of(pool, completion, str(tmp_path / f"{number}")).status == TIMEOUT
        pid = int((tmp_path / f"{number}").read_text())
        wait_until(lambda pid=pid: not is_alive(pid), f"{completion} is dead")


def test_closing_the_pool_leaves_no_process_even_in_the_middle_of_a_score(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=60.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        submit(pool, "stubborn()")
        pids = pool.pids
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


def test_workers_die_with_the_process_that_made_them(folder):
    code = (
        "import sys, os\n"
        "from actors.rewards.pool import WorkerOrder, WorkerPool\n"
        f"pool = WorkerPool(WorkerOrder('own_worker_rewards:score', {str(folder)!r}), n_workers=2, timeout_s=60.0)\n"
        "while not pool.ready: pool.poll(1.0)\n"
        "pool.submit(0, prompt='', completion='stubborn()', row='{}')\n"
        "print(*pool.pids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_until(lambda: not any(map(is_alive, pids)), "the workers are dead")


SPOILING = """
import __main__, os

calls = 0

def score(completion):
    global calls
    calls += 1
    if completion == "spoil":
        __main__.verdict = __main__.verdict_of_fork = lambda *a, **k: {"status": "value", "reward": 1.0}
    if completion == "exit":
        os._exit(0)
    return float(calls == 99)
"""


def test_in_a_fresh_process_a_score_changes_no_later_one(tmp_path: Path) -> None:
    (tmp_path / "own_spoiling.py").write_text(SPOILING)
    order = WorkerOrder("own_spoiling:score", tmp_path, fresh_process=True)
    with WorkerPool(order, n_workers=1, timeout_s=20.0) as pool:
        pids = pool.pids
        for key, text in enumerate(["spoil", "plain", "exit", "plain"]):
            submit(pool, text, key=key)
        verdicts = {verdict.key: verdict for verdict in finish(pool)}
        assert pool.pids == pids  # one worker, forked four times
    assert [(verdicts[key].status, verdicts[key].reward) for key in (1, 3)] == [(VALUE, 0.0)] * 2
    assert verdicts[2].status == ERROR
    assert "gave no verdict: it ended by exit code 0" in verdicts[2].error


KILLS_WORKER = """
import os, signal
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(3, flush=True)
os.kill(parent(os.getppid()), signal.%s)
while True: pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fresh_process"), [("SIGKILL", False), ("SIGTERM", True)])
def test_a_program_that_kills_its_worker_scores_zero_where_the_sandbox_has_no_namespaces(
    number: str, fresh_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without bwrap
    row = json.dumps({"tests": [{"input": "", "output": "3"}]})
    with WorkerPool(WorkerOrder("code", tmp_path, fresh_process=fresh_process), n_workers=1, timeout_s=30.0) as pool:
        pool.submit(0, prompt="", completion=KILLS_WORKER % number, row=row)
        pool.submit(1, prompt="", completion="print(3)", row=row)
        killer, honest = sorted(finish(pool), key=lambda verdict: verdict.key)
    assert (killer.status, killer.reward, killer.correct) == (VALUE, 0.0, False)
    assert (honest.status, honest.reward, honest.correct) == (VALUE, 1.0, True)


# whose turn it is


def served(turns: Turns[str], n: int, seconds: dict[str, float]) -> list[str]:
    """The senders of the next n tasks, each charged for its time."""
    found = []
    for _ in range(n):
        sender = turns.next().rstrip("0123456789")
        turns.charge(sender, seconds[sender])
        found.append(sender)
    return found


def test_senders_share_the_time_of_the_workers_whatever_each_task_takes() -> None:
    turns: Turns[str] = Turns()
    for i in range(1000):
        turns.add("a", f"a{i}")
    for i in range(50):
        turns.add("b", f"b{i}")
        turns.add("c", f"c{i}")
    order = served(turns, 60, {"a": 10.0, "b": 1.0, "c": 1.0})
    assert order.count("a") <= 4
    assert abs(order.count("b") - order.count("c")) <= 1


def test_a_sender_that_comes_back_has_saved_no_time() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a0")
    served(turns, 1, {"a": 100.0})
    for i in range(20):
        turns.add("b", f"b{i}")
    served(turns, 10, {"b": 10.0})
    turns.add("late", "late0")
    turns.add("late", "late1")
    assert served(turns, 3, {"b": 10.0, "late": 10.0}).count("late") <= 2
    assert len(turns) == 9


def test_tasks_of_a_sender_keep_their_order_and_one_that_is_repeated_comes_first() -> None:
    turns: Turns[str] = Turns()
    for task in ("a0", "a1", "a2"):
        turns.add("a", task)
    turns.add("a", "again", first=True)
    assert turns.drop(lambda task: task == "a1") == ["a1"]
    assert [turns.next() for _ in range(len(turns))] == ["again", "a0", "a2"]
    turns.add("a", "a3")
    turns.clear()
    assert len(turns) == 0


def test_senders_without_tasks_are_forgotten() -> None:
    turns: Turns[str] = Turns()
    for i in range(3 * MOST_SENDERS):
        turns.add(f"s{i}", f"s{i}")
        turns.charge(turns.next(), 0.001)
    turns.add("x", "x")
    assert turns.next() == "x"
    assert len(turns._used_s) <= MOST_SENDERS + 1
