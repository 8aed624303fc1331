"""Our side of the bench `reward`: the built-in reward "math" on completions and their rows."""

from typing import Any

from actors.rewards.functions.mathematics import score
from benchmarks.harness.worker_main import seconds, serve


def judge(completions: list[str], answers: list[str]) -> dict[str, Any]:
    """Seconds for all of them, and the verdicts."""
    pairs = [(text, {"answer": answer}) for text, answer in zip(completions, answers, strict=True)]
    verdicts = [score("", text, row).correct for text, row in pairs]
    return {"seconds": seconds(lambda: [score("", text, row) for text, row in pairs], 0.0), "verdicts": verdicts}


if __name__ == "__main__":
    serve({"judge": judge})
