"""The generator's side of the bench `push`: an engine that decodes while a side thread receives weights."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from actors.generator.weight_updates import BrokenPush, WeightUpdates
from actors.models.loading import empty_model
from actors.runtime.process import leave
from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import join_store
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.snapshot import forms_of
from benchmarks.harness.worker_main import serve

ADDRESS, INTERFACE = "127.0.0.1", "lo"
WAIT_S = 60.0
SLOTS, N_SAMPLES, N_NEW = 32, 8, 8  # as in the demo
IDLE_S = 0.001


class PushGenerator:
    """A generator without the bus: it swaps in received weights between two decode steps."""

    def __init__(self, model: str, dtype: str, endpoint: str, name: str, prompts: list[list[int]]) -> None:
        self._name, self._endpoint, self._prompts = name, endpoint, prompts
        self._store = join_store(endpoint, WAIT_S)
        self._engine = BuiltinEngine(
            empty_model(model, dtype, "cpu"), EngineOptions(n_slots=SLOTS), stop_ids=frozenset()
        )
        self._receiving = WeightUpdates(self._member, forms_of(self._engine.parameters()), lambda: None)
        self._n_asked = 0
        self._swap_s = 0.0

    def _member(self) -> WeightReceiver:
        return WeightReceiver(self._name, address=ADDRESS, interface=INTERFACE)

    def receive(self, number: int, version: int) -> float:
        """One push while nothing is decoded; seconds that the swap took."""
        self._begin(number, version)
        while not self._swapped(version):
            time.sleep(IDLE_S)
        self._store.wait([f"over/{number}"])
        return self._swap_s

    def decode(self, number: int, version: int | None) -> dict[str, Any]:
        """Decode until the learner's step is over; meanwhile the push of `version`, if one is named."""
        for _ in range(2):  # start before the measurement
            self._step()
        self._store.set(f"decodes/{number}", "")
        if version is not None:
            self._begin(number, version)
        steps, after, began, tokens = [], 0.0, time.monotonic(), self._engine.n_tokens
        while version is not None or not self._store.check([f"over/{number}"]):
            swapped = version is not None and self._swapped(version)
            version = None if swapped else version
            took = self._step()
            if swapped:
                after = took
            else:
                steps.append(took)
        rate = (self._engine.n_tokens - tokens) / (time.monotonic() - began)
        usual = median(steps) if steps else after
        return {"tokens_per_s": rate, "step_s": usual, "swap_s": self._swap_s, "after_s": after}

    def _begin(self, number: int, version: int) -> None:
        self._receiving.begin(PushBegin(number, version, 0, [self._name], self._endpoint, WAIT_S))

    def _swapped(self, version: int) -> bool:
        """As the generator's loop does it."""
        outcome = self._receiving.take()
        if outcome is None:
            return False
        if isinstance(outcome, BrokenPush):
            raise RuntimeError(f"every push must arrive: {outcome.error}")
        began = time.monotonic()
        self._receiving.swapped(outcome, self._engine.update(version, outcome.tensors))
        self._swap_s = time.monotonic() - began
        return True

    def _step(self) -> float:
        """One decode step with every slot taken."""
        while self._engine.n_live < SLOTS:
            prompt = self._prompts[self._n_asked // N_SAMPLES % len(self._prompts)]
            n_new = 2 + self._n_asked % (N_NEW - 1)
            key = ("", self._n_asked, 0, 0, 0)
            self._engine.submit(Request(key, prompt, (self._n_asked,), n_new, 1.0, 1.0))
            self._n_asked += 1
        began = time.monotonic()
        self._engine.step()
        return time.monotonic() - began


opened: list[PushGenerator] = []  # one a process


def open_generator(model: str, dtype: str, endpoint: str, name: str, prompts: list[list[int]]) -> None:
    opened[:] = [PushGenerator(model, dtype, endpoint, name, prompts)]


def receive(number: int, version: int) -> float:
    return opened[0].receive(number, version)


def decode(number: int, version: int | None) -> dict[str, Any]:
    return opened[0].decode(number, version)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"open": open_generator, "receive": receive, "decode": decode}
torch.set_num_threads(1)

if __name__ == "__main__":
    serve(FUNCTIONS)
    leave(0)
