"""The model as a built-in agent calls it: one request to the endpoint for each answer."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
TOO_LONG = "context_length_exceeded"  # code of a refusal


class ConversationFull(Exception):
    """The conversation is as long as it may be: it ends with the answer before."""


class EndpointRefused(Exception):
    """The endpoint refused a call; the text has the reason."""


class EndpointModel:
    """Answers of one conversation."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def answer(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Message:
        """The assistant's message. Raises ConversationFull, EndpointRefused."""
        body = {"model": "any", "messages": list(messages), "tools": list(tools) or None}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request) as response:
                message: Message = json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            refusal = json.load(error)["error"]
            raise (ConversationFull if refusal["code"] == TOO_LONG else EndpointRefused)(refusal["message"]) from None
        return message | {"content": message["content"] or ""}
