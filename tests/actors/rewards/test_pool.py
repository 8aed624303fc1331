import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.processes.ipc import LENGTH, PRINTED_BYTES, pack, unpack
from actors.rewards.pool import Verdict, WorkerOrder, WorkerPool
from areal_bus.errors import ConfigError
from areal_bus.messages import VerdictStatus

VALUE, TIMEOUT, ERROR = VerdictStatus.VALUE, VerdictStatus.TIMEOUT, VerdictStatus.ERROR

USER_MODULE = r"""
import ctypes, os, re, signal, subprocess, sys, time
from decimal import Decimal
from actors.rewards.protocol import Score

def score(prompt, completion, row):
    if completion.startswith("long"):
        return len(completion)
    return globals()[completion](row)

def right(row): return Score(1.0, correct=True)
def number(row): return 0.25
def yes(row): return True
def decimal(row): return Decimal("0.5")
def answer(row): return row["value"]
def busy(row):
    while True: pass
def sleeps(row): time.sleep(3600)
def regex(row): return bool(re.match(r"(a+)+$", "a" * 40 + "b"))
def power(row): return 9**9**9**9
def stops(row): os.kill(os.getpid(), signal.SIGSTOP)
def stubborn(row):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: pass
def leaves(row): os._exit(0)
def crashes(row): ctypes.string_at(0)
def exits(row): sys.exit(3)
def raises(row): raise RuntimeError("the user's own words \ud800")
def recurses(row): return recurses(row)
def nan(row): return float("nan")
def infinite(row): return Score(float("-inf"))
def none(row): return None
def text(row): return "1.0"
def prints(row):
    print("{}" * 10)
    sys.stdout.flush()
    os.write(1, b"\x02\x00\x00\x00{}" * 100)
    return 1.0
def floods(row):
    for _ in range(200): print("x" * 100_000)
    return 1.0
def reads(row): return float(len(sys.stdin.read()) + len(os.read(0, 10)))
def complains(row): raise ValueError("y" * 5_000_000)
def closes(row):
    os.closerange(0, 100)
    time.sleep(3600)
def child(row):
    started = subprocess.Popen(["sleep", "3600"])
    open(row["value"], "w").write(str(started.pid))
    time.sleep(3600)
def escapes(row):
    started = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    open(row["value"], "w").write(str(started.pid))
    time.sleep(3600)
def forks(row): return 0.5 if os.fork() else 1.0
def forks_and_leaves(row):
    if os.fork(): os._exit(0)
    open(row["value"], "w").write(str(os.getpid()))
    time.sleep(3600)
def forges(row):
    body = (row["value"] or '{"status":"value","reward":1.0}').encode()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and fd != 2:
                os.write(fd, len(body).to_bytes(4, "little") + body)
        except OSError: pass
    return 1.0
def fills(row):
    with open(row["value"], "wb") as file:
        file.truncate(1 << 40)
    return 1.0
def killed_once(row):
    try:
        open(row["value"], "x").close()
    except FileExistsError:
        return 0.75
    os.kill(os.getpid(), signal.SIGKILL)
def killed(row): os.kill(os.getpid(), signal.SIGKILL)
def huge(row): return -1e10
def astronomic(row): return 10**400
def core(row):
    import resource
    return resource.getrlimit(resource.RLIMIT_CORE)[0]
def threads(row): return int(os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_worker_rewards.py").write_text(USER_MODULE)
    return tmp_path


@pytest.fixture
def pool(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=1, timeout_s=0.4) as pool:
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


def test_an_error_has_its_place_in_the_users_code_and_its_traceback(pool, folder):
    file = folder / "own_worker_rewards.py"
    lines = file.read_text().splitlines()
    raised = verdict_of(pool, "raises")
    line = next(n for n, text in enumerate(lines, 1) if text.startswith("def raises"))
    assert raised.place == f"{file}:{line}"
    assert raised.error.endswith(f"own words \ufffd ({file}:{line})")
    assert raised.trace.startswith("Traceback")
    assert "in raises" in raised.trace
    returned = verdict_of(pool, "text")  # raised by ours: the place is the function's own
    assert returned.place == f"{file}:{1 + lines.index('def score(prompt, completion, row):')}"


@pytest.mark.parametrize(
    "row", ["[1]", "5", "null", '{"_unread_columns": 5}', "[" * 100_000, json.dumps({"\u4e00" * 30_000: 1})]
)
def test_a_row_of_a_guest_that_is_no_row_is_an_error_and_its_worker_lives(pool, row):
    """It ended the worker process, each time."""
    before = pool.pids
    pool.submit(0, prompt="", completion="no_such_name", row=row)
    [verdict] = finish(pool)
    assert verdict.status == ERROR
    assert "lost" not in verdict.error
    assert len(verdict.error) <= 2000
    assert pool.pids == before


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
        assert verdict_of(pool, "floods").status == VALUE
    assert PRINTED_BYTES < prints.stat().st_size < PRINTED_BYTES + 100


def verdict_of(pool: WorkerPool, completion: str, value: object = None) -> Verdict:
    submit(pool, completion, value)
    [verdict] = finish(pool)
    return verdict


@pytest.mark.parametrize(
    ("completion", "reward", "correct"),
    [("right", 1.0, True), ("number", 0.25, None), ("yes", 1.0, True), ("decimal", 0.5, None)],
)
def test_numbers_scores_and_booleans_are_values(pool, completion, reward, correct):
    verdict = verdict_of(pool, completion)
    assert (verdict.status, verdict.reward, verdict.correct, verdict.error) == (VALUE, reward, correct, "")
    assert verdict.score_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("completion", ["busy", "sleeps", "regex", "power", "stops", "stubborn"])
def test_a_score_that_hangs_is_a_timeout_and_the_next_one_works(pool, completion):
    hung = verdict_of(pool, completion)
    assert (hung.status, hung.correct) == (TIMEOUT, None)
    assert "0.4 s" in hung.error
    assert 0.4 <= hung.score_s < 5
    assert verdict_of(pool, "number").reward == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "part"),
    [
        ("leaves", "exit code 0"),
        ("crashes", "SIGSEGV"),
        ("exits", "SystemExit: 3"),
        ("raises", "RuntimeError: the user's own words \ufffd"),
        ("recurses", "RecursionError"),
        ("nan", "finite"),
        ("infinite", "finite"),
        ("huge", "at most 1e+09"),
        ("astronomic", "OverflowError"),
        ("killed", "SIGKILL"),
        ("forges", "an invalid verdict"),
        ("none", "NoneType"),
        ("text", "returned a str"),
        ("no_such_name", "KeyError"),
        ("complains", "ValueError: yyy"),
        ("closes", "lost"),
    ],
)
def test_a_result_that_is_not_a_number_is_an_error_and_the_next_call_works(pool, completion, part):
    verdict = verdict_of(pool, completion)
    assert verdict.status == ERROR
    assert part in verdict.error
    assert len(verdict.error) < 3000
    assert verdict_of(pool, "number").reward == 0.25


@pytest.mark.parametrize(("completion", "reward"), [("prints", 1.0), ("floods", 1.0), ("reads", 0.0)])
def test_stdin_and_stdout_of_the_function_do_not_touch_the_channel(pool, completion, reward):
    assert verdict_of(pool, completion).reward == reward
    assert verdict_of(pool, "number").reward == 0.25


def test_a_killed_worker_gives_no_verdict_and_another_one_scores(pool, tmp_path):
    assert verdict_of(pool, "killed_once", str(tmp_path / "before")).reward == 0.75


def test_output_of_a_forked_child_is_not_taken_as_the_verdict(pool):
    verdicts = [verdict_of(pool, completion).reward for completion in ("forks", "number", "forks", "number")]
    assert verdicts == [0.5, 0.25, 0.5, 0.25]


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        '{"id":0,"status":"value","reward":' + "9" * 400 + "}",
        '{"id":0,"status":"value","reward":1,"correct":"yes"}',
        '{"id":0,"status":"value","reward":1,"parts":{"a":' + "9" * 400 + "}}",
        '{"id":0,"status":"value","reward":1,"parts":[]}',
        '{"id":0,"status":"none"}',
        '{"a":' * 30_000 + "1" + "}" * 30_000,
        "9" * 5000,
    ],
)
def test_a_pool_lives_on_whatever_its_worker_writes(pool, body):
    verdict = verdict_of(pool, "forges", body)
    assert (verdict.status, verdict.error[:29]) == (ERROR, "the worker process is lost: i")
    assert verdict_of(pool, "number").reward == 0.25


def test_a_file_that_would_fill_the_disk_is_an_error(pool, tmp_path):
    verdict = verdict_of(pool, "fills", str(tmp_path / "endless"))
    assert verdict.status == ERROR
    assert "too large" in verdict.error
    assert verdict_of(pool, "number").reward == 0.25


def test_cleared_scores_get_no_verdict_and_their_workers_are_free_at_once(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=60.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        for completion in ("busy", "right", "sleeps", "right"):
            submit(pool, completion, key="before")
        before = pool.pids
        pool.clear()
        assert pool.n_unfinished == 0
        submit(pool, "number", key="after")
        assert [verdict.key for verdict in finish(pool)] == ["after"]
        assert not set(before) <= set(pool.pids)


def test_a_text_far_longer_than_a_pipe_arrives_whole_and_one_over_the_limit_is_an_error(pool):
    assert verdict_of(pool, "long" + "é" * 1_000_000).reward == 1_000_004
    over = verdict_of(pool, "long" + "x" * (17 << 20))
    assert (over.status, "at most" in over.error) == (ERROR, True)


def test_a_worker_has_one_thread_leaves_no_core_file_and_a_group_of_its_own(pool):
    assert verdict_of(pool, "core").reward == 0
    assert verdict_of(pool, "threads").reward == 1
    assert [os.getpgid(pid) for pid in pool.pids] == pool.pids


@pytest.mark.slow
def test_fifty_mixed_scores_all_get_their_own_verdict(folder):
    kinds = ["right", "answer", "raises", "leaves", "busy", "answer", "prints", "nan", "answer", "crashes"]
    expected = {"right": VALUE, "answer": VALUE, "prints": VALUE, "busy": TIMEOUT}
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=0.4) as pool:
        for n in range(50):
            submit(pool, kinds[n % len(kinds)], n, key=n)
        verdicts = {verdict.key: verdict for verdict in finish(pool, within_s=120)}
    assert sorted(verdicts) == list(range(50))
    for n, verdict in verdicts.items():
        kind = kinds[n % len(kinds)]
        assert verdict.status == expected.get(kind, ERROR), (kind, verdict)
        if kind == "answer":
            assert verdict.reward == n


@pytest.mark.slow
def test_a_slow_score_does_not_hold_up_those_of_other_workers(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=2.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        submit(pool, "sleeps", key="slow")
        for n in range(20):
            submit(pool, "answer", n, key=n)
        assert [verdict.key for verdict in finish(pool)] == [*range(20), "slow"]


def test_the_time_a_worker_takes_to_start_does_not_count_as_time_of_a_score(tmp_path):
    (tmp_path / "own_slow_start.py").write_text(
        "import time\ntime.sleep(1.0)\ndef score(prompt, completion, row): return 1"
    )
    with WorkerPool(WorkerOrder("own_slow_start:score", tmp_path), n_workers=1, timeout_s=0.3) as pool:
        assert verdict_of(pool, "number").status == VALUE


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


def test_a_tower_of_powers_is_a_wrong_answer_of_the_mathematics_reward(tmp_path):  # item 2
    with WorkerPool(WorkerOrder("math", tmp_path), n_workers=1, timeout_s=20.0) as pool:
        for text in (r"\boxed{9^{9^{9^9}}}", r"$10^{10^{10}}$", r"\boxed{(10^9)!}", "\uff15", "9" * 5000, "5 " * 16000):
            pool.submit(text, prompt="", completion=text, row='{"answer": "2"}')
        pool.submit("no answer in the row", prompt="", completion="2", row='{"answer": ""}')
        verdicts = {verdict.key: verdict for verdict in finish(pool)}
    assert verdicts.pop("no answer in the row").status == ERROR
    assert [(verdict.status, verdict.reward, verdict.correct) for verdict in verdicts.values()] == [
        (VALUE, 0.0, False)
    ] * 6


def is_alive(pid: int) -> bool:
    """A zombie is dead: whoever is its parent now has only not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid: int) -> None:
    if is_alive(pid):
        watch = os.pidfd_open(pid)
        try:
            assert select.select([watch], [], [], 10.0)[0], f"process {pid} still lives"
        finally:
            os.close(watch)


