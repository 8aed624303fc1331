"""Checks the rows of a run before it starts: refuses prompts not rendered or too long; notes doubtful ones."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from actors.data.fields import MESSAGES, UNREAD
from actors.data.loading import RowWithOrigin
from actors.models.loading import load_tokenizer, max_positions
from actors.models.scratch import UNKNOWN, character_tokenizer
from actors.workflows.prompts import Question, prompt_lengths, prompt_of
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.errors import ConfigError

MOST_ROWS = 1000  # whose texts are tokenized for unknown tokens
MOST_UNKNOWN = 0.01  # share of tokens without a note
N_NAMED, N_EXAMPLES = 5, 40  # rows and characters
FIELDS = ("question", "answer", "demonstration")

Encode = Callable[[str], Sequence[int]]


def dropped_note(rows: Sequence[RowWithOrigin], lengths: Mapping[int, int], *, most: int) -> str:
    """The rows that are dropped, by `lengths`: the tokens of their prompts by index."""
    names = ", ".join(f"{rows[i].where} ({n})" for i, n in islice(sorted(lengths.items()), N_NAMED))
    more = ", ..." if len(lengths) > N_NAMED else ""
    why = f"their prompts exceed data.max_prompt_tokens = {most} tokens (data.long_prompts)"
    return f"{len(lengths)} of {len(rows)} rows are dropped: {why}: {names}{more}"


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
    tokenizer, remedy = load_tokenizer(model), "set model.path to a model whose tokenizer has them"
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    return lambda text: list(encode(text)["input_ids"]), tokenizer.unk_token_id, remedy


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
    what = f"{len(seen)} of {len(problems)} held-out problems are training rows"
    return [f"{what}: {named}; their accuracy is no measure of new problems"]


def why_unread(text: str, rows: Sequence[RowWithOrigin]) -> str:
    """The end of an error text that names a column which was left out of a row: file, row and why; else ""."""
    if "unreadable value" in text:
        return ""
    for placed in rows:
        for name, why in placed.row.get(UNREAD, {}).items():
            if repr(name) in text:
                return f"; unreadable value in column {name!r}: {why}; change it in the file"
    return ""


def asked(row: Mapping[str, Any]) -> str:
    return json.dumps([row["question"].split(), row.get(MESSAGES), row.get("prompt")], sort_keys=True)


MAX_TOKENIZED = 8192  # the prompts that are longest in bytes are tokenized: about two seconds


def check_prompts(config: Config, rows: Sequence[RowWithOrigin], model: str) -> list[str]:
    """A note on dropped rows (data.long_prompts). Raises ConfigError for a prompt too long or a row not rendered."""
    if not rows:
        return []  # those of a loader are not known
    prompts = [render_prompt(config, row) for row in rows]
    most, drops = config.data.max_prompt_tokens, config.data.long_prompts == "drop"
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i].text.encode()), reverse=True)
    lengths: dict[int, int] = {}
    for begin in range(0, len(order), MAX_TOKENIZED):
        chosen = order[begin : begin + MAX_TOKENIZED]
        found = dict(zip(chosen, count_tokens([prompts[i] for i in chosen], config, model), strict=True))
        lengths |= found
        if not drops or max(found.values()) <= most:
            break
    kept = {i: n for i, n in lengths.items() if n <= most or not drops}
    longest = max(kept or lengths, key=lengths.__getitem__)
    check_prompt_length(config, rows[longest].where, lengths[longest])
    check_context_length(config, rows[longest].where, lengths[longest], model)
    dropped = {i: n for i, n in lengths.items() if i not in kept}
    return [dropped_note(rows, dropped, most=most)] if dropped else []


def render_prompt(config: Config, row: RowWithOrigin) -> Question:
    try:
        return prompt_of(row.row, config.data)
    except ConfigError as error:
        raise ConfigError(f"{error} ({row.where})") from None


def count_tokens(prompts: Sequence[Question], config: Config, model: str) -> list[int]:
    if config.model.scratch is not None:
        tokenizer = character_tokenizer(config.model.scratch)
        return [len(encoding.ids) for encoding in tokenizer.encode_batch([one.text for one in prompts])]
    try:
        return prompt_lengths(prompts, config.data, load_tokenizer(model))
    except TemplateError as error:
        rule = "data.chat_template = true needs a template that accepts data.system and the prompt"
        raise ConfigError(f"{rule}: {model}: {error}") from None


def check_prompt_length(config: Config, where: str, n: int) -> None:
    most = config.data.max_prompt_tokens
    if n > most:
        rule = f"a prompt may have at most data.max_prompt_tokens = {most} tokens"
        ways = f'{shorten_hint(config)}, or set data.long_prompts = "drop"'
        what = f"the longest, {where}, has {n}; set data.max_prompt_tokens = {n} (or more), or"
        raise ConfigError(f"{rule}: {what} {ways}")


def check_context_length(config: Config, where: str, n: int, model: str) -> None:
    """Raises ConfigError unless the longest prompt and its completion fit the context length of the model."""
    scratch, n_new = config.model.scratch, largest(config).gconfig.max_new_tokens
    if scratch is None:
        most, name = max_positions(model), "the model's max_position_embeddings"
    else:
        most, name = scratch.max_positions, "model.scratch.max_positions"
    if most is not None and n + n_new > most:
        ways = [f"set gconfig.max_new_tokens = {most - n} (or less)"] if n < most else []
        ways += [f"set model.scratch.max_positions = {n + n_new} (or more)"] if scratch is not None else []
        rule = f"a prompt plus gconfig.max_new_tokens = {n_new} may have at most {name} = {most} tokens"
        remedy = " or ".join([*ways, shorten_hint(config)])
        raise ConfigError(f"{rule}: the longest prompt, {where}, has {n}; {remedy}")


def shorten_hint(config: Config) -> str:
    """Advice for prompts that are too long."""
    return "lower data.largest" if config.data.is_generated else "remove rows of that length"
