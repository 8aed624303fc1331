"""Agents for the tests of the endpoint: plain functions, each run in a process by the generator under test."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 60.0


def post(base_url: str, key: str, body: Any, *, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    """Status, and the answer's JSON or text. `body`: an object, or bytes as they are."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=WAIT_S)
    data = body if isinstance(body, bytes) else json.dumps({"model": "any", **body}).encode()
    connection.request("POST", url.path + path, data, {"Authorization": f"Bearer {key}", **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text


def get(base_url: str, key: str, path: str) -> tuple[int, Any]:
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=WAIT_S)
    connection.request("GET", url.path + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    answer = connection.getresponse()
    record = json.loads(answer.read())
    connection.close()
    return answer.status, record


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def once(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """One call, and what it brought."""
    status, answer = post(base_url, api_key, {"messages": [user(row["question"])], **row.get("fields", {})})
    return {"status": status, "answer": answer, "key": api_key, "pid": os.getpid()}


def proxied(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """By a client that follows the environment's proxies."""
    request = urllib.request.Request(f"{base_url}/models", headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request) as answer:
        models = json.load(answer)
    return once(row, base_url, api_key) | {"models": models}


def talk(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Two calls; the second when the file `go` is there."""
    messages = [user(row["question"])]
    _, first = post(base_url, api_key, {"messages": messages, "logprobs": True})
    wait_for(row["go"])
    messages += [first["choices"][0]["message"], user("and then")]
    _, second = post(base_url, api_key, {"messages": messages, "max_tokens": 5})
    return {"first": first, "second": second, "url": os.environ["OPENAI_BASE_URL"], "key": os.environ["OPENAI_API_KEY"]}


def wait_for(path: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def chooses(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Three answers to one call, and a call that goes on from the second of them."""
    messages = [user("one")]
    _, first = post(base_url, api_key, {"messages": messages, "n": 3, "stream": row.get("stream", False)})
    messages += [first["choices"][1]["message"], user("two")]
    status, second = post(base_url, api_key, {"messages": messages})
    return {"first": first, "status": status, "second": second}


def by_client(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """The package openai: a stream, its chunks put together, with a tool; then the models."""
    from openai import OpenAI  # an optional package

    client = OpenAI(base_url=base_url, api_key=api_key)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages: Any = [user(row["question"])]
    with client.chat.completions.stream(
        model="any", messages=messages, tools=tools, stream_options={"include_usage": True}, seed=1
    ) as stream:
        events = [event.type for event in stream]
        first = stream.get_final_completion()
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "3"}]
    second = client.chat.completions.create(model="any", messages=messages, tools=tools, logprobs=True)
    ids = [client.models.list().data[0].id, client.models.retrieve("any").id]
    return {"events": events, "first": first.to_dict(), "second": second.to_dict(), "ids": ids}


async def reward_later(row: Any, base_url: str, api_key: str) -> float:
    once(row, base_url, api_key)
    await asyncio.sleep(0)
    return 0.25


def stranger(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """What those without a key, or with nonsense, are told; then one call as it should be."""
    hello = {"messages": [user("hello")]}
    said = {
        "no key": get(base_url, "", "/models"),
        "wrong key": post(base_url, api_key[:-1], hello),
        "models": get(base_url, api_key, "/models"),
        "no such thing": post(base_url, api_key, hello, path="/embeddings"),
        "not to get": get(base_url, api_key, "/chat/completions"),
        "no json": post(base_url, api_key, b"{"),
        "too long": post(base_url, api_key, b"x" * (3 << 20)),
        "no length": post(base_url, api_key, b"", **{"Content-Length": "many"}),
        "temperature": post(base_url, api_key, {**hello, "temperature": 0.2}),
        "top_p": post(base_url, api_key, {**hello, "top_p": 0.2}),
        "least": post(base_url, api_key, {**hello, "min_tokens": 1000}),
        "min_p": post(base_url, api_key, {**hello, "min_p": 3}),
        "tools": post(base_url, api_key, {**hello, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        "over the model": post(base_url, api_key, {"messages": [user("x" * 1000)]}),
        "well": post(base_url, api_key, hello),
        "again": post(base_url, api_key, hello),
    }
    return {"said": said}


def at_once(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Two calls at the same time; the file `answered` is there once one of them has come back."""
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(post(base_url, api_key, {"messages": [user("hello")]})[0])
        Path(row["answered"]).touch()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"statuses": statuses}


def hangs_up(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Goes away before the answer, and asks the same once more."""
    url, body = urlsplit(base_url), json.dumps({"model": "any", "messages": [user("hello")]}).encode()
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: me\r\nAuthorization: Bearer {api_key}"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(row["go"])  # the call is with the model by then
    Path(row["gone"]).touch()
    status, answer = post(base_url, api_key, body)
    _, once_more = post(base_url, api_key, body, **{"x-stainless-retry-count": "1"})
    return {"status": status, "answer": answer, "once_more": once_more}


LEAKED: list[http.client.HTTPConnection] = []  # of a process, over all its conversations


def leaks(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Opens connections that it never closes, and then asks."""
    url = urlsplit(base_url)
    for _ in range(10):
        LEAKED.append(http.client.HTTPConnection(url.hostname or "", url.port, timeout=WAIT_S))
        LEAKED[-1].request("GET", f"{url.path}/models", headers={"Authorization": f"Bearer {api_key}"})
        LEAKED[-1].getresponse().read()
    return once(row, base_url, api_key)


def rates_turns(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Two calls of a conversation, and the rewards of turns that the row has."""
    messages = [user("one")]
    for text in ("two", "three"):
        _, answer = post(base_url, api_key, {"messages": messages})
        messages += [answer["choices"][0]["message"], user(text)]
    return {"reward": 1.0, "turn_rewards": row["turn_rewards"]}


def rewrites(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Three calls that have nothing to do with each other."""
    return {"statuses": [post(base_url, api_key, {"messages": [user(text)]})[0] for text in ("one", "two", "three")]}


def delegates(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """A call, one of a sub-agent, one that goes on from the first, and one whose history is half forgotten."""

    def ask(messages: list[Any]) -> list[Any]:
        _, answer = post(base_url, api_key, {"messages": messages})
        return [*messages, answer["choices"][0]["message"]]

    first = ask([user("one")])
    ask([{"role": "system", "content": "sub"}, user("two")])
    third = ask([*first, user("three")])
    return {"last": ask([*third[2:], user("four")])}


def outgrows(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """A call, one that begins anew and is longer than the model holds, and one that goes on from the first."""
    messages: list[Any] = [user("one")]
    _, first = post(base_url, api_key, {"messages": messages})
    status, _ = post(base_url, api_key, {"messages": [user("x" * 1000)]})
    messages += [first["choices"][0]["message"], user("and then")]
    return {"statuses": [status, post(base_url, api_key, {"messages": messages})[0]]}


def hangs(row: Any, base_url: str, api_key: str) -> None:
    """With a child in a session of its own; says who they are."""
    once(row, base_url, api_key)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(row["pids"]).write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
    child.wait()


def interrupt() -> None:
    raise KeyboardInterrupt("by the user's code")


def fails(row: Any, base_url: str, api_key: str) -> Any:
    """In the way that the row says."""
    if row["how"] != "no call":
        once(row, base_url, api_key)
    ways: dict[str, Any] = {
        "raises": lambda: 1 / 0,
        "exits": lambda: os._exit(3),
        "leaves": lambda: exit(0),
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "is interrupted": interrupt,
        "no json": lambda: {"a": {1, 2}},
        "no number": lambda: float("nan"),
        "half a character": lambda: {"a": "\ud800"},
        "long": lambda: {"a": "x" * (1 << 20)},
        "text": lambda: "well",
        "no call": lambda: None,
    }
    return ways[row["how"]]()


def uses_tools(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Asks with a tool, runs what the model calls, and asks again."""
    messages: list[Any] = [user(row["question"])]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    _, first = post(base_url, api_key, {"messages": messages, "tools": tools, "tool_choice": "auto"})
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    total = sum(json.loads(call["function"]["arguments"]).values())
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": str(total)}]
    _, second = post(base_url, api_key, {"messages": messages, "tools": tools})
    return {"first": first, "second": second}


if os.environ.get("AREAL_BUS_TEST_DIES"):
    os.kill(os.getpid(), signal.SIGKILL)


def too_few(row: Any) -> None: ...
