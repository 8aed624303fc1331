"""math-verify alone, for the bench `reward`: the plain completion against the row's final number."""

import importlib
import logging
from typing import Any

from benchmarks.harness.worker_main import seconds, serve

library: Any = importlib.import_module("math_verify")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set (limits use signals)


def verdict(completion: str, answer: str) -> bool:
    gold = library.parse(answer.rpartition("####")[2].strip().replace(",", ""), parsing_timeout=None)
    return bool(library.verify(gold, library.parse(completion, parsing_timeout=None), timeout_seconds=None))


def judge(completions: list[str], answers: list[str]) -> dict[str, Any]:
    """Seconds for all of them, and the verdicts."""
    pairs = list(zip(completions, answers, strict=True))
    verdicts = [verdict(*pair) for pair in pairs]
    return {"seconds": seconds(lambda: [verdict(*pair) for pair in pairs], 0.0), "verdicts": verdicts}


if __name__ == "__main__":
    serve({"judge": judge})
