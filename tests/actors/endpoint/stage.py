"""A generator's episodes of agents, without its bus: one engine, one workflow, turned by the test's thread."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.endpoint.external_agents import AgentAccess
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.generator.rollout_runner import Outcome, RolloutLog, RolloutRunner
from actors.learner.batching import Batch, build
from actors.models.loading import load_model, load_tokenizer, stop_ids
from actors.models.scratch import write_scratch_folder
from actors.runtime.user_failures import Prints
from actors.workflows.loading import load_workflow
from areal_bus.config.names.workflows import EXTERNAL
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.messages import Prompt, SampleFailed, ShardItem, Trajectory, recast
from areal_bus.storage.journal import Journal

WAIT_S = 60.0  # for anything to happen, on a loaded machine
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant>{% endif %}"
)
SCRATCH = ScratchConfig(hidden_size=32, layers=2, heads=4, max_positions=512)


class Stage:
    """One engine with the agents' workflow, turned by the test's thread."""

    def __init__(self, folder: Path, function: str, **agent: Any) -> None:
        """`agent`: fields of the section of that name that differ."""
        named = function if function == EXTERNAL else f"tests.actors.endpoint.endpoint_agents:{function}"
        names = {"function": named, "chat_template": TEMPLATE}
        self.config = Config.model_validate(
            {
                "data": {"task": "reverse"},
                "workflow": {"function": "agent", "agent": names | agent},
                "gconfig": {"n_samples": 2, "max_new_tokens": 10},
            }
        )
        self.folder = folder
        write_scratch_folder(folder / "model", SCRATCH)
        self.tokenizer = load_tokenizer(str(folder / "model"))
        model = self.model(0)
        self.engine = BuiltinEngine(
            model,
            EngineOptions(n_slots=4),
            stop_ids=stop_ids(model, self.tokenizer),
            tokenizer=self.tokenizer,
            version=0,
        )
        self._news = threading.Event()
        prints = None
        if function == EXTERNAL:
            AgentAccess.make(folder)
            prints = Prints(folder / "logs", "generator-0.0", "agents")
        self.workflow = load_workflow(self.config, wake=self._news.set, prints=prints)
        self.journal = Journal(folder / "journal", role="generator", index=0, incarnation=0)
        self.sampling = RolloutRunner(
            self.engine, self.workflow, self.tokenizer, self.config, RolloutLog("generator", self.journal)
        )
        self.outcomes: list[Outcome] = []

    def model(self, seed: int) -> Any:
        return load_model(str(self.folder / "model"), "float32", "cpu", random_seed=seed)

    def begin(self, uid: int = 0, *, samples: tuple[int, ...] = (0,), **row: Any) -> None:
        text = json.dumps({"question": "abc", "go": str(self.folder), **row})
        self.outcomes.extend(self.sampling.begin(Prompt(uid, 0, 0, list(samples), "", text)))

    def turn(self) -> None:
        self._news.clear()
        self.outcomes.extend(self.sampling.go_on())
        if self.engine.n_live:
            self.outcomes.extend(self.sampling.step())
        elif self.sampling.n_live and self.sampling.is_idle:
            self._news.wait(0.05)

    def run_until(self, satisfied: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not satisfied():
            assert time.monotonic() < deadline
            self.turn()

    def run(self) -> list[Outcome]:
        """Until every sample has ended."""
        self.run_until(lambda: not self.sampling.n_live)
        return self.outcomes

    def trajectory(self) -> Trajectory:
        """Of the one sample there is."""
        (outcome,) = self.run()
        assert isinstance(outcome, Trajectory), outcome
        return outcome

    def hold(self, **row: Any) -> tuple[Trajectory, dict[str, Any]]:
        """One conversation: its trajectory, and the fields that the agent returned."""
        self.begin(**row)
        t = self.trajectory()
        return t, returned(t)

    def unsampled(self) -> SampleFailed:
        (outcome,) = self.run()
        assert isinstance(outcome, SampleFailed), outcome
        return outcome


def returned(trajectory: Trajectory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trajectory.row)["agent"]
    return found


def batch_of(t: Trajectory) -> Batch:
    """As a learner gets it."""
    shard = [recast(t, ShardItem, step=2, clock=2, group=0, n_groups=1, reward=1.0, correct=None)]
    return build(shard, step=2, clock=2, n_groups=1, eta=2)


MakeStage = Callable[..., Stage]
