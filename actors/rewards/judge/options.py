"""The settings of a judge, as a worker process has them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """[reward.judge] and what goes with it."""

    url: str
    model: str
    prompt: str
    api_key_env: str = ""
    max_score: float = 1.0
    correct_from: float | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    call_timeout_s: float = 30.0
    max_retries: int = 8
    max_concurrent: int = 8
    max_calls: int | None = None
    max_budget_tokens: int | None = None
    cache: bool = True
    score_s: float = 8.0  # for one score: all calls and pauses
    folder: str = ""  # of the store; "": one of this process