@pytest.mark.slow
@pytest.mark.parametrize("completion", ["child", "escapes", "forks_and_leaves"])
def test_processes_started_by_the_function_are_killed_at_its_deadline(pool, tmp_path, completion):
    assert verdict_of(pool, completion, str(tmp_path / "pid")).status == TIMEOUT
    await_end(int((tmp_path / "pid").read_text()))


def test_closing_the_pool_leaves_no_process_even_in_the_middle_of_a_score(folder):
    with WorkerPool(WorkerOrder("own_worker_rewards:score", folder), n_workers=2, timeout_s=60.0) as pool:
        while not pool.ready:
            pool.poll(1.0)
        submit(pool, "stubborn")
        pids = pool.pids
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


def test_workers_die_with_the_process_that_made_them(folder):
    code = (
        "import sys, os\n"
        "from actors.rewards.pool import WorkerOrder, WorkerPool\n"
        f"pool = WorkerPool(WorkerOrder('own_worker_rewards:score', {str(folder)!r}), n_workers=2, timeout_s=60.0)\n"
        "while not pool.ready: pool.poll(1.0)\n"
        "pool.submit(0, prompt='', completion='stubborn', row='{}')\n"
        "print(*pool.pids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    for pid in pids:
        await_end(pid)


def test_frames_come_out_as_they_went_in_however_they_are_cut():
    frames = pack({"a": 1}, cap_bytes=100) + pack({"b": "é"}, cap_bytes=100)
    buffer, records = bytearray(), []
    for byte in frames:
        buffer.append(byte)
        while (record := unpack(buffer, cap_bytes=100)) is not None:
            records.append(record)
    assert records == [{"a": 1}, {"b": "é"}]


def test_frames_over_the_cap_or_without_an_object_are_refused_on_both_sides():
    with pytest.raises(ValueError, match="at most 10 bytes"):
        pack({"a": "x" * 20}, cap_bytes=10)
    with pytest.raises(ValueError, match="claims 1000"):
        unpack(bytearray(LENGTH.pack(1000)), cap_bytes=10)
    with pytest.raises(ValueError, match="one JSON object"):
        unpack(bytearray(LENGTH.pack(2) + b"[]"), cap_bytes=10)
    with pytest.raises(ValueError, match="nested too deep"):
        unpack(bytearray(LENGTH.pack(60_000) + b'{"a":' * 12_000), cap_bytes=60_000)


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


@pytest.mark.parametrize("completion", ["spoil", "exit"])
def test_in_a_fresh_process_a_score_changes_no_later_one(tmp_path: Path, completion: str) -> None:
    (tmp_path / "own_spoiling.py").write_text(SPOILING)
    with WorkerPool(
        WorkerOrder("own_spoiling:score", tmp_path, fresh_process=True), n_workers=1, timeout_s=20.0
    ) as pool:
        pids = pool.pids
        for key, text in enumerate([completion, "plain", "plain"]):
            pool.submit(key, prompt="", completion=text, row="{}")
        verdicts = {}
        while len(verdicts) < 3:
            verdicts |= {verdict.key: verdict for verdict in pool.poll(1.0)}
        assert pool.pids == pids  # one worker, forked three times
    assert [verdicts[key].status for key in (1, 2)] == [VerdictStatus.VALUE] * 2
    assert [verdicts[key].reward for key in (1, 2)] == [0.0, 0.0]
    if completion == "exit":
        assert verdicts[0].status == VerdictStatus.ERROR
        assert "gave no verdict: it ended by exit code 0" in verdicts[0].error


KILLS_WORKER = """
import os, signal
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(3, flush=True)
os.kill(parent(os.getppid()), signal.%s)
while True: pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("fresh_process", [False, True])
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
