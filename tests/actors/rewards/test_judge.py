"""The reward "judge" against a server in this process: grades, retries, cache, budget and concurrency.

Skipped where httpx2 (extra "judge") is not installed.
"""

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actors.rewards.loading import load_group, load_reward, reward_options
from areal_bus.config.rewards import RewardConfig
from areal_bus.errors import ConfigError

pytest.importorskip("httpx2")

from actors.rewards import by_url
from actors.rewards import judge as module
from actors.rewards.judge import BudgetSpent, JudgeAway, JudgeRejects, JudgeStore
from areal_code import scoring

ROW = {"question": "1+1?", "answer": "2"}


def chat(text: object, n_tokens: int = 10, finish: str = "stop") -> tuple[int, dict[str, str], Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"choices": [choice], "usage": {"total_tokens": n_tokens}}
    return 200, {}, body


@dataclass
class Server:
    """Answers calls with `answers` in turn, then with "Score: 1"; counts them."""

    answers: deque[tuple[int, dict[str, str], Any]] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        with self.lock:
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            return self.answers.popleft() if self.answers else chat("It is right.\nScore: 1")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "_options", None)
    monkeypatch.setattr(module, "_judge", None)
    monkeypatch.setattr(by_url, "_servers", {})
    monkeypatch.setattr(scoring, "_options", scoring.CodeOptions())
    judge = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, answer = judge.answer(self.path, dict(self.headers), body)
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        judge.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield judge
        http.shutdown()
        thread.join()


def reward_of(url: str, *, timeout_s: float = 20.0, **judge: object) -> RewardConfig:
    keys = {"function": "judge", "timeout_s": timeout_s, "judge": {"url": url, "model": "grader", **judge}}
    return RewardConfig.model_validate(keys)


def judge_of(server: Server, folder: Path, **keys: Any) -> Any:
    reward = reward_of(server.url, **keys)
    return load_reward("judge", folder, {"question", "answer"}, options=reward_options(reward, folder))


def spent(folder: Path) -> tuple[int, int]:
    return JudgeStore(folder / "judge" / socket.gethostname()).spent()


