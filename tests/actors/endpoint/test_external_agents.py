"""Agents outside the job open episodes with a URL and a key, and every way in which they end has a verdict."""

import http.client
import json
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.endpoint import external_agents
from actors.endpoint.agent_pool import AgentJob
from actors.endpoint.external_agents import ACCESS, AgentAccess, ExternalAgents, read_result
from actors.endpoint.http_server import EndpointServer
from actors.endpoint.openai_api import RequestRejected
from actors.endpoint.sessions import AgentEnded, Sessions
from actors.workflows.episode_runner import Asker
from actors.workflows.loading import load_workflow
from areal_bus.config.names.workflows import EXTERNAL
from areal_bus.config.rollout import GenerationConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Trajectory
from tests.actors.endpoint.endpoint_agents import post, user
from tests.actors.endpoint.stage import WAIT_S, MakeStage, Stage, returned
from tests.support.polling import wait_until


def opened(access: AgentAccess) -> dict[str, Any]:
    """An episode, asked for until there is one."""

    def ask() -> dict[str, Any] | None:
        try:
            status, answer = post(access.base_url, access.key, {}, path="/episodes")
        except OSError:  # no generator serves yet
            return None
        assert status in (200, 503), answer
        return answer if status == 200 else None

    episode = wait_until(ask, "an episode waits", WAIT_S)
    assert episode is not None
    return episode


def ask(episode: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    """A conversation: each text is answered."""
    messages: list[Any] = []
    for text in texts:
        _, answer = post(episode["base_url"], episode["api_key"], {"messages": [*messages, user(text)]})
        messages += [user(text), answer["choices"][0]["message"]]
    return messages


def close(episode: dict[str, Any], **result: Any) -> tuple[int, Any]:
    return post(episode["base_url"], episode["api_key"], json.dumps(result).encode(), path="/episodes/close")


def beside(stage: Stage, act: Callable[[], None]) -> list[Any]:
    """The outcomes of the stage's samples while an agent acts in its thread."""
    agent = threading.Thread(target=act, daemon=True)
    agent.start()
    outcomes = stage.run()
    agent.join(WAIT_S)
    assert not agent.is_alive()
    return outcomes


def test_an_agent_with_a_url_and_a_key_opens_an_episode_and_its_close_is_the_verdict(
    stage: MakeStage, tmp_path: Path
) -> None:
    s, access = stage(EXTERNAL), AgentAccess.of(tmp_path)
    said: list[Any] = []

    def act() -> None:
        episode = opened(access)
        said.append(episode)
        said.append(post(access.base_url, access.key + "x", {}, path="/episodes"))
        said.append(post(episode["base_url"], access.key, {"messages": [user("a")]}))
        said.append(ask(episode, episode["row"]["question"], "and then"))
        said.append(close(episode, reward="much"))
        said.append(close(episode, reward=0.5, parts={"tools": 2}))
        said.append(close(episode, reward=1.0))

    s.begin(question="abc")
    (t,) = beside(s, act)
    episode, stranger, not_of_episode, messages, refused, closed, again = said
    assert isinstance(t, Trajectory), t
    assert episode["row"]["question"] == "abc"
    assert (stranger[0], not_of_episode[0]) == (401, 401)
    assert "wrong API key" in stranger[1]["error"]["message"]
    assert (refused[0], closed) == (400, (200, {"id": episode["id"], "status": "closed"}))
    assert (again[0], again[1]["error"]["code"]) == (409, "episode_ended")
    found = returned(t)
    assert (found["reward"], found["parts"]) == (0.5, {"tools": 2})
    assert [m["content"] for m in found["messages"]] == [m["content"] for m in messages]
    assert s.engine.n_tokens == len(t.logps) // 4


def test_an_agent_keeps_its_connection_from_one_episode_to_the_next(stage: MakeStage, tmp_path: Path) -> None:
    s, access = stage(EXTERNAL), AgentAccess.of(tmp_path)
    ports: list[int] = []

    def act() -> None:
        where = urlsplit(access.base_url)
        assert where.hostname is not None
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=WAIT_S)

        def call(path: str, key: str, body: Any) -> Any:
            connection.request("POST", where.path + path, json.dumps(body), {"Authorization": f"Bearer {key}"})
            answer = json.loads(connection.getresponse().read())
            ports.append(connection.sock.getsockname()[1])
            return answer

        for _ in range(2):
            episode = call("/episodes", access.key, {})
            call("/chat/completions", episode["api_key"], {"messages": [user("a")]})
            assert call("/episodes/close", episode["api_key"], {"reward": 1.0})["status"] == "closed"
        connection.close()

    s.begin(samples=(0, 1))
    assert len(beside(s, act)) == 2
    assert len(ports) == 6
    assert len(set(ports)) == 1


