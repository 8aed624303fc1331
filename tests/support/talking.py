"""Conversations of an agent or environment in its process, with completions that the test writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.engines.protocol import Completion
from actors.models.loading import load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.workflows.episode_runner import Asked, EpisodeRun
from actors.workflows.loading import close_workflow, load_workflow
from actors.workflows.protocol import Workflow
from areal_bus.config.loader import resolve
from areal_bus.config.sections import Config, ScratchConfig
from tests.support.polling import wait_until

WAIT_S = 300.0  # an environment of verifiers imports much, on a loaded machine
LETTERS = "".join(map(chr, range(32, 127)))
TOOLS = (
    "{% for t in tools or [] %}{{ 'tool ' + t['function']['name'] + ';' }}{% endfor %}{% for m in messages %}"
    "{{ m['role'] + '>' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + c['function'] | tojson + '</tool_call>' }}{% endfor %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant>{% endif %}"
)  # a template with tools
SHAPE: dict[str, Any] = {"characters": LETTERS, "hidden_size": 32, "layers": 1, "heads": 4}


def agent_config(function: str, *, data: Any = None, agent: dict[str, Any] | None = None, **arguments: Any) -> Config:
    """Of a conversation `workflow.function` with these `workflow.arguments`, in one worker process."""
    workflow = {"function": function, "arguments": arguments}
    workflow["agent"] = {"chat_template": TOOLS, "workers": 1, **(agent or {})}
    tree = {"model": {"scratch": SHAPE}, "workflow": workflow} | ({} if data is None else {"data": data})
    return resolve(tree, "mine.toml", (), {})


class Talk:
    """Conversations of one environment; the completions are written here."""

    def __init__(self, folder: Path, workflow: Workflow) -> None:
        write_scratch_folder(folder / "model", ScratchConfig(**SHAPE))
        self.tokenizer = load_tokenizer(str(folder / "model"))
        self._workflow = workflow
        self.run: EpisodeRun

    def hold(self, row: dict[str, Any], says: Sequence[str]) -> dict[str, Any]:
        """The fields that the environment returned. The last version of its tokens is their number of the call."""
        self.run = EpisodeRun(self._workflow, row, self.tokenizer)
        answers = enumerate(says)
        wish = self.run.start()
        while wish is not None:
            if isinstance(wish, Asked):
                version, text = next(answers)
                ids = self.tokenizer(text)["input_ids"]
                wish = self.run.answer(
                    Completion(("", 0, 0, 0, 0), ids, [-1.0] * len(ids), [[version, len(ids)]], "stop")
                )
            else:
                wait_until(wish.ready, "the agent calls again or ends", WAIT_S)
                wish = self.run.go_on()
        assert self.run.episode is not None
        found: dict[str, Any] = self.run.episode.row["agent"]
        return found

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.run.ids))


@contextmanager
def talking(folder: Path, config: Config) -> Iterator[Talk]:
    workflow = load_workflow(config)
    try:
        yield Talk(folder, workflow)
    finally:
        close_workflow(workflow)
