"""Agents in processes of their own call the model over HTTP, and their conversations become trajectories."""

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import pytest
import torch

from actors.endpoint.http_server import SILENT_S, EndpointServer
from actors.endpoint.openai_api import read_call
from actors.endpoint.sessions import AgentEnded, Sessions
from actors.rewards.loading import load_reward
from actors.workflows.loading import check_workflow
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import SampleFailed, Trajectory
from areal_bus.wire import codec
from tests.actors.endpoint.endpoint_agents import post
from tests.actors.endpoint.stage import WAIT_S, MakeStage, batch_of, returned
from tests.support.polling import is_alive, wait_until
from tests.support.talking import TOOLS, talking


def test_a_conversation_becomes_one_trajectory_of_exact_tokens_and_versions(stage: MakeStage, tmp_path: Path) -> None:
    s = stage("talk")
    s.begin(go=str(tmp_path / "go"))
    s.run_until(lambda: s.sampling.is_midway)
    assert s.sampling.is_idle
    assert not list(s.sampling.partials(at_least=1))  # no other engine can go on with an agent
    s.engine.update(1, dict(s.model(1).named_parameters()))
    (tmp_path / "go").touch()
    t = s.trajectory()
    row, ids = returned(t), np.frombuffer(t.ids, dtype="<i4").tolist()
    logps = np.frombuffer(t.logps, dtype="<f4")
    first, second = row["first"]["choices"][0], row["second"]["choices"][0]
    (given, n_first), (added, n_second) = t.segments
    assert t.spans == [[0, n_first], [1, n_second]]
    assert s.tokenizer.decode(ids[:given]) == "user>abc<eos>assistant>"
    has_end = first["finish_reason"] == "stop"
    assert (
        s.tokenizer.decode(ids[given + n_first :][:added])
        == ("" if has_end else "<eos>") + "user>and then<eos>assistant>"
    )
    answer = ids[given : given + n_first]
    assert [token["token"] for token in first["logprobs"]["content"]] == [s.tokenizer.decode([i]) for i in answer]
    assert [token["logprob"] for token in first["logprobs"]["content"]] == logps[:n_first].tolist()
    assert row["second"]["usage"] == {
        "prompt_tokens": len(ids) - n_second,
        "completion_tokens": n_second,
        "total_tokens": len(ids),
    }
    for version, begin, end, mine in [
        (0, given, given + n_first, logps[:n_first]),
        (1, -n_second, None, logps[n_first:]),
    ]:
        with torch.no_grad():
            fresh = s.model(version)(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(ids))[begin:end]
        assert np.allclose([fresh[at - 1, ids[at]] for at in places], mine, atol=1e-4)
    assert (t.text, t.prompt_text) == (second["message"]["content"], s.tokenizer.decode(ids[:-n_second]))
    (item,) = batch_of(t).items
    assert item.ids_T[item.places_K].tolist() == [*answer, *ids[-n_second:]]  # what was given enters no loss
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert row["url"].startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_conversations_at_once_have_keys_and_tokens_of_their_own(stage: MakeStage) -> None:
    s = stage("once", workers=3)
    for uid, question in enumerate(("aaaa", "bbbb", "cccc")):
        s.begin(uid, samples=(0, 1), question=question)
    trajectories = s.run()
    assert len(trajectories) == 6
    for t in trajectories:
        assert isinstance(t, Trajectory)
        assert t.prompt_text == f"user>{'abc'[t.uid] * 4}<eos>assistant>"
        assert returned(t)["answer"]["choices"][0]["message"]["content"] == t.text
    assert len({returned(t)["key"] for t in trajectories if isinstance(t, Trajectory)}) == 6
    assert 1 <= len({returned(t)["pid"] for t in trajectories if isinstance(t, Trajectory)}) <= 3
    texts = {(t.uid, t.sample): t.text for t in trajectories if isinstance(t, Trajectory)}
    assert texts[0, 0] != texts[0, 1]


def test_the_number_that_an_agent_returns_is_its_reward(stage: MakeStage, tmp_path: Path) -> None:
    t, _ = stage("reward_later").hold()
    score: Any = load_reward("agent", tmp_path)(t.prompt_text, t.text, json.loads(t.row))
    assert (score.reward, score.correct) == (0.25, None)
    with pytest.raises(ValueError, match="must return its reward"):
        load_reward("agent", tmp_path)("", "", {"agent": {}})


