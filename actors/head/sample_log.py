"""The samples of a run, kept for people beside the journal; knows only what it is handed."""

import array
import json
import sys
from pathlib import Path
from typing import Any

from areal_bus.core.effects import Keep
from areal_bus.journal import LineFile

MOST_KEPT = 64  # samples that wait for one write
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class SampleLog:
    """Appends a JSON line a sample to RUN/samples/samples.jsonl, and one to tokens.jsonl (fields: docs/journal.md)."""

    def __init__(self, run_folder: Path, *, tokens: bool = False) -> None:
        folder = run_folder / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(folder / "samples.jsonl")
        self._tokens = LineFile(folder / "tokens.jsonl") if tokens else None
        self._kept: list[Keep] = []  # not written yet

    def keep(self, effect: Keep) -> None:
        """Its lines go to the files with the next `flush`."""
        self._kept.append(effect)
        if len(self._kept) >= MOST_KEPT:
            self.flush()

    def flush(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._file.append(*[packed(as_line(effect)) for effect in kept])
            if self._tokens is not None:
                self._tokens.append(*[packed(as_tokens(effect)) for effect in kept])

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._tokens is not None:
            self._tokens.close()


def as_line(effect: Keep) -> dict[str, Any]:
    """One sample, flat but for its spans."""
    s = effect.scored
    has_reward = s.status == "value" or not s.evaluation  # what is trained has one, declared for a verdict without
    return {
        "kind": "evaluation" if s.evaluation else "train",
        "evaluation": s.evaluation,
        "step": effect.step,
        "version": effect.clock,
        "uid": s.uid,
        "sample": s.sample,
        "attempt": s.attempt,
        "generator": s.generator,
        "prompt": s.prompt_text,
        "completion": s.text,
        "reward": s.reward if has_reward else None,
        "correct": s.correct,
        "status": s.status,
        "error": s.error,
        "finish": s.finish,
        "versions": s.spans,
        "n_tokens": s.n_sampled,
        "n_masked": effect.n_masked,
        **({"turns": json.loads(s.turns)} if s.turns else {}),
    }


def as_tokens(effect: Keep) -> dict[str, Any]:
    """The tokens of one sample: all ids, and of the sampled ones log-prob and version."""
    s = effect.scored
    return {
        "evaluation": s.evaluation,
        "uid": s.uid,
        "sample": s.sample,
        "attempt": s.attempt,
        "segments": s.segments,
        "versions": s.spans,
        "ids": _numbers("i", s.ids),
        "logps": [float(f"{logp:.9g}") for logp in _numbers("f", s.logps)],  # 9 digits name a float32
    }


def _numbers(kind: str, raw: bytes) -> list[Any]:
    """Little-endian int32 ("i") or float32 ("f") as plain numbers."""
    numbers = array.array(kind, raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def packed(line: dict[str, Any]) -> bytes:
    return compact(line).encode()
