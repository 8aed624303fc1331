"""An agent of the OpenAI Agents SDK (`pip install openai-agents`), as its documentation shows it, is trained.

areal-bus run examples/agents/openai-agents.toml -np 4
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from bank import Bank
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    bank = Bank()
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="any", openai_client=client)
        agent = Agent(name="bank", tools=[function_tool(bank.send)], model=model)
        with contextlib.suppress(AgentsException):  # a call that fits no tool, or too many turns
            await Runner.run(agent, row["question"], max_turns=2)
    return bank.score(row)