def test_a_completion_is_graded_by_the_score_that_ends_the_reply(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers.append(chat("The answer claims Score: 10. It lacks a step.\n**Score:** 7.5/10"))
    judge = judge_of(server, tmp_path, max_score=10, correct_from=0.7, api_key_env="JUDGE_KEY")
    score = judge("asked: 1+1?", "{two}", ROW)
    assert (score.reward, score.correct) == (0.75, True)
    (body,) = server.bodies
    (message,) = body["messages"]
    assert (body["model"], body["temperature"], message["role"]) == ("grader", 0.0, "user")
    assert all(part in message["content"] for part in ("asked: 1+1?", "{two}", "\n2\n", "(wrong) to 10 (right)"))
    assert (server.paths, server.headers[0]["Authorization"]) == (["/v1/chat/completions"], "Bearer secret")
    assert "secret" not in str(reward_options(reward_of(server.url, api_key_env="JUDGE_KEY")))


@pytest.mark.parametrize(
    "reply",
    [
        "Score: 7",
        "Score: 7.",
        "It is good. Score: 7/10",
        "# Final score: 7 out of 10\n\n",
        "`Score = 7 points`",
        "Score: 5\nOn reflection it is better.\nScore: 7",
        "Score: 7\nI keep it. Score: 7",
        "Clarity score: 3. Rigour score: 9. Final score: 7",
    ],
)
def test_a_grade_is_read_at_the_end_of_the_reply(reply: str) -> None:
    assert module.grade_of(reply, 10) == 7.0


def test_a_busy_judge_is_asked_again_and_after_the_time_it_wants(server: Server, tmp_path: Path) -> None:
    server.answers += [(429, {"Retry-After": "1"}, "slower"), (503, {}, "busy"), (500, {}, "oops"), chat("Score: 0")]
    began = time.monotonic()
    assert judge_of(server, tmp_path)("", "3", ROW).reward == 0.0
    assert time.monotonic() - began >= 1.0
    assert len(server.bodies) == 4
    assert spent(tmp_path) == (1, 10)  # what was not answered costs nothing


def test_retries_end_and_a_pause_over_the_deadline_is_not_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RETRIES", 2)
    for answer, n_calls in ((429, {"Retry-After": "3600"}, "tomorrow"), 1), ((503, {}, "busy"), 3):
        server.answers.extend([answer] * n_calls)
        with pytest.raises(JudgeAway, match=rf"no answer from the judge at .* in {n_calls} calls; .* {answer[0]}: "):
            judge_of(server, tmp_path)("", "3", ROW)
        assert not server.answers
    assert len(server.bodies) == 4


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_a_call_that_is_rejected_is_not_repeated(server: Server, tmp_path: Path, status: int) -> None:
    server.answers.append((status, {"Location": server.url}, "wrong key"))
    with pytest.raises(JudgeRejects, match=f"rejects the call: status {status}: wrong key"):
        judge_of(server, tmp_path)("", "3", ROW)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (chat("It is right."), "must end with \"Score: N\": it ends with 'It is right.'"),
        (chat("Score: 0\n(An ideal answer would get Score: 1)"), "must end with"),
        (chat("An ideal answer would get Score: 1"), "must end with"),
        (chat("Score: 0\nAn ideal answer would get this: Score: 1"), "has two grades, 0 and 1"),
        (chat("Score: 0. An ideal answer: Score: 1"), "has two grades, 0 and 1"),
        (chat("Score: 1e0"), "must end with"),
        (chat("Score: 0 Score: 1"), "must end with"),
        (chat("Score: 1/10"), "must end with"),
        (chat("It is right.\nScore: 1", finish="length"), "was cut after reward.judge.max_tokens = 512 tokens"),
        (chat("Score: 2"), "from 0 to reward.judge.max_score = 1: it is 2"),
        (chat("Score: -1"), "it is -1"),
        (chat(None), "must be text: it is a NoneType"),
        ((200, {}, "<html>"), "must answer with a chat completion: '<html>'"),
        ((200, {}, {"choices": []}), "must answer with a chat completion"),
        ((200, {}, [1]), "must answer with a chat completion"),
    ],
)
def test_a_reply_without_a_grade_is_an_error_and_is_not_kept(
    server: Server, tmp_path: Path, answer: tuple[int, dict[str, str], Any], said: str
) -> None:
    server.answers.append(answer)
    judge = judge_of(server, tmp_path)
    with pytest.raises(ValueError) as caught:
        judge("", "3", ROW)
    assert said in str(caught.value)
    assert judge("", "3", ROW).reward == 1.0


def test_the_same_request_is_sent_once_and_another_one_again(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path)
    server.answers += [chat("Score: 0.25"), chat("Score: 0.5")]
    assert [judge("", text, ROW).reward for text in ("3", "4", "3", "4")] == [0.25, 0.5, 0.25, 0.5]
    assert judge_of(server, tmp_path)("", "3", ROW).reward == 0.25  # another process, after a restart
    assert len(server.bodies) == 2


def test_a_spent_budget_is_an_error_and_kept_replies_stay_free(server: Server, tmp_path: Path) -> None:
    server.answers.append((503, {}, "busy"))
    judge = judge_of(server, tmp_path, max_calls=2)
    assert [judge("", text, ROW).reward for text in ("3", "4", "3")] == [1.0] * 3
    with pytest.raises(BudgetSpent, match=r"2 calls of reward\.judge\.max_calls = 2 \(20 tokens\)"):
        judge("", "5", ROW)
    assert judge("", "3", ROW).reward == 1.0
    assert len(server.bodies) == 3


def test_a_judge_that_is_down_is_an_error_and_never_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"  # bound, not listening: refuses connections
        judge = load_reward("judge", tmp_path, options=reward_options(reward_of(url, timeout_s=3.0), tmp_path))
        with pytest.raises(JudgeAway, match=r"no answer from the judge at http://127\.0\.0\.1:.*ConnectError"):
            judge("", "2", ROW)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompt": "{completion} {solution}"}, "unknown field solution in reward.judge.prompt"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_the_start(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    options = reward_options(reward_of("http://127.0.0.1:9/v1", **keys))
    with pytest.raises(ConfigError, match=said):
        load_reward("judge", tmp_path, {"question", "answer"}, options=options)


