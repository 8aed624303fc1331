"""A ToolCallingAgent of smolagents (`pip install "smolagents[openai]"`) is trained.

It writes its own calls into the history in other words, so each step is a trajectory (`rewritten = "new_trajectory"`).

    areal-bus run examples/agents/smolagents.toml -np 4
"""

from collections.abc import Mapping
from typing import Any

from bank import Bank
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


class Send(Tool):  # type: ignore[misc]
    name, description, output_type = "send", "Send n coins to somebody.", "string"
    inputs = {"n": {"type": "integer", "description": "coins"}, "to": {"type": "string", "description": "name"}}  # noqa: RUF012

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, n: int, to: str) -> str:
        return self.bank.send(n, to)


def solve(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    bank = Bank()
    agent = ToolCallingAgent(
        tools=[Send(bank)],
        model=OpenAIModel("any", api_base=base_url, api_key=api_key),
        prompt_templates=EMPTY_PROMPT_TEMPLATES | {"system_prompt": "bank"},  # a small model's context is short
        max_steps=1,
        verbosity_level=0,
    )
    agent.run(row["question"])
    return bank.score(row)
