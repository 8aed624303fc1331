"""Rows of the named tasks: the published fields to "question" and "answer". The other fields stay for the reward."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from areal_bus.errors import ConfigError

Row = Mapping[str, Any]
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE = re.compile(r"[^\s${}\\.,;]+")
PYTHON3 = 3  # of the languages of CodeContests


def adapt(task: str, row: Row, where: str) -> dict[str, Any]:
    """The row with question and answer. Raises ConfigError for a row of another form."""
    try:
        question, answer = READERS[task](row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        known = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ConfigError(
            f"a row of {task} must have its published fields: {where} has {known} ({type(error).__name__}: {error})"
        ) from None
    return {**row, "question": question, "answer": answer}


def first(row: Row, *names: str) -> Any:
    """The first of these fields that the row has. Raises LookupError."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise LookupError(f"none of {', '.join(names)}")


def math(row: Row) -> tuple[str, str]:
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


def gsm8k(row: Row) -> tuple[str, str]:
    """The answer follows "####"; thousands have commas."""
    _, mark, answer = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError('no "####" before the final answer')
    return str(row["question"]), answer.strip().replace(",", "")


def humaneval(row: Row) -> tuple[str, str]:
    return str(row["prompt"]), str(row["canonical_solution"])


def mbpp(row: Row) -> tuple[str, str]:
    """MBPP+ (EvalPlus) has the assertion in its prompt; MBPP has it in test_list."""
    if "canonical_solution" in row:
        return str(row["prompt"]), str(row["canonical_solution"])
    if "test_list" not in row:
        raise LookupError("test_list")
    text = first(row, "text", "prompt")
    return f"{text}\nYour code must pass this test:\n{row['test_list'][0]}", str(row["code"])


def livecodebench(row: Row) -> tuple[str, str]:
    """The set has no solutions: the answer is the id of the problem."""
    starter = str(row.get("starter_code") or "")
    begin = f"\nBegin with this code:\n```python\n{starter}\n```" if starter else ""
    return f"{row['question_content']}{begin}", str(first(row, "question_id", "question_title"))


def codecontests(row: Row) -> tuple[str, str]:
    """The answer is the first solution in Python 3, else the name of the problem."""
    solutions = row.get("solutions") or {"language": [], "solution": []}
    pairs = zip(solutions["language"], solutions["solution"], strict=True)
    gold = next((text for language, text in pairs if language == PYTHON3), row["name"])
    return str(row["description"]), str(gold)


def codeforces(row: Row) -> tuple[str, str]:
    """The set has no solutions: the answer is the id of the problem."""
    parts = [("", "description"), ("Input\n", "input_format"), ("Output\n", "output_format"), ("Note\n", "note")]
    text = "\n\n".join(f"{title}{row[name]}" for title, name in parts if row.get(name))
    examples = "".join(f"\n\nExample\n{one['input']}\n{one['output']}" for one in row.get("examples") or [])
    return text + examples, str(row["id"])


READERS: Mapping[str, Callable[[Row], tuple[str, str]]] = {
    "gsm8k": gsm8k,
    **dict.fromkeys(("math500", "aime24", "aime25", "amc23", "deepscaler"), math),
    "humaneval": humaneval,
    "mbpp": mbpp,
    "livecodebench": livecodebench,
    "codecontests": codecontests,
    "codeforces": codeforces,
}