def url_options(server: Server, folder: Path, function: str = "url", **judge: object) -> dict[str, Any]:
    keys = {"function": function, "url": server.url, "timeout_s": 20, "judge": judge}
    return reward_options(RewardConfig.model_validate(keys), folder)


def test_a_reward_by_url_gets_the_sample_and_answers_with_its_reward(server: Server, tmp_path: Path) -> None:
    score = load_reward("url", tmp_path, options=url_options(server, tmp_path, max_calls=1))
    server.answers += [(503, {"Retry-After": "0"}, ""), (200, {}, {"rewards": [{"reward": 0.25, "correct": False}]})]
    value = score("1+1?", "3", ROW)
    assert (value.reward, value.correct) == (0.25, False)
    assert server.paths == ["/v1", "/v1"]
    (sample,) = server.bodies[0]["samples"]
    assert {name: sample[name] for name in ("prompt", "completion")} == {"prompt": "1+1?", "completion": "3"}
    assert sample["row"]["answer"] == "2"
    assert score("1+1?", "3", ROW) == value  # kept: no further call
    assert len(server.bodies) == 2
    assert spent(tmp_path)[0] == 1
    with pytest.raises(BudgetSpent):
        score("1+1?", "4", ROW)


@pytest.mark.parametrize("answer", [{"rewards": []}, {"rewards": [1, 2]}, {"rewards": ["1"]}, {"reward": 1}, [1], "no"])
def test_an_answer_of_a_url_without_the_reward_is_an_error_and_not_kept(
    server: Server, tmp_path: Path, answer: object
) -> None:
    score = load_reward("url", tmp_path, options=url_options(server, tmp_path))
    server.answers += [(200, {}, answer), (200, {}, {"rewards": [1]})]
    with pytest.raises((ValueError, TypeError)):
        score("1+1?", "2", ROW)
    assert score("1+1?", "2", ROW).reward == 1.0


def test_a_group_by_url_is_one_call_with_all_samples(server: Server, tmp_path: Path) -> None:
    group = load_group("url", tmp_path, options=url_options(server, tmp_path))
    server.answers.append((200, {}, {"rewards": [0, 1, 0.5]}))
    samples = [{"completion": text, "reward": 0.5, "correct": None} for text in ("a", "b", "c")]
    assert group("1+1?", samples, ROW) == [0.0, 1.0, 0.5]
    assert [(one["completion"], one["reward"]) for one in server.bodies[0]["samples"]] == [
        ("a", 0.5), ("b", 0.5), ("c", 0.5)
    ]  # fmt: skip


PRINTS = "```python\nprint(int(input()) + 1)\n```"
ADDS_ONE = {"tests": [{"input": "1", "output": "2"}, {"input": "5", "output": "6"}]}


def ran(stdout: str, status: str = "Finished", code: int = 0) -> tuple[int, dict[str, str], Any]:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": ""}
    return 200, {}, {"status": "Success" if not code else "Failed", "message": "", "run_result": result}


def test_programs_run_on_a_sandbox_server(server: Server, tmp_path: Path) -> None:
    score = load_reward("code_share", tmp_path, options=url_options(server, tmp_path, "code_share"))
    server.answers += [ran("2\n"), ran("7\n"), ran("2\n", "TimeLimitExceeded"), ran("6\n", code=1)]
    other = PRINTS.replace("+ 1", "+ 2")  # the same one is not run again
    assert [score("", program, ADDS_ONE).reward for program in (PRINTS, other)] == [0.5, 0.0]
    body = server.bodies[0]
    assert (server.paths[0], body["language"], body["stdin"]) == ("/v1/run_code", "python", "1")
    assert (body["memory_limit_MB"], body["run_timeout"]) == (1024, 6.0)
    assert "print(int(input()) + 1)" in body["code"]


def test_a_sandbox_server_that_fails_itself_is_an_error(server: Server, tmp_path: Path) -> None:
    score = load_reward("code", tmp_path, options=url_options(server, tmp_path, "code"))
    server.answers.append((200, {}, {"status": "SandboxError", "message": "no disk"}))
    with pytest.raises(ValueError, match=r"did not run the program.*no disk"):
        score("", PRINTS, ADDS_ONE)
    with pytest.raises(ValueError, match="standard input only"):
        score("", PRINTS, {"test_list": ["assert f(1) == 2"]})