@pytest.mark.slow
def test_strangers_and_nonsense_are_refused_and_change_nothing(stage: MakeStage) -> None:
    t, row = stage("stranger").hold()
    said = row["said"]
    by_status: dict[int, set[str]] = {}
    for name, (status, _) in said.items():
        by_status.setdefault(status, set()).add(name)
    assert by_status.pop(400) == {"no json", "no length", "temperature", "top_p", "least", "min_p", "tools",
                                  "over the model", "again"}  # fmt: skip
    assert by_status == {
        200: {"models", "well"},
        401: {"no key", "wrong key"},
        404: {"no such thing", "not to get"},
        413: {"too long"},
    }
    assert said["models"][1]["data"][0]["id"] == "scratch"
    assert "leave temperature out" in said["temperature"][1]["error"]["message"]
    assert "min_tokens must not exceed" in said["least"][1]["error"]["message"]
    assert "setting not supported by this run's engine: min_p is from 0 to 1" in said["min_p"][1]["error"]["message"]
    assert said["min_p"][1]["error"]["code"] == "unsupported_setting"
    assert said["over the model"][1]["error"]["code"] == "context_length_exceeded"
    assert "messages[1] is missing" in said["again"][1]["error"]["message"]
    assert t.segments == [[len("user>hello>assistant>"), len(t.logps) // 4]]


def test_an_agent_may_change_how_a_call_is_sampled_and_gets_the_text_before_a_stop_string(
    stage: MakeStage,
) -> None:
    s = stage("once")
    of = s.tokenizer.convert_tokens_to_ids
    only_ab = {str(of(letter)): 100 if letter in "ab" else -100 for letter in "abcdefghijklmnopqrstuvwxyz >"}
    s.begin(fields={"logit_bias": only_ab, "stop": ["ba"], "min_tokens": 2})
    t = s.trajectory()
    found = returned(t)
    assert found["status"] == 200
    answer = found["answer"]["choices"][0]
    assert (t.finish, answer["finish_reason"]) == ("stop", "stop")
    assert set(t.text) <= {"a", "b"}
    assert t.text == answer["message"]["content"] + "ba"  # the trajectory has all tokens
    assert min(np.frombuffer(t.logps, "<f4")) < -1.0  # the model's own: the bias would have made two tokens likely


def test_an_agent_finds_its_endpoint_past_a_proxy_and_its_key_is_of_no_use_afterwards(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a closed port
    monkeypatch.delenv("no_proxy", raising=False)
    s = stage("proxied")
    s.begin()
    row = returned(s.trajectory())
    assert row["models"]["data"][0]["id"] == "scratch"
    key = row["key"]
    status, answer = post(s.workflow._serve(), key, {"messages": [{"role": "user", "content": "x"}]})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_a_conversation_has_one_call_at_a_time(stage: MakeStage, tmp_path: Path) -> None:
    s = stage("at_once")
    s.begin(answered=str(tmp_path / "answered"))
    wait_until((tmp_path / "answered").exists)  # the loop does not turn meanwhile: it is no answer of the model
    t = s.trajectory()
    assert sorted(returned(t)["statuses"]) == [200, 400]
    assert len(t.segments) == 1


def test_many_calls_wake_the_loop_once_until_it_looks() -> None:
    woken: list[str] = []
    sessions = Sessions(lambda: woken.append("now"))
    one, other = sessions.open("one"), sessions.open("other")
    call = read_call(b'{"messages": [{"role": "user", "content": "x"}]}')
    one.call(call, lambda: False)
    other.call(call, lambda: False)
    assert len(woken) == 1
    assert one.has_event()
    other.end(AgentEnded({}))
    assert len(woken) == 2
    assert [type(other.next_event()).__name__ for _ in range(2)] == ["Pending", "AgentEnded"]


def test_a_client_that_hung_up_gets_the_same_answer_when_it_asks_again(stage: MakeStage, tmp_path: Path) -> None:
    s = stage("hangs_up")
    s.begin(go=str(tmp_path / "go"), gone=str(tmp_path / "gone"))
    s.run_until(lambda: s.engine.n_live > 0)
    (tmp_path / "go").touch()
    wait_until((tmp_path / "gone").exists)
    t = s.trajectory()
    assert returned(t)["status"] == 200, returned(t)
    assert returned(t)["once_more"]["choices"] == returned(t)["answer"]["choices"]
    assert returned(t)["answer"]["choices"][0]["message"]["content"] == t.text
    assert len(t.segments) == 1


def test_connections_that_an_agent_forgets_end_with_its_conversation(stage: MakeStage) -> None:
    s = stage("leaks", workers=1)  # 20 connections at most
    for uid in range(4):
        s.begin(uid)
    assert [returned(t)["status"] for t in s.run() if isinstance(t, Trajectory)] == [200] * 4


def test_a_stream_is_the_answer_in_chunks(stage: MakeStage) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    t, row = stage("once").hold(fields=fields)
    events = row["answer"].removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    role, text, end, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    assert (role["choices"][0]["delta"]["role"], role["usage"]) == ("assistant", None)
    assert text["choices"][0]["delta"] == {"content": t.text}
    assert len(text["choices"][0]["logprobs"]["content"]) == len(t.logps) // 4
    assert end["choices"][0]["finish_reason"] == t.finish
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(t.logps) // 4)


def test_choices_are_trajectories_of_one_prompt_where_an_episode_may_have_several(stage: MakeStage) -> None:
    s = stage("chooses", rewritten="new_trajectory")
    t, row = s.hold()
    assert (row["status"], t.trajectories) == (200, [0, 1, 2, 1])
    assert [choice["index"] for choice in row["first"]["choices"]] == [0, 1, 2]
    n_given, n_sampled = [n for n, _ in t.segments], [n for _, n in t.segments]
    assert n_given[:3] == [len("user>one>assistant>")] * 3
    usage = {"prompt_tokens": n_given[0], "completion_tokens": sum(n_sampled[:3])}
    assert len({choice["message"]["content"] for choice in row["first"]["choices"]}) == 3  # seeds of their own
    assert row["first"]["usage"] == usage | {"total_tokens": sum(usage.values())}
    assert s.engine.n_tokens == sum(n_sampled) == batch_of(t).items[0].n_trained
    s = stage("once")  # where an episode has one trajectory
    s.begin(fields={"n": 2})
    assert "missing call of the model" in s.unsampled().error  # it got 400, and called no more


@pytest.mark.parametrize(
    ("rewritten", "statuses", "trajectories"),
    [("refuse", [200, 400, 400], []), ("restart", [200] * 3, []), ("new_trajectory", [200] * 3, [0, 1, 2])],
)
def test_rewritten_messages_are_refused_or_begin_anew_or_are_a_trajectory_of_their_own(
    stage: MakeStage, rewritten: str, statuses: list[int], trajectories: list[int]
) -> None:
    s = stage("rewrites", rewritten=rewritten)
    t, row = s.hold()
    n_kept = len(t.logps) // 4
    assert (row["statuses"], t.trajectories) == (statuses, trajectories)
    lines = map(json.loads, s.journal.path.read_text().splitlines())
    (completion,) = [line for line in lines if line["event"] == "completion"]
    assert s.engine.n_tokens == n_kept + completion.get("n_forgotten", 0)
    if rewritten == "restart":
        assert (t.prompt_text, len(t.segments), row["n_anew"]) == ("user>three<eos>assistant>", 1, 2)
        assert completion["n_tokens"] == n_kept < s.engine.n_tokens
    if rewritten == "new_trajectory":
        assert (row["n_trajectories"], row["n_anew"]) == (3, 0)
        assert codec.decode(codec.encode(t, job="j"), job="j") == t


def test_each_sampled_token_of_an_episode_with_sub_agents_is_trained_in_its_context(
    stage: MakeStage,
) -> None:
    s = stage("delegates", rewritten="new_trajectory")
    t, _ = s.hold()
    assert t.trajectories == [0, 1, 0, 2]
    (item,) = batch_of(t).items
    pieces = item.pieces(item.trained_places)
    texts = [s.tokenizer.decode(piece.ids_T.tolist()) for piece in pieces]
    assert [text.partition(">")[2].partition("<")[0] for text in texts[:2]] == ["one", "sub"]
    assert "three" in texts[0]
    assert texts[2].startswith("user>three")
    assert "four" in texts[2]
    at = 0
    for piece in pieces:
        with torch.no_grad():
            fresh = s.model(0)(piece.ids_T[None]).logits[0].log_softmax(-1)
        behav = item.behav_K[at : at + len(piece.places_K)]
        assert torch.allclose(fresh[piece.places_K - 1, piece.ids_T[piece.places_K]], behav, atol=1e-4)
        at += len(piece.places_K)
    assert at == item.n_trained == s.engine.n_tokens


def test_rewards_of_turns_are_numbers_of_the_tokens_that_end_them(stage: MakeStage) -> None:
    t, _ = stage("rates_turns").hold(turn_rewards=[0.5, -1])
    (item,) = batch_of(t).items
    (_, n), (_, m) = t.segments
    assert item.fields["token_reward"].tolist() == [0.0] * (n - 1) + [0.5] + [0.0] * (m - 1) + [-1.0]


@pytest.mark.parametrize("wrong", [[0.5], [0.5, -1.0, 0.0], [0.5, "x"], 1.0, None])
def test_rewards_that_fit_no_turns_fail_the_sample(stage: MakeStage, wrong: object) -> None:
    s = stage("rates_turns")
    s.begin(turn_rewards=wrong)
    assert "mismatch in the turn_rewards of" in s.unsampled().error
    assert f"2 calls were answered, so a list of 2 numbers is needed; it is {wrong!r}" in s.unsampled().error


def test_a_refused_call_keeps_the_conversation_that_a_rewrite_would_restart(stage: MakeStage) -> None:
    s = stage("outgrows", rewritten="restart")
    t, row = s.hold()
    assert (row["statuses"], row["n_anew"]) == ([400, 200], 0)
    assert len(t.segments) == 2
    assert sum(n for _, n in t.spans) == len(t.logps) // 4 == sum(n for _, n in t.segments) == s.engine.n_tokens


def head_of(url: SplitResult, key: str, more: str) -> bytes:
    line = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: me\r\nAuthorization: Bearer {key}"
    return f"{line}\r\n{more}\r\n\r\n".encode()


def test_a_request_that_comes_bit_by_bit_has_a_deadline() -> None:
    with serving(silent_s=0.3) as (url, _), socket.create_connection((url.hostname, url.port)) as connection:
        deadline = time.monotonic() + WAIT_S
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):
            while not select.select([connection], [], [], 0.02)[0]:
                assert time.monotonic() < deadline
                connection.sendall(b"x")


def test_a_connection_that_waits_for_its_answer_has_no_such_deadline() -> None:
    with serving(silent_s=0.1) as (url, sessions), socket.create_connection((url.hostname, url.port)) as connection:
        session = sessions.open("x")
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        connection.sendall(head_of(url, session.key, f"Content-Length: {len(body)}") + body)
        wait_until(session.has_event)
        assert not select.select([connection], [], [], 0.5)[0]
        sessions.close(session)
        assert connection.recv(12) == b"HTTP/1.1 410"


def test_expect_100_continue_is_answered_before_the_body() -> None:
    with serving() as (url, sessions), socket.create_connection((url.hostname, url.port), SILENT_S / 2) as connection:
        connection.sendall(head_of(url, sessions.open("x").key, "Expect: 100-continue\r\nContent-Length: 1"))
        assert connection.recv(12) == b"HTTP/1.1 100"


@contextlib.contextmanager
def serving(silent_s: float = 30.0) -> Iterator[tuple[SplitResult, Sessions]]:
    """A server, and nobody who answers."""
    sessions = Sessions(lambda: None)
    server = EndpointServer(sessions, model="any", n_connections=4, silent_s=silent_s)
    try:
        yield urlsplit(server.base_url), sessions
    finally:
        sessions.close_all()
        server.close()


def test_a_conversation_keeps_to_its_budgets(stage: MakeStage) -> None:
    s = stage("talk", max_tokens=26)
    t, row = s.hold()
    assert row["second"]["error"]["code"] == "context_length_exceeded"
    assert len(t.ids) // 4 <= 26
    s = stage("talk", max_calls=1)
    s.begin()
    assert "at most workflow.agent.max_calls = 1" in returned(s.trajectory())["second"]["error"]["message"]


def test_an_agent_that_hangs_is_ended_with_all_it_started_and_the_next_one_goes_on(
    stage: MakeStage, tmp_path: Path
) -> None:
    s = stage("hangs", timeout_s=1.0, workers=1)
    s.begin(pids=str(tmp_path / "pids"))
    assert "timeout_s = 1 s of its own" in s.unsampled().error
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not s.engine.n_live


def test_an_agent_ends_when_its_conversation_is_cancelled(stage: MakeStage, tmp_path: Path) -> None:
    s = stage("hangs", workers=1)
    s.begin(pids=str(tmp_path / "pids"))
    s.run_until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    s.sampling.cancel_all()
    wait_until(lambda: not any(map(is_alive, pids)))


FAILURES = {
    "raises": "ZeroDivisionError",
    "exits": "exit code 3",
    "leaves": "SystemExit",
    "is killed": "SIGKILL",
    "is interrupted": "KeyboardInterrupt: by the user's code",
    "no json": "not JSON serializable",
    "no number": "must be finite",
    "half a character": "surrogates",
    "long": "and at most 65536 are allowed",
    "text": "an agent returned a str",
    "no call": "without a call",
}


@pytest.mark.slow
def test_a_failing_agent_ends_its_sample_and_nothing_else(stage: MakeStage) -> None:
    s = stage("fails", workers=1)
    for uid, how in enumerate([*FAILURES, "raises"]):  # each by the process of the one before, or the next
        s.begin(uid, how=how)
    failed = {outcome.uid: outcome.error for outcome in s.run() if isinstance(outcome, SampleFailed)}
    assert len(failed) == len(FAILURES) + 1
    for uid, why in enumerate([*FAILURES.values(), "ZeroDivisionError"]):
        assert why in failed[uid]


def test_an_agent_that_does_not_load_is_a_config_error(stage: MakeStage) -> None:
    for agent, why in [("nowhere", "missing function 'nowhere'"), ("too_few", r"must take \(row, base_url, api_key\)")]:
        s = stage(agent)
        with pytest.raises(ConfigError, match=why):
            check_workflow(s.config)
        s.begin()
        with pytest.raises(ConfigError, match=why):
            s.run()


def test_an_agent_whose_code_ends_its_process_does_not_load(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage("once")
    monkeypatch.setenv("AREAL_BUS_TEST_DIES", "1")
    with pytest.raises(ConfigError, match="must load: it ended by signal SIGKILL"):
        check_workflow(s.config)


@pytest.mark.parametrize("agent", ["uses_tools", "by_client"])
def test_a_tool_call_is_text_of_the_model_and_its_result_is_given(tmp_path: Path, agent: str) -> None:
    """Also to the package openai. The completions are written here: what a small model samples is no call."""
    if agent == "by_client":
        pytest.importorskip("openai", reason="the package openai is not installed")
    named = {"function": f"tests.actors.endpoint.endpoint_agents:{agent}", "chat_template": TOOLS}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    config = Config.model_validate({"workflow": {"function": "agent", "agent": named | {"tool_calls": "hermes"}}})
    with talking(tmp_path, config) as talk:
        row = talk.hold({"question": "1+2"}, [f"{call}<eos>", "3<eos>"])
        assert talk.text == f"tool add;user>1+2<eos>assistant>{call}<eos>tool>3<eos>assistant>3<eos>"
        assert [n for n, _ in talk.run.segments] == [len("tool add;user>1+2$assistant>"), len("tool>3$assistant>")]
    first = row["first"]["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    assert not first["message"]["content"]
    assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert row["second"]["choices"][0]["message"]["content"] == "3"
    if agent == "by_client":
        assert "tool_calls.function.arguments.done" in row["events"]
        assert row["first"]["usage"]["completion_tokens"] > 0
        assert len(row["ids"]) == 2
