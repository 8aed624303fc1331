"""Whether every prompt can be sampled, told before anything starts: knows the built-in workflow's prompts only.

Each row fills data.prompt, has at most data.max_prompt_tokens, and leaves room for its completion in the model.
"""

from collections.abc import Sequence

from jinja2 import TemplateError

from actors.data.loading import Placed
from actors.models.loading import load_tokenizer, max_positions
from actors.models.scratch import character_tokenizer
from actors.workflows.prompting import Question, prompt_lengths, prompt_of
from areal_bus.config import Config
from areal_bus.errors import ConfigError

MOST = 8192  # prompts that are tokenized, the longest by bytes: about two seconds


def check_prompts(config: Config, rows: Sequence[Placed], model: str) -> None:
    """Raises ConfigError for the longest prompt when it is too long, or the first that cannot be made."""
    prompts = [filled(config, row) for row in rows]
    chosen = sorted(range(len(rows)), key=lambda i: len(prompts[i].text.encode()), reverse=True)[:MOST]
    lengths = count_tokens([prompts[i] for i in chosen], config, model)
    longest = max(range(len(chosen)), key=lengths.__getitem__)
    where, n = rows[chosen[longest]].where, lengths[longest]
    check_limit(config, where, n)
    check_room(config, where, n, model)


def filled(config: Config, row: Placed) -> Question:
    try:
        return prompt_of(row.row, config.data)
    except ConfigError as error:
        raise ConfigError(f"{error} ({row.where})") from None


def count_tokens(prompts: Sequence[Question], config: Config, model: str) -> list[int]:
    """Tokens of each prompt, by the tokenizer that the generators will use."""
    if config.model.scratch is not None:
        return [
            len(encoding.ids)
            for encoding in character_tokenizer(config.model.scratch).encode_batch([one.text for one in prompts])
        ]
    try:
        return prompt_lengths(prompts, config.data, load_tokenizer(model))
    except TemplateError as error:
        raise ConfigError(
            f"data.chat_template = true needs a template that takes data.system and the prompt: {model}: {error}"
        ) from None


def check_limit(config: Config, where: str, n: int) -> None:
    most = config.data.max_prompt_tokens
    if n > most:
        raise ConfigError(
            f"a prompt has at most data.max_prompt_tokens = {most} tokens: the longest, {where}, has {n}; set "
            f"data.max_prompt_tokens = {n} (or more), or {drop(config)}"
        )


def check_room(config: Config, where: str, n: int, model: str) -> None:
    """The longest prompt and its completion fit the positions of the model."""
    scratch, n_new = config.model.scratch, config.gconfig.max_new_tokens
    if scratch is None:
        most, name = max_positions(model), "the model's max_position_embeddings"
    else:
        most, name = scratch.max_positions, "model.scratch.max_positions"
    if most is not None and n + n_new > most:
        ways = [f"set gconfig.max_new_tokens = {most - n} (or less)"] if n < most else []
        ways += [f"set model.scratch.max_positions = {n + n_new} (or more)"] if scratch is not None else []
        raise ConfigError(
            f"a prompt and gconfig.max_new_tokens = {n_new} together have at most {name} = {most} tokens: the "
            f"longest prompt, {where}, has {n}; {' or '.join([*ways, drop(config)])}"
        )


def drop(config: Config) -> str:
    """How to be rid of the prompts that are too long."""
    return "lower data.largest" if config.data.task else "drop every row as long"
