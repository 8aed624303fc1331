"""What the rows of a run show before it starts: long prompts, tokens that the vocabulary does not have, and problems of
an evaluation that are training rows. Notes, and no refusals.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from actors.data.fields import MESSAGES, UNREAD
from actors.data.loading import RowWithOrigin
from actors.models.loading import load_tokenizer
from actors.models.scratch import UNKNOWN, character_tokenizer
from areal_bus.config.sections import Config

MOST_ROWS = 1000  # whose texts are tokenized for unknown tokens
MOST_UNKNOWN = 0.01  # share of tokens without a note
N_NAMED, N_EXAMPLES = 5, 40  # rows and characters
FIELDS = ("question", "answer", "demonstration")

Encode = Callable[[str], Sequence[int]]


def dropped_note(rows: Sequence[RowWithOrigin], lengths: Mapping[int, int], *, most: int) -> str:
    """The rows that are dropped, by `lengths`: the tokens of their prompts by index."""
    names = ", ".join(f"{rows[i].where} ({n})" for i, n in islice(sorted(lengths.items()), N_NAMED))
    more = ", ..." if len(lengths) > N_NAMED else ""
    return (
        f"{len(lengths)} of {len(rows)} rows are dropped: their prompts exceed data.max_prompt_tokens = {most} tokens "
        f"(data.long_prompts): {names}{more}"
    )


def unknown_notes(config: Config, rows: Sequence[RowWithOrigin], model: str) -> list[str]:
    """A note for each field of which more than MOST_UNKNOWN of the tokens are unknown."""
    encode, unknown, remedy = encoder(config, model)
    if unknown is None:
        return []
    return [note for field in FIELDS if (note := unknown_note(field, rows[:MOST_ROWS], encode, unknown, remedy))]


def encoder(config: Config, model: str) -> tuple[Encode, int | None, str]:
    """The tokenizer, its token for what it does not know, and what to set."""
    if (scratch := config.model.scratch) is not None:
        characters = character_tokenizer(scratch)
        remedy = "add them to model.scratch.characters"
        return lambda text: list(characters.encode(text).ids), characters.token_to_id(UNKNOWN), remedy
    tokenizer = load_tokenizer(model)
    return (
        lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        tokenizer.unk_token_id,
        "set model.path to a model whose tokenizer has them",
    )


def unknown_note(field: str, rows: Sequence[RowWithOrigin], encode: Encode, unknown: int, remedy: str) -> str:
    texts = [str(placed.row[field]) for placed in rows if placed.row.get(field)]
    ids = [list(encode(text)) for text in texts]
    n, n_unknown = sum(map(len, ids)), sum(one.count(unknown) for one in ids)
    if not n or n_unknown <= MOST_UNKNOWN * n:
        return ""
    characters = dict.fromkeys("".join(text for text, one in zip(texts, ids, strict=True) if unknown in one))
    examples = "".join(islice((character for character in characters if unknown in encode(character)), N_EXAMPLES))
    return f"unknown tokens: {n_unknown / n:.0%} of the field {field}, such as {examples!r}; {remedy}"


def seen_note(rows: Sequence[RowWithOrigin], problems: Sequence[RowWithOrigin]) -> list[str]:
    """A note if problems of an evaluation are training rows: the same question and messages."""
    trained = {asked(placed.row) for placed in rows}
    seen = [placed.where for placed in problems if asked(placed.row) in trained]
    if not seen:
        return []
    named = ", ".join(seen[:N_NAMED]) + (", ..." if len(seen) > N_NAMED else "")
    return [
        f"{len(seen)} of {len(problems)} held-out problems are training rows: {named}; their accuracy is no measure of "
        "new problems"
    ]


def why_unread(text: str, rows: Sequence[RowWithOrigin]) -> str:
    """The end of an error text that names a column which was left out of a row: file, row and why; else ""."""
    if "unreadable value" in text:
        return ""
    for placed in rows:
        for name, why in placed.row.get(UNREAD, {}).items():
            if repr(name) in text:
                return f"; unreadable value in column {name!r} of a row: {why}; change it in the file"
    return ""


def asked(row: Mapping[str, Any]) -> str:
    return json.dumps([row["question"].split(), row.get(MESSAGES), row.get("prompt")], sort_keys=True)
