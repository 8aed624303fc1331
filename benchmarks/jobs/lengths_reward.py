"""A workload of drawn lengths: each sample has the length of its row, whatever the model samples.

All compared settings use the same rows, so they sample the same lengths for the same prompts. Imports without torch:
the generators and rewards of a job import it by its path.
"""

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.workflows.protocol import Ask, Episode, Row
from actors.workflows.single_turn import SingleTurn
from areal_bus.config.sections import Config
from benchmarks.pack.inputs import lengths

LETTERS = "abcdefghijklmnopqrstuvwxyz"
N_PROMPT = 24  # characters; one token each
GROUPS = 16  # to record, at least


class DrawnLengths:
    """The samples of a group have the row's "lengths", in the order of their starts."""

    def __init__(self, config: Config) -> None:
        self._single = SingleTurn(config)
        self._n_begun: Counter[str] = Counter()

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """One turn of exactly the next length."""
        text, ids = self._single.prompt(row, ask.tokenizer)
        n = row["lengths"][self._n_begun[text] % len(row["lengths"])]
        self._n_begun[text] += 1
        turn = await ask(ids, max_new_tokens=n)
        return Episode(text=turn.text, prompt_text=text)


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """From 0 to 1 by the text's checksum: samples of a group differ, except in a flat row."""
    return 0.0 if row["flat"] else zlib.crc32(completion.encode()) / 0xFFFFFFFF


def n_recorded(batch_size: int) -> int:
    """Number of batches to record: at least two, and enough groups for the share of flat rows."""
    return max(2, -(-GROUPS // batch_size))


def rows(
    n_rows: int, n_samples: int, *, median: float, sigma: float, longest: int, n_flat: int = 0
) -> Iterator[dict[str, Any]]:
    """Prompts of random letters, each with the lengths of its group: log-normal, cut at both ends.

    Of four groups that follow one another so many are flat: without a signal, as all their samples score alike.
    """
    drawn = lengths(n_rows * n_samples, 1, median=median, sigma=sigma, longest=longest)
    dice = random.Random(2)
    for i in range(n_rows):
        question = "".join(dice.choice(LETTERS) for _ in range(N_PROMPT))
        found = drawn[i * n_samples : (i + 1) * n_samples]
        yield {"question": question, "answer": "-", "lengths": found, "flat": i * n_flat % 4 < n_flat}


def write_rows(path: Path, found: list[dict[str, Any]]) -> float:
    """Write JSON lines. Returns the mean length of their samples."""
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return fmean(n for row in found for n in row["lengths"])
