"""An OpenEnv server as an environment: an episode is a session over its WebSocket (`pip install openenv-core`).

areal-bus run examples/environments/openenv.toml -np 4
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from aiohttp import ClientSession, ClientWebSocketResponse

TURNS = 2


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The sum of the environment's rewards. Its observation is the question, the answer its action."""
    messages, total = list[dict[str, Any]](), 0.0
    headers = {"Authorization": f"Bearer {api_key}"}
    async with ClientSession() as http, http.ws_connect(f"{SERVER}/ws") as session:
        result = await exchange(session, "reset", {"seed": row["seed"]})
        while not result["done"] and len(messages) < 2 * TURNS:
            messages.append({"role": "user", "content": result["observation"]["text"]})
            body = {"model": "any", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply:
                messages.append((await reply.json())["choices"][0]["message"])
            result = await exchange(session, "step", {"text": messages[-1]["content"]})
            total += result["reward"] or 0.0
        await session.send_json({"type": "close"})
    return total


async def exchange(session: ClientWebSocketResponse, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send "reset" or "step". Returns observation, reward and done; raises RuntimeError for an error of the server."""
    await session.send_json({"type": kind, "data": data})
    reply = await session.receive_json()
    if reply["type"] == "error":
        raise RuntimeError(f"{kind} refused by the OpenEnv server: {reply['data']}")
    return dict(reply["data"])


def start() -> str:
    """The URL of a server of this process, which is killed with it: also when an episode exceeds its time."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url, number = f"http://127.0.0.1:{listening.getsockname()[1]}", str(listening.fileno())
        command = [sys.executable, "-m", "uvicorn", "openenv_echo:app", "--fd", number, "--log-level", "warning"]
        subprocess.Popen(command, cwd=Path(__file__).parent, pass_fds=[listening.fileno()])
    urlopen(f"{url}/health").close()  # the server listens already, and answers once it has loaded
    return url


SERVER = os.environ.get("OPENENV_URL") or start()