def test_an_episode_whose_agent_falls_silent_is_begun_again_by_another(stage: MakeStage, tmp_path: Path) -> None:
    s, access = stage(EXTERNAL, timeout_s=0.5), AgentAccess.of(tmp_path)
    late: list[tuple[int, Any]] = []

    def act() -> None:
        lost = opened(access)
        ask(lost, "one")
        other = opened(access)  # the same sample, once the first agent's time is over
        assert (lost["id"], lost["row"]) == (other["id"], other["row"])
        late.append(close(lost, reward=1.0))
        ask(other, "one")
        assert close(other, reward=0.25)[0] == 200

    s.begin()
    (t,) = beside(s, act)
    assert isinstance(t, Trajectory), t
    assert late[0][0] == 409
    assert (returned(t)["reward"], returned(t)["n_killed"]) == (0.25, 1)
    (completion,) = [line for line in map(json.loads, s.journal.path.read_text().splitlines()) if "n_forgotten" in line]
    assert s.engine.n_tokens == len(t.logps) // 4 + completion["n_forgotten"]


def test_an_episode_that_three_agents_leave_or_that_one_gives_up_fails_with_the_reason(
    stage: MakeStage, tmp_path: Path
) -> None:
    s, access = stage(EXTERNAL, timeout_s=0.2), AgentAccess.of(tmp_path)

    def leave() -> None:
        for _ in range(3):
            opened(access)

    s.begin()
    (failed,) = beside(s, leave)
    assert "timed out: its agent did not close it within workflow.agent.timeout_s = 0.2 s of its own" in failed.error

    def give_up() -> None:
        assert close(opened(access), error="the tool is down")[0] == 200

    s.outcomes.clear()
    s.begin(1)
    (failed,) = beside(s, give_up)
    assert "failed: the tool is down" in failed.error


def test_agents_with_one_key_get_an_episode_each_from_all_generators_of_a_host(tmp_path: Path) -> None:
    access = AgentAccess.make(tmp_path)
    assert stat.S_IMODE((tmp_path / ACCESS).stat().st_mode) == 0o600
    assert AgentAccess.make(tmp_path) == access  # as after a resume
    with ExitStack() as stack:
        for generator in range(2):
            sessions, external = Sessions(lambda: None), ExternalAgents(access, timeout_s=WAIT_S, most=2)
            server = EndpointServer(sessions, model="m", n_connections=20, external=external)
            stack.callback(server.close)
            for sample in range(2):
                external.run(AgentJob(sessions.open(f"{generator}.{sample}"), {}, server.base_url))
        found: list[dict[str, Any]] = []
        agents = [threading.Thread(target=lambda: found.append(opened(access))) for _ in range(4)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join(WAIT_S)
    assert {episode["id"] for episode in found} == {"0.0", "0.1", "1.0", "1.1"}
    assert len({episode["base_url"] for episode in found}) == 2
    assert len({episode["api_key"] for episode in found}) == 4


def test_an_agent_gets_no_more_episodes_at_once_than_the_run_has_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_agents, "WAIT_S", 0.1)
    access, sessions = AgentAccess.make(tmp_path), Sessions(lambda: None)
    external = ExternalAgents(access, timeout_s=WAIT_S, most=1)
    server = EndpointServer(sessions, model="m", n_connections=20, external=external)
    samples = {name: sessions.open(name) for name in ("cancelled", "one", "two")}
    for session in samples.values():
        external.run(AgentJob(session, {}, server.base_url))
    try:
        sessions.close(samples["cancelled"])
        assert opened(access)["id"] == "one"
        assert post(access.base_url, access.key, {}, path="/episodes")[1]["error"]["code"] == "no_episode"
        sessions.close(samples["one"])
        assert opened(access)["id"] == "two"
    finally:
        server.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"reward": 1e999}',
        b'{"reward": 1%s}' % (b"0" * 400),
        b'{"parts": {"a": 1e999}}',
        b'{"reward": true}',
        b"[]",
        b"x" * (65 << 10),
    ],
)
def test_a_result_that_is_none_leaves_the_episode_open(body: bytes) -> None:
    with pytest.raises(RequestRejected):
        read_result(body)


def test_null_in_a_result_is_not_set() -> None:
    assert read_result(b'{"reward": null, "error": null, "parts": {}}') == AgentEnded({"parts": {}})


def test_agents_outside_need_a_run_whose_file_is_readable(stage: MakeStage, tmp_path: Path) -> None:
    s = stage(EXTERNAL)
    workflow = load_workflow(s.config)
    with pytest.raises(ConfigError, match="missing run: agents outside the job"):
        workflow.episode({}, Asker(s.tokenizer, "sample", GenerationConfig())).send(None)
    (tmp_path / ACCESS).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unreadable .*agents\.json"):
        AgentAccess.of(tmp_path)
