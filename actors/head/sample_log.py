"""Sample log: writes each trained and evaluated sample to RUN/samples."""

import array
import json
import sys
from pathlib import Path
from typing import Any

from areal_bus.core.effects import Keep
from areal_bus.core.parts.reward_parts import parts_of
from areal_bus.foreign_text import valid
from areal_bus.messages import Scored
from areal_bus.storage.journal_segments import LineFile

MAX_BUFFERED = 64  # samples buffered before a write
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class SampleLog:
    """Appends one JSON line for each sample to samples.jsonl, and with `tokens` to tokens.jsonl (docs/journal.md)."""

    def __init__(self, run_folder: Path, *, tokens: bool = False) -> None:
        folder = run_folder / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(folder / "samples.jsonl")
        self._tokens = LineFile(folder / "tokens.jsonl") if tokens else None
        self._buffer: list[Keep] = []  # not written yet

    def keep(self, effect: Keep) -> None:
        """Buffer the sample; `flush` writes it."""
        self._buffer.append(effect)
        if len(self._buffer) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        if self._buffer:
            kept, self._buffer = self._buffer, []
            self._file.append(*[packed(as_line(effect)) for effect in kept])
            if self._tokens is not None:
                self._tokens.append(*[packed(as_tokens(effect)) for effect in kept])

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._tokens is not None:
            self._tokens.close()


def as_line(effect: Keep) -> dict[str, Any]:
    s = effect.scored
    has_reward = s.status == "value" or not s.evaluation  # a trained sample has one: its value, or the configured one
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
        **({"answer": answer} if (answer := answer_of(effect.row)) else {}),
        "reward": s.reward if has_reward else None,
        "correct": s.correct,
        "status": s.status,
        "error": s.error,
        "finish": s.finish,
        "versions": s.spans,
        "n_tokens": s.n_sampled,
        "n_masked": effect.n_masked,
        **({"turns": turns, "segments": s.segments} if (turns := turns_of(s)) else {}),
        **({"trajectories": s.trajectories} if s.trajectories else {}),
        **({"roles": s.roles} if s.roles else {}),
        **({"parts": parts} if (parts := parts_of(s)) else {}),
        **({"source": effect.source} if effect.source else {}),
    }


def answer_of(row: str) -> str:
    fields = json.loads(row) if row else None
    answer = fields.get("answer") if isinstance(fields, dict) else None
    return answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, ensure_ascii=False)


def turns_of(scored: Scored) -> list[list[str]]:
    """[given, sampled] of each turn; none for text that is no JSON of such pairs: a peer wrote it."""
    try:
        turns = json.loads(scored.turns) if scored.turns else []
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns)
    return turns if is_list and all(isinstance(text, str) for turn in turns for text in turn) else []


def as_tokens(effect: Keep) -> dict[str, Any]:
    """The line of tokens.jsonl: all token ids, and log-probs and versions of the sampled tokens."""
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
        **({"source": effect.source} if effect.source else {}),
        **({"trajectories": s.trajectories} if s.trajectories else {}),
    }


def _numbers(kind: str, raw: bytes) -> list[Any]:
    """Little-endian int32 ("i") or float32 ("f") as plain numbers."""
    numbers = array.array(kind, raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def packed(line: dict[str, Any]) -> bytes:
    return valid(compact(line)).encode()
