"""The chat client that an environment gets: its calls go to the endpoint of this generator."""

from typing import Any

import httpx
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


class EndpointClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """The package's own client, but an empty answer is an answer: the policy sampled it, and it is trained."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing: the endpoint's responses are complete, and the package would refuse empty ones."""

    async def from_native_response(self, response: Any) -> Any:
        read = await super().from_native_response(response)
        if read.message.content is None and not read.message.tool_calls:
            read.message.content = ""
        return read


def connect(base_url: str, api_key: str) -> EndpointClient:
    """A client without time limits: the pool counts only the environment's own time."""
    transport = httpx.AsyncClient(verify=False, trust_env=False, timeout=None)  # HTTP on 127.0.0.1
    return EndpointClient(AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=transport))
