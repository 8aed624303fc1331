"""An OpenEnv server for the example: it shows a letter, and rewards the answer that repeats it.

uvicorn openenv_echo:app --host 127.0.0.1 --port 8000
"""

import random
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    text: str


class Shown(Observation):
    text: str


class Echo(Environment):
    """One letter a step, two steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self._letters = "ab"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Shown:
        self._letters = "".join(random.Random(seed).choices("abcd", k=2))
        self._state = State(episode_id=episode_id, step_count=0)
        return Shown(text=self._letters[0], done=False, reward=None)

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Shown:
        at = self._state.step_count
        self._state.step_count += 1
        right, is_done = action.text.strip() == self._letters[at], at + 1 == len(self._letters)
        return Shown(text=self._letters[-1], done=is_done, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Echo, Said, Shown, max_concurrent_envs=64)
