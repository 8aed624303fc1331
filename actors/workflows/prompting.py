"""From a row to the tokens of its prompt; knows the data's settings and a tokenizer, no model."""

from collections.abc import Sequence
from string import Formatter
from typing import Any

from actors.workflows.protocol import Row
from areal_bus.config import DataConfig
from areal_bus.errors import ConfigError, PromptTooLong


def fill(template: str, row: Row, question_key: str) -> str:
    """data.prompt with the row's fields in it; {question} is the field data.question_key.

    Raises ConfigError when the template is none or names a field that the row has not.
    """
    fields = {**row, "question": row.get(question_key, row.get("question"))}
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        missing = [name for name in names if name not in fields]
        if missing:
            known = ", ".join(sorted(map(str, fields)))
            raise ConfigError(f"data.prompt may name fields of the row only: {{{missing[0]}}} is none of {known}")
        return template.format_map(fields)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"data.prompt must be a template ({{{{ and }}}} for braces): {template!r}: {error}"
        ) from error


def prompt_ids(text: str, data: DataConfig, tokenizer: Any) -> list[int]:
    """Tokens of the prompt, as a user message by the chat template where data.chat_template says so.

    Raises PromptTooLong over data.max_prompt_tokens, ConfigError without a chat template.
    """
    ids = tokenizer(whole(text, data, tokenizer), add_special_tokens=not data.chat_template)["input_ids"]
    if len(ids) > data.max_prompt_tokens:
        raise PromptTooLong(
            f"a prompt has at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens; {len(ids)}"
        )
    return list(ids)


def prompt_lengths(texts: Sequence[str], data: DataConfig, tokenizer: Any) -> list[int]:
    """Tokens that each prompt takes, however many. Raises ConfigError without a chat template."""
    prompts = [whole(text, data, tokenizer) for text in texts]
    batch = tokenizer(prompts, add_special_tokens=not data.chat_template, verbose=False)
    return [len(ids) for ids in batch["input_ids"]]


def whole(text: str, data: DataConfig, tokenizer: Any) -> str:
    """The text as the model reads it: a template writes its special tokens itself."""
    return chat(text, data.system, tokenizer) if data.chat_template else text


def chat(text: str, system: str | None, tokenizer: Any) -> str:
    """The text as a user message, up to where the assistant begins. `system`: None is the template's own, "" none."""
    if not tokenizer.chat_template:
        raise ConfigError("data.chat_template = true needs a tokenizer that has one: set data.chat_template = false")
    user = {"role": "user", "content": text}
    if system:
        return _render([{"role": "system", "content": system}, user], tokenizer)
    plain = _render([user], tokenizer)
    return plain if system is None else _without_system(plain, user, tokenizer)


def _without_system(plain: str, user: dict[str, str], tokenizer: Any) -> str:
    """Some templates put in a system message of their own: render an empty one instead, and cut it out.

    `plain` where the template knows no system message or does not set it apart.
    """
    empty = {"role": "system", "content": ""}
    try:
        head = str(tokenizer.apply_chat_template([empty], tokenize=False))
        both = _render([empty, user], tokenizer)
    except Exception:  # noqa: BLE001  a template raises what it likes (Gemma's: TemplateError) for a role it has not
        return plain
    if not head or not both.startswith(head):
        return plain
    tail, begin = both[len(head) :], tokenizer.bos_token or ""
    cut_too_much = begin and head.startswith(begin) and not tail.startswith(begin)
    return begin + tail if cut_too_much else tail


def _render(messages: list[dict[str, str]], tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
