"""Tools of an MCP server over stdio: JSON-RPC, a line each, with deadlines and limits on what is read.

Model Context Protocol (modelcontextprotocol.io/specification/2025-06-18): initialize, tools/list, tools/call. The
server is a process group, which `close` kills.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from typing import Any

from areal_bus.foreign_text import text_of

PROTOCOL = "2025-06-18"
START_S = 60.0  # from the start of the process to its list of tools
CALL_S = 30.0
LOOK_S = 1.0  # interval of looks at the process
ANSWER_BYTES = 4 << 20  # read until a request is answered
READ_BYTES = 64 << 10
KEPT_BYTES = 500  # of its standard error, for error texts
MOST_PAGES = 100  # of a list of tools
NO_METHOD = -32601  # JSON-RPC: method not found


class McpFailed(Exception):
    """The server has ended, is late or breaks the protocol: it is killed."""


class McpServer:
    """A server that has started; requests are made one after the other."""

    def __init__(self, command: str, folder: str = "") -> None:
        """`command`: as in a shell, without one; `folder`: where it runs, "" for here. Raises McpFailed."""
        self._command, self._n, self._text, self._errors = command, 0, b"", b""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                cwd=folder or None,
                bufsize=0,
                start_new_session=True,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
            )
        except (OSError, ValueError, IndexError) as error:
            raise McpFailed(f"the MCP server {command!r} does not start: {error}") from None
        client = {"name": "areal-bus", "version": "1"}
        about = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        self._deadline = time.monotonic() + START_S
        self._request("initialize", about)
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """Its tools in OpenAI's form. Raises McpFailed."""
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            answer = self._request("tools/list", page)
            found += answer["tools"]
            if not answer.get("nextCursor"):
                break
            page = {"cursor": answer["nextCursor"]}
        pairs = [(tool, {"name": tool["name"], "description": tool.get("description") or ""}) for tool in found]
        return [
            {"type": "function", "function": fields | {"parameters": tool["inputSchema"]}} for tool, fields in pairs
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The result as text, and whether the tool succeeded. Raises McpFailed."""
        self._deadline = time.monotonic() + CALL_S
        answer = self._request("tools/call", {"name": name, "arguments": arguments})
        parts = [part.get("text", f"[{part.get('type')}]") for part in answer.get("content", [])]
        return "\n".join(parts), not answer.get("isError", False)

    def close(self) -> None:
        """Kill it with all that it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _request(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The result; an error of the request is one of its tool. Raises McpFailed, with the server killed."""
        self._n += 1
        try:
            self._send({"id": self._n, "method": method, "params": parameters})
            left = ANSWER_BYTES
            while True:
                line = self._line(left)
                left -= len(line) + 1
                answer = json.loads(line)
                if answer.get("id") == self._n and "method" not in answer:
                    break
                if "id" in answer and "method" in answer:
                    self._send({"id": answer["id"]} | answer_to(answer["method"]))
            if "error" in answer:
                text = str(answer["error"]["message"])
                return {"content": [{"type": "text", "text": text}], "isError": True, "tools": []}
            found: dict[str, Any] = answer["result"]
            return found
        except (McpFailed, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.close()
            why = str(error) if isinstance(error, McpFailed) else f"{type(error).__name__}: {text_of(error)}"
            told = self._errors.decode(errors="replace").strip()
            wrote = f"; it wrote {told!r}" if told else ""
            raise McpFailed(f"the MCP server {self._command!r} failed in {method}: {why}{wrote}") from None

    def _send(self, record: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **record}).encode() + b"\n")

    def _line(self, most: int) -> bytes:
        """The next line of its output, of at most so many bytes; standard error is read beside it."""
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None
        assert errors is not None
        poll = select.poll()
        for pipe in (out, errors):
            poll.register(pipe, select.POLLIN)
        while b"\n" not in self._text:
            if len(self._text) > most:
                raise McpFailed(f"an answer is over {ANSWER_BYTES >> 20} MiB")
            left_s = self._deadline - time.monotonic()
            ready = [number for number, _ in poll.poll(1000 * min(max(left_s, 0.0), LOOK_S))]
            if not ready and self._process.poll() is not None:  # a child of it may keep the pipes open
                raise McpFailed("it has ended")
            if left_s <= 0:
                raise McpFailed("timed out")
            if errors.fileno() in ready:
                told = os.read(errors.fileno(), READ_BYTES)
                self._errors = (self._errors + told)[-KEPT_BYTES:]
                if not told:
                    poll.unregister(errors)
            if out.fileno() in ready:
                read = os.read(out.fileno(), READ_BYTES)
                if not read:
                    raise McpFailed("it has ended")
                self._text += read
        line, _, self._text = self._text.partition(b"\n")
        return line


def answer_to(method: str) -> dict[str, Any]:
    """The answer to a request of the server."""
    return {"result": {}} if method == "ping" else {"error": {"code": NO_METHOD, "message": f"no method {method}"}}
