"""Checks that the prompts of all rows can be rendered and fit data.max_prompt_tokens and the model's context length."""

from collections.abc import Sequence

from jinja2 import TemplateError

from actors.data.loading import RowWithOrigin
from actors.models.loading import load_tokenizer, max_positions
from actors.models.scratch import character_tokenizer
from actors.workflows.prompts import Question, prompt_lengths, prompt_of
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.errors import ConfigError
from launch.checks.row_checks import dropped_note

MAX_TOKENIZED = 8192  # the prompts that are longest in bytes are tokenized: about two seconds


def check_prompts(config: Config, rows: Sequence[RowWithOrigin], model: str) -> list[str]:
    """A note on the rows that are dropped (data.long_prompts).

    Raises ConfigError for the longest prompt if it is too long, or for the first row that cannot be rendered.
    """
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
    """Tokens of each prompt, with the generators' tokenizer."""
    if config.model.scratch is not None:
        return [
            len(encoding.ids)
            for encoding in character_tokenizer(config.model.scratch).encode_batch([one.text for one in prompts])
        ]
    try:
        return prompt_lengths(prompts, config.data, load_tokenizer(model))
    except TemplateError as error:
        raise ConfigError(
            f"data.chat_template = true needs a template that accepts data.system and the prompt: {model}: {error}"
        ) from None


def check_prompt_length(config: Config, where: str, n: int) -> None:
    most = config.data.max_prompt_tokens
    if n > most:
        raise ConfigError(
            f"a prompt may have at most data.max_prompt_tokens = {most} tokens: the longest, {where}, has {n}; set "
            f'data.max_prompt_tokens = {n} (or more), or {shorten_hint(config)}, or set data.long_prompts = "drop"'
        )


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
        raise ConfigError(
            f"a prompt plus gconfig.max_new_tokens = {n_new} may have at most {name} = {most} tokens: the "
            f"longest prompt, {where}, has {n}; {' or '.join([*ways, shorten_hint(config)])}"
        )


def shorten_hint(config: Config) -> str:
    """Advice for prompts that are too long."""
    return "lower data.largest" if config.data.is_generated else "remove rows of that length"
