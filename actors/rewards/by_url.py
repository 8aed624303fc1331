"""The reward "url": your server answers samples with rewards (docs/judge.md); also code for a sandbox server."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.data.fields import MESSAGES, REPLACED, UNREAD
from actors.rewards.binding.values import read_value
from actors.rewards.judge import TEXT, JudgeOfProcess, JudgeOptions, JudgeReply, check_key
from actors.rewards.protocol import Score
from actors.rewards.sandbox import Outcome, SandboxLimits

INTERNAL = (MESSAGES, REPLACED, UNREAD)  # fields that loading adds to a row
RUN_CODE = "/run_code"  # of a sandbox server, below its URL

_options: JudgeOptions | None = None
_servers: dict[str, JudgeOfProcess] = {}  # by the path below the URL, made by the first score


def configure(options: JudgeOptions) -> None:
    """Set the URL and the limits of this process. Raises ConfigError for a missing key."""
    global _options
    check_key(options)
    _options = options
    _servers.clear()


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """The server's reward of one sample. Raises for an answer that has none: never a 0."""
    return post([{"prompt": prompt, "completion": completion, "row": sent(row)}])[0]


def group_score(
    prompt: str, completions: Sequence[str], row: Mapping[str, Any], rewards: Sequence[float], correct: Sequence[Any]
) -> list[Score]:
    """`reward.group = "url"`: all samples of a prompt in one POST."""
    shared = {"prompt": prompt, "row": sent(row)}
    given = zip(completions, rewards, correct, strict=True)
    return post([{**shared, "completion": text, "reward": one, "correct": right} for text, one, right in given])


def sent(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in INTERNAL}


def post(samples: list[dict[str, Any]]) -> list[Score]:
    return server("").asked({"samples": samples}, lambda reply: rewards_in(reply, len(samples)))


def server(path: str) -> JudgeOfProcess:
    if _options is None:
        raise RuntimeError("the reward by URL must be configured: it has no URL")
    if path not in _servers:
        url = f"{_options.url.rstrip('/')}{path}" if path else _options.url
        _servers[path] = JudgeOfProcess(_options, url, lambda response: JudgeReply(response.text, 0))
    return _servers[path]


def rewards_in(reply: JudgeReply, n: int) -> list[Score]:
    """{"rewards": [number or {"reward", "correct"}, ...]}. Raises ValueError or TypeError for anything else."""
    answer = json_of(reply)
    rewards = answer.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != n:
        raise ValueError(f'invalid answer of reward.url: "rewards" must be a list of {n}: {reply.text[:TEXT]!r}')
    return [one_reward(one) for one in rewards]


def one_reward(one: Any) -> Score:
    if isinstance(one, Mapping):
        one = Score(one.get("reward"), one.get("correct"))  # type: ignore[arg-type]  # read_value checks it
    value = read_value(one)
    return Score(value["reward"], value["correct"])


def json_of(reply: JudgeReply) -> dict[str, Any]:
    try:
        answer = json.loads(reply.text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ValueError(f"invalid answer of reward.url: a JSON object is expected, not {reply.text[:TEXT]!r}")
    return answer


def run_program(program: str, stdin: bytes, limits: SandboxLimits) -> Outcome:
    """Run a Python program on a sandbox server: POST URL/run_code. Raises ValueError for an answer that is none."""
    body = {
        "code": program,
        "language": "python",
        "stdin": stdin.decode(errors="replace"),
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    return server(RUN_CODE).asked(body, outcome_of)


def outcome_of(reply: JudgeReply) -> Outcome:
    """How the program ended. A server that failed itself (SandboxError) is no verdict on the program."""
    answer = json_of(reply)
    result = answer.get("run_result")
    if answer.get("status") not in ("Success", "Failed") or not isinstance(result, Mapping):
        raise ValueError(f"the sandbox server did not run the program: {reply.text[:TEXT]!r}")
    stdout, stderr = (str(result.get(name) or "").encode() for name in ("stdout", "stderr"))
    wall_s = float(result.get("execution_time") or 0.0)
    if result.get("status") == "TimeLimitExceeded":
        return Outcome("timeout", 0, stdout, stderr, wall_s)
    code = result.get("return_code")
    return Outcome("exit", code if isinstance(code, int) else 1, stdout, stderr, wall_s)
