"""Rows of the named tasks, generated or published: "question" and "answer", and other fields for the reward.

"sums" and "reverse" have "demonstration", too. Problems that are held out do not occur in training.
"""

import difflib
import importlib
import json
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from areal_bus.config.data import DataConfig
from areal_bus.config.names.named_tasks import GYM_PREFIX, GYM_REFUSED, gym_task
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

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
    if task := gym_task(config.task):
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


PublishedRow = Mapping[str, Any]
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE = re.compile(r"[^\s${}\\.,;]+")
PYTHON3 = 3  # of the languages of CodeContests


def adapt(task: str, row: PublishedRow, where: str) -> dict[str, Any]:
    """The row with question and answer. Raises ConfigError for a row of another form."""
    try:
        question, answer = READERS[task](row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        known = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ConfigError(
            f"invalid row of {task}: {where} has {known}, not the published fields ({type(error).__name__}: {error})"
        ) from None
    return {**row, "question": question, "answer": answer}


def first(row: PublishedRow, *names: str) -> Any:
    """The first of these fields that the row has. Raises LookupError."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise LookupError(f"none of {', '.join(names)}")


def math(row: PublishedRow) -> tuple[str, str]:
    """Without a field for the answer (math-ai/aime24, MATH), it is in the last box of the solution."""
    answer = next((row[name] for name in ("answer", "Answer") if row.get(name) not in (None, "")), None)
    if answer is None:
        answer = boxed(str(first(row, "solution", "Solution", "answer", "Answer")))
    if not answer and answer != 0:
        raise ValueError("no box in the solution")
    is_whole = isinstance(answer, float) and answer.is_integer()  # AMC: 27.0
    return str(first(row, "problem", "question", "Problem")), str(int(answer) if is_whole else answer)


def boxed(text: str) -> str | None:
    r"""The content of the last box: \boxed{5}, \boxed 5 or \fbox{5}; None if it is not closed."""
    boxes = list(BOX.finditer(text))
    rest = text[boxes[-1].end() :] if boxes else ""
    if not rest.startswith("{"):
        bare = BARE.match(rest)
        return bare[0] if bare else None
    depth = 0
    for at, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:at].strip()
    return None


def gsm8k(row: PublishedRow) -> tuple[str, str]:
    """The answer follows "####"; thousands have commas."""
    _, mark, answer = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError('no "####" before the final answer')
    return str(row["question"]), answer.strip().replace(",", "")


def humaneval(row: PublishedRow) -> tuple[str, str]:
    return str(row["prompt"]), str(row["canonical_solution"])


def mbpp(row: PublishedRow) -> tuple[str, str]:
    """MBPP+ (EvalPlus) has the assertion in its prompt; MBPP has it in test_list."""
    if "canonical_solution" in row:
        return str(row["prompt"]), str(row["canonical_solution"])
    if "test_list" not in row:
        raise LookupError("test_list")
    text = first(row, "text", "prompt")
    return f"{text}\nYour code must pass this test:\n{row['test_list'][0]}", str(row["code"])


def livecodebench(row: PublishedRow) -> tuple[str, str]:
    """The set has no solutions: the answer is the id of the problem."""
    starter = str(row.get("starter_code") or "")
    begin = f"\nBegin with this code:\n```python\n{starter}\n```" if starter else ""
    return f"{row['question_content']}{begin}", str(first(row, "question_id", "question_title"))


def codecontests(row: PublishedRow) -> tuple[str, str]:
    """The answer is the first solution in Python 3, else the name of the problem."""
    solutions = row.get("solutions") or {"language": [], "solution": []}
    pairs = zip(solutions["language"], solutions["solution"], strict=True)
    gold = next((text for language, text in pairs if language == PYTHON3), row["name"])
    return str(row["description"]), str(gold)


def codeforces(row: PublishedRow) -> tuple[str, str]:
    """The set has no solutions: the answer is the id of the problem."""
    parts = [("", "description"), ("Input\n", "input_format"), ("Output\n", "output_format"), ("Note\n", "note")]
    text = "\n\n".join(f"{title}{row[name]}" for title, name in parts if row.get(name))
    examples = "".join(f"\n\nExample\n{one['input']}\n{one['output']}" for one in row.get("examples") or [])
    return text + examples, str(row["id"])


READERS: Mapping[str, Callable[[PublishedRow], tuple[str, str]]] = {
    "gsm8k": gsm8k,
    **dict.fromkeys(("math500", "aime24", "aime25", "amc23", "deepscaler"), math),
    "humaneval": humaneval,
    "mbpp": mbpp,
    "livecodebench": livecodebench,
    "codecontests": codecontests,
    "codeforces": codeforces,
}


SOURCE = "reasoning_gym"  # field of a row: {"task": ..., "options": {...}}
HELD_OUT_SEED = 1 << 30  # added to the seed, for problems that are held out
EXTRA = f"it needs the extra reasoning-gym: {install_command('reasoning-gym')}"


def generate(task: str, n: int, *, seed: int, options: Mapping[str, Any]) -> Iterator[Row]:
    """`n` problems. Raises ConfigError for a task or options that cannot be used."""
    problems = data_set(task, json.dumps(dict(options), sort_keys=True), size=n, seed=seed)
    for number in range(n):
        problem = problems[number]
        answer = problem["answer"]
        known = {} if answer is None else {"demonstration": str(answer)}  # for learner.warmup
        yield {
            "question": str(problem["question"]),
            "answer": "" if answer is None else str(answer),
            "metadata": json.loads(json.dumps(problem["metadata"], default=str)),
            SOURCE: {"task": task, "options": dict(options)},
            **known,
        }


def generate_both(
    task: str, n_train: int, n_held_out: int, *, seed: int, options: Mapping[str, Any]
) -> tuple[list[Row], list[Row]]:
    """(training, held-out) problems: no question of the second is in the first. Raises ConfigError."""
    held_out = list(generate(task, n_held_out, seed=seed + HELD_OUT_SEED, options=options)) if n_held_out else []
    known = {row["question"] for row in held_out}
    train = [row for row in generate(task, n_train, seed=seed, options=options) if row["question"] not in known]
    if not train:
        raise ConfigError(
            f"data.task = {GYM_PREFIX + task!r} must leave problems to train on: all {n_train} (data.size) are held "
            "out; set data.held_out lower, or options that allow more problems"
        )
    return train, held_out


@lru_cache(maxsize=8)
def data_set(task: str, options: str, *, size: int = 1, seed: int = 0) -> Any:
    """A data set of the package, with options as JSON. Raises ConfigError."""
    if why := GYM_REFUSED.get(task):
        raise ConfigError(f"data.task = {GYM_PREFIX + task!r} cannot be trained on: {why}")
    try:
        package: Any = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(f"data.task = {GYM_PREFIX + task!r} must import the package: {EXTRA} ({error})") from error
    if task not in known:
        near = difflib.get_close_matches(task.replace("-", "_"), known, 1, 0.6)
        hint = f"; the nearest is {GYM_PREFIX + near[0]!r}" if near else ""
        raise ConfigError(f"unknown task data.task = {GYM_PREFIX + task!r}: reasoning-gym does not have it{hint}")
    try:
        return package.create_dataset(task, size=size, seed=seed, **json.loads(options))
    except Exception as error:  # the package checks its options by assert and by TypeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data.task_options must be options of {GYM_PREFIX + task!r}: {options}: {reason}") from error
