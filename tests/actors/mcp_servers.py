"""An MCP server by the standard library, whose tools fail as their names say: `python mcp_servers.py PIDS`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NAMES = ("count", "raises", "key", "dies", "hangs", "floods", "babbles")


def answer(record: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **record}), flush=True)


def result(name: str, n: int) -> dict[str, Any]:
    if name == "dies":
        print("out of paper", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hangs":
        time.sleep(1000)
    while name == "floods":
        sys.stdout.write("x" * (1 << 20))
    while name == "babbles":
        answer({"method": "notifications/message", "params": {"data": "x" * 1000}})
    text = os.environ.get("OPENAI_API_KEY", "none") if name == "key" else f"call {n}"
    return {"content": [{"type": "text", "text": text}], "isError": name == "raises"}


def main(pids: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    with Path(pids).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    print("Welcome!")
    print("[" * 100_000)
    n_calls = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("method") == "initialize":
            answer({"id": "mine", "method": "ping"})
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
            answer({"id": asked["id"], "result": {"protocolVersion": "2025-06-18", **about}})
        elif asked.get("method") == "tools/list":
            half = NAMES[3:] if asked["params"].get("cursor") else NAMES[:3]
            tools = [{"name": name, "description": f"It {name}.", "inputSchema": SCHEMA} for name in half]
            answer(
                {"id": asked["id"], "result": {"tools": tools} | ({"nextCursor": "2"} if half[0] == NAMES[0] else {})}
            )
        elif asked.get("method") == "tools/call":
            n_calls += 1
            answer({"id": asked["id"], "result": result(asked["params"]["name"], n_calls)})


if __name__ == "__main__":
    main(sys.argv[1])
