"""An agent as one writes it for any OpenAI endpoint: it asks for a word written backwards, and once more if need be.

It is trained by configs/agent.toml. With the package `openai`, `OpenAI().chat.completions.create(...)` does what `ask`
does here: the environment says where the endpoint is.
"""

import json
import urllib.request
from typing import Any


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def solve(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """The reward: 1 for the first try, 0.6 for the second, and up to 0.3 for letters in their places."""
    question, gold = row["question"], row["answer"]
    messages = [{"role": "user", "content": question}]
    for worth in (1.0, 0.6):
        answer = ask(base_url, api_key, messages)
        given = answer["content"].strip()
        if given == gold:
            return {"reward": worth, "correct": True}
        messages += [answer, {"role": "user", "content": question}]
    n_right = sum(a == b for a, b in zip(gold, given, strict=False))
    return {"reward": 0.3 * n_right / max(len(gold), len(given)), "correct": False}
