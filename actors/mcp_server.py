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

from areal_bus.foreign_text import cut, described

PROTOCOL = "2025-06-18"
START_S = 60.0  # from the start of the process to its list of tools
CALL_S = 30.0
LOOK_S = 1.0  # interval of looks at the process
ANSWER_BYTES = 4 << 20  # read until a request is answered
READ_BYTES = 64 << 10
KEPT_BYTES = 500  # of its standard error, for error texts
MOST_PAGES = 100  # of a list of tools
CALL = "tools/call"
NO_METHOD = -32601  # JSON-RPC: method not found


class McpFailed(Exception):
    """The server has ended, is late or breaks the protocol: it is killed."""


class McpServer:
    """A server that has started; requests are made one after the other."""

    def __init__(self, command: str, folder: str = "") -> None:
        """`command`: as in a shell, without one; `folder`: where it runs, "" for here. Raises McpFailed."""
        self._command, self._n, self._text, self._errors = command, 0, b"", b""
        self._unsent, pipe = b"", subprocess.PIPE
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
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._deadline = time.monotonic() + START_S
        client = {"name": "areal-bus", "version": "1"}
        self._request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client})
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """Its tools in OpenAI's form. Raises McpFailed."""
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        try:
            for _ in range(MOST_PAGES):
                answer = self._request("tools/list", page)
                for tool in answer["tools"]:
                    about = {"name": tool["name"], "description": tool.get("description") or ""}
                    found.append({"type": "function", "function": about | {"parameters": tool["inputSchema"]}})
                if not answer.get("nextCursor"):
                    break
                page = {"cursor": answer["nextCursor"]}
        except (LookupError, TypeError, AttributeError) as error:
            raise McpFailed(f"the MCP server {self._command!r} lists no tools: {described(error)}") from None
        return found

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The result as text, and whether the tool succeeded. Raises McpFailed; ValueError for arguments not JSON."""
        self._deadline = time.monotonic() + CALL_S
        answer = self._request(CALL, {"name": name, "arguments": arguments})
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
        """The result; an error of a call is one of its tool. Raises McpFailed, with the server killed."""
        self._n += 1
        self._send({"id": self._n, "method": method, "params": parameters})
        try:
            answer = self._answer()
            if "error" not in answer:
                result: dict[str, Any] = answer["result"]
                return result
            text = str(answer["error"]["message"])
            if method == CALL:
                return {"content": [{"type": "text", "text": text}], "isError": True}
            raise McpFailed(cut(text))
        except (McpFailed, OSError, LookupError, TypeError) as error:
            self.close()
            why = str(error) if isinstance(error, McpFailed) else described(error)
            told = self._errors.decode(errors="replace").strip()
            wrote = f"; it wrote {told!r}" if told else ""
            raise McpFailed(f"the MCP server {self._command!r} failed in {method}: {why}{wrote}") from None

    def _answer(self) -> dict[str, Any]:
        """The answer to the last request. Notifications and lines that are no JSON are skipped."""
        left = ANSWER_BYTES
        while True:
            line = self._line(left)
            left -= len(line) + 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # many servers print a greeting
            if not isinstance(record, dict):
                continue
            if "method" not in record and record.get("id") == self._n:
                return record
            if "method" in record and "id" in record:
                unknown = {"error": {"code": NO_METHOD, "message": f"no method {record['method']}"}}
                self._send({"id": record["id"]} | ({"result": {}} if record["method"] == "ping" else unknown))

    def _send(self, record: dict[str, Any]) -> None:
        """Raises ValueError for a number that JSON does not have."""
        self._unsent += json.dumps({"jsonrpc": "2.0", **record}, allow_nan=False).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes; `_line` writes the rest, and finds that a server has ended."""
        assert self._process.stdin is not None
        try:
            self._unsent = self._unsent[self._process.stdin.write(self._unsent) or 0 :]
        except BrokenPipeError:
            self._unsent = b""

    def _line(self, most: int) -> bytes:
        """The next line of its output, of at most so many bytes; standard error is read beside it."""
        into, out, errors = self._process.stdin, self._process.stdout, self._process.stderr
        assert into is not None
        assert out is not None
        assert errors is not None
        sources = [out, errors]
        while b"\n" not in self._text:
            if len(self._text) > most:
                raise McpFailed(f"an answer is over {ANSWER_BYTES >> 20} MiB")
            left_s = self._deadline - time.monotonic()
            sinks = [into] if self._unsent else []
            ready, writable, _ = select.select(sources, sinks, [], min(max(left_s, 0.0), LOOK_S))
            if not ready and self._process.poll() is not None:  # a child of it may keep the pipes open
                raise McpFailed("it has ended")
            if left_s <= 0:
                raise McpFailed("timed out")
            if writable:
                self._write()
            if errors in ready:
                told = os.read(errors.fileno(), READ_BYTES)
                self._errors = (self._errors + told)[-KEPT_BYTES:]
                if not told:
                    sources.remove(errors)
            if out in ready:
                read = os.read(out.fileno(), READ_BYTES)
                if not read:
                    raise McpFailed("it has ended")
                self._text += read
        line, _, self._text = self._text.partition(b"\n")
        return line
