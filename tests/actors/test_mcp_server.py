"""Tools of MCP servers: what the model reads, and that no server outlives its episode, whatever it does."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from actors import mcp_server
from actors.agents import tools_of
from actors.mcp_server import McpFailed, McpServer
from areal_bus.errors import ConfigError
from tests.actors import mcp_servers
from tests.actors.test_agents import called, settings
from tests.support.polling import is_alive, wait_until
from tests.support.talking import talking


@pytest.fixture
def command(tmp_path: Path) -> str:
    return shlex.join([sys.executable, str(Path(mcp_servers.__file__)), str(tmp_path / "pids")])


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text(encoding="utf-8").split()]


def test_a_server_lists_its_tools_answers_calls_and_is_killed_with_its_group(command: str, tmp_path: Path) -> None:
    server = McpServer(command)
    tools = server.tools()
    assert [tool["function"]["name"] for tool in tools] == list(mcp_servers.NAMES)
    assert tools[0]["function"]["parameters"] == mcp_servers.SCHEMA
    assert server.call("count", {}) == ("call 1", True)
    assert server.call("raises", {}) == ("call 2", False)
    with pytest.raises(ValueError, match="not JSON compliant"):
        server.call("count", {"n": float("nan")})
    assert server.call("count", {}) == ("call 3", True)
    assert len(pids(tmp_path)) == 2
    assert all(map(is_alive, pids(tmp_path)))
    server.close()
    wait_until(lambda: not any(map(is_alive, pids(tmp_path))), "server and child are dead")


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("dies", "failed in tools/call: it has ended; it wrote 'out of paper'"),
        ("hangs", "failed in tools/call: timed out"),
        ("floods", "an answer is over 4 MiB"),
        ("babbles", "an answer is over 4 MiB"),
    ],
)
def test_a_server_that_fails_is_killed_and_the_fault_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, why: str
) -> None:
    server = McpServer(command)
    if tool == "hangs":
        monkeypatch.setattr(mcp_server, "CALL_S", 0.2)
    with pytest.raises(McpFailed, match=why):
        server.call(tool, {})
    wait_until(lambda: not any(map(is_alive, pids(tmp_path))), "server and child are dead")


def says(*answers: dict[str, Any]) -> str:
    """The command of a server that writes these answers, reads nothing and stays."""
    lines = "".join(f"{json.dumps({'id': n} | one)}\n" for n, one in enumerate(answers, 1))
    return shlex.join(["sh", "-c", f"printf %s {shlex.quote(lines)}; exec sleep 1000"])


GREETING: dict[str, Any] = {"result": {}}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "does not start"),
        ("/nothing/there", "does not start"),
        ('"', "does not start"),
        ("echo hello", "failed in initialize: it has ended"),
        ("true", "failed in initialize: it has ended"),
        (says({"error": {"message": "too old"}}), "failed in initialize: too old"),
        (says(GREETING, {"error": {"message": "not now"}}), "failed in tools/list: not now"),
        (says(GREETING, {"result": {"tools": [{"name": "x"}]}}), "lists no tools: KeyError: 'inputSchema'"),
    ],
)
def test_a_command_that_is_no_server_is_a_config_error(bad: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"workflow\.arguments\.mcp: the MCP server .* {why}"):
        tools_of(bad)


def test_a_server_that_reads_nothing_is_late_also_for_a_long_call(monkeypatch: pytest.MonkeyPatch) -> None:
    server = McpServer(says(GREETING))
    monkeypatch.setattr(mcp_server, "CALL_S", 0.2)
    with pytest.raises(McpFailed, match="timed out"):
        server.call("any", {"text": "x" * (1 << 20)})


def test_an_episode_has_servers_of_its_own_and_the_model_reads_what_failed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")  # not the episode's
    config = settings("tools", reward_fn="exact", tools="calculator", mcp=command, max_turns=4)
    row = {"question": "1+2", "answer": "3"}
    with talking(tmp_path, config) as talk:
        answers = [f"{called(name, '{}')}<eos>" for name in ("count", "dies", "key")]
        found = talk.hold(row, [*answers, "3<eos>"])
        again = talk.hold(row, [answers[0], "3<eos>"])
        told = [m["content"] for one in (found, again) for m in one["messages"] if m["role"] == "tool"]
        wait_until(lambda: not any(map(is_alive, pids(tmp_path))), "they end while the agent's process lives")
    assert [told[0], *told[2:]] == ["call 1", "of the user", "call 1"]  # each server began to count
    assert told[1].startswith("error: ")
    assert "it has ended" in told[1]
    assert found["parts"] == {"n_tool_calls": 3, "n_failed_calls": 1}
    assert len(pids(tmp_path)) == 2 * 4  # one to list the tools, two of the first episode, one of the second


REAL = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("real")

@server.tool()
def add(a: int, b: int) -> str:
    "The sum."
    return str(a + b)

server.run()
"""


def test_a_server_of_the_package_mcp_is_used(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server.fastmcp", reason="the package mcp is not installed")
    (tmp_path / "real.py").write_text(REAL, encoding="utf-8")
    server = McpServer(shlex.join([sys.executable, "real.py"]), str(tmp_path))
    try:
        (tool,) = server.tools()
        properties: dict[str, Any] = tool["function"]["parameters"]["properties"]
        assert (tool["function"]["name"], sorted(properties)) == ("add", ["a", "b"])
        assert server.call("add", {"a": 1, "b": 2}) == ("3", True)
        assert not server.call("add", {"a": "x"})[1]
    finally:
        server.close()
