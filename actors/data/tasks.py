"""Generated tasks "sums", "reverse" and "reasoning-gym:NAME": training rows and held-out rows.

Every row has "question" and "answer", and those of "sums" and "reverse" "demonstration" (a correct completion, for a
supervised warm-up), all strings.
"""

import random
import string
from dataclasses import dataclass
from typing import Any

from actors.data.reasoning_gym_rows import generate_both
from areal_bus.config.data import DataConfig
from areal_bus.config.names.reasoning_gym import task_of
from areal_bus.errors import ConfigError

Row = dict[str, Any]

N_WORDS = 20_000  # training words of "reverse", at most
MIN_LETTERS = 3  # of a word


@dataclass(frozen=True, slots=True)
class Problems:
    """A task's rows: two disjoint lists in random order, so that a prefix is a fair sample."""

    train: list[Row]
    held_out: list[Row]


def make_problems(config: DataConfig, *, seed: int) -> Problems:
    """The rows of data.task, determined by config and seed. Raises ConfigError for an impossible config."""
    random_ = random.Random(f"{config.task}:{seed}")
    if config.task == "sums":
        return make_sums(config.largest, config.held_out, random_)
    if config.task == "reverse":
        return make_words(config.largest, config.held_out, random_)
    if task := task_of(config.task):
        sizes = config.size, config.held_out
        return Problems(*generate_both(task, *sizes, seed=seed, options=config.task_options))
    raise ConfigError(f'data.task must be "sums" or "reverse"; it is {config.task!r}')


def make_sums(largest: int, n_held_out: int, random_: random.Random) -> Problems:
    """All ordered pairs (a, b) from 0 to `largest`, with `n_held_out` of them held out; b + a goes with a + b."""
    n_pairs = (largest + 1) ** 2
    if n_held_out >= n_pairs:
        raise ConfigError(
            f"data.held_out must leave sums to train on: of the {n_pairs} pairs up to {largest}, {n_held_out} are held "
            f"out; set data.held_out below {n_pairs} or raise data.largest"
        )
    held = choose_pairs(largest, n_held_out, random_)
    train: list[Row] = []
    held_out: list[Row] = []
    for a in range(largest + 1):
        for b in range(largest + 1):
            (held_out if (min(a, b), max(a, b)) in held else train).append(make_sum(a, b))
    random_.shuffle(train)
    random_.shuffle(held_out)
    return Problems(train, held_out)


def choose_pairs(largest: int, n_ordered: int, random_: random.Random) -> set[tuple[int, int]]:
    """Unordered pairs (low, high) that cover exactly `n_ordered` ordered pairs: two each, or one for a double."""
    pairs = [(low, high) for low in range(largest + 1) for high in range(low, largest + 1)]
    random_.shuffle(pairs)
    chosen: list[tuple[int, int]] = []
    left = n_ordered
    for low, high in pairs:
        n = 1 if low == high else 2
        if n <= left:
            chosen.append((low, high))
            left -= n
    if left:  # one pair is missing and all doubles are chosen: replace a double by a pair of two
        chosen.remove(next(pair for pair in chosen if pair[0] == pair[1]))
        chosen.append(next(pair for pair in pairs if pair[0] != pair[1] and pair not in chosen))
    return set(chosen)


def make_sum(a: int, b: int) -> Row:
    return {"question": f"{a}+{b}", "answer": str(a + b), "demonstration": str(a + b), "a": a, "b": b}


def make_words(longest: int, n_held_out: int, random_: random.Random) -> Problems:
    """Distinct words of 3 to `longest` letters, with equally likely lengths, to be reversed."""
    if longest < MIN_LETTERS:
        raise ConfigError(
            f'data.task = "reverse" needs words of at least {MIN_LETTERS} letters: data.largest is {longest}'
        )
    n_possible = sum(26**n for n in range(MIN_LETTERS, longest + 1))
    n_words = min(N_WORDS + n_held_out, n_possible // 2)  # at most half of them, so that new words are found quickly
    if n_held_out >= n_words:
        raise ConfigError(
            f"data.held_out must leave words to train on: it is {n_held_out}, of {n_words} words up to {longest} "
            "letters"
        )
    words: dict[str, None] = {}  # an ordered set
    while len(words) < n_words:
        length = random_.randint(MIN_LETTERS, longest)
        words["".join(random_.choices(string.ascii_lowercase, k=length))] = None
    rows = [make_word(word) for word in words]
    return Problems(train=rows[n_held_out:], held_out=rows[:n_held_out])


def make_word(word: str) -> Row:
    return {"question": word, "answer": word[::-1], "demonstration": word[::-1]}
