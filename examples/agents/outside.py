"""An agent outside the job (docs/agents.md): it opens episodes with a URL and a key until the job has ended.

areal-bus run examples/agents/openai-agents.toml -np 4 --set workflow.agent.function=external
python examples/agents/outside.py RUN/agents.json openai_agents_sdk
"""

import asyncio
import importlib
import inspect
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S, QUIET_S = 900.0, 60.0  # without a generator that listens: before the first episode, and after it


def post(url: str, key: str, body: Any = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body or {}).encode(), headers)) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def episode_of(base_url: str, key: str, patience_s: float) -> dict[str, Any] | None:
    """An episode that waits for an agent; None when no generator has listened for so long."""
    last = time.monotonic()
    while time.monotonic() < last + patience_s:
        try:
            return post(f"{base_url}/episodes", key)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            last = time.monotonic()
        except OSError:
            time.sleep(0.5)
    return None


def main(access_file: str, module: str) -> None:
    access, solve = json.loads(Path(access_file).read_text(encoding="utf-8")), importlib.import_module(module).solve
    n_episodes = 0
    while episode := episode_of(access["base_url"], access["key"], QUIET_S if n_episodes else START_S):
        try:
            result = solve(episode["row"], episode["base_url"], episode["api_key"])
            result = asyncio.run(result) if inspect.iscoroutine(result) else result
        except Exception as error:  # noqa: BLE001  the group is refunded
            result = {"error": repr(error)}
        try:
            post(f"{episode['base_url']}/episodes/close", episode["api_key"], result)
            n_episodes += 1
        except OSError as error:  # the generator has ended, or the deadline has passed: the episode is another agent's
            print(f"{episode['id']} was not closed: {error}", file=sys.stderr)
    print(f"{n_episodes} episodes")


if __name__ == "__main__":
    main(*sys.argv[1:])
