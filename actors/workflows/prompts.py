"""Builds prompts: fills data.prompt with a row, applies the chat template and tokenizes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from actors.data.fields import MISSING, SOURCE, Message, last_user, lookup, messages_of
from actors.endpoint.conversation import for_template
from actors.workflows.protocol import Row
from areal_bus.config.data import DataConfig
from areal_bus.errors import ConfigError, PromptTooLong


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as text, for logs and rewards, and as messages, for the chat template."""

    text: str
    messages: list[Message]
    is_chat: bool = False  # the row itself holds messages


def prompt_of(row: Row, data: DataConfig) -> Question:
    """data.prompt (or of the row's source), filled; in chat rows it is the last user message. Raises ConfigError."""
    data = data.of(row.get(SOURCE, ""))
    text = fill(data.prompt, row, data.question_key)
    messages = messages_of(row, data.question_key)
    if messages is None:
        return Question(text, [{"role": "user", "content": text}])
    if not data.chat_template:
        raise ConfigError("missing chat template: a prompt of chat messages needs it; set data.chat_template = true")
    at = last_user(messages)
    messages[at] = {**messages[at], "content": text}
    whole_text = "\n\n".join(f"{message['role']}: {said(message)}" for message in messages)
    return Question(text if len(messages) == 1 else whole_text, messages, is_chat=True)


def said(message: Message) -> str:
    """The content, then the tool calls as JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])


def fill(template: str, row: Row, question_key: str, *, setting: str = "data.prompt") -> str:
    """The template of `setting` with the row's fields; {question}: the field `question_key`, or its last user message.
    Raises ConfigError for an invalid template, or one with a field that the row lacks.
    """
    value = lookup(row, question_key)
    fields = {**row, "question": row.get("question") if value is MISSING or isinstance(value, list) else value}
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        missing = [name for name in names if name not in fields]
        if missing:
            known = ", ".join(sorted(map(str, fields)))
            raise ConfigError(f"unknown field {{{missing[0]}}} in {setting}: the row has {known}")
        return template.format_map(fields)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{setting} must be a template ({{{{ and }}}} for braces): {template!r}: {error}") from error


def prompt_ids(asked: Question, data: DataConfig, tokenizer: Any) -> list[int]:
    """Tokens of the prompt, through the chat template if set. Raises PromptTooLong, ConfigError without a template."""
    text = full_text(asked, data, tokenizer)
    ids = _open(tokenizer(text, add_special_tokens=not data.chat_template)["input_ids"], text, data, tokenizer)
    if len(ids) > data.max_prompt_tokens:
        raise PromptTooLong(
            f"a prompt has at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens; this one has {len(ids)}"
        )
    return list(ids)


def prompt_lengths(prompts: Sequence[Question], data: DataConfig, tokenizer: Any) -> list[int]:
    """Number of tokens of each prompt, without a limit. Raises ConfigError without a chat template."""
    texts = [full_text(asked, data, tokenizer) for asked in prompts]
    batch = tokenizer(texts, add_special_tokens=not data.chat_template, verbose=False)
    return [len(_open(ids, text, data, tokenizer)) for ids, text in zip(batch["input_ids"], texts, strict=True)]


def _open(ids: Sequence[int], text: str, data: DataConfig, tokenizer: Any) -> Sequence[int]:
    """The tokens without an end of text that the tokenizer puts behind every text: the answer follows the prompt."""
    end = getattr(tokenizer, "eos_token_id", None)
    if data.chat_template or end is None or not ids or ids[-1] != end:
        return ids
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if own and own[-1] == end else ids[:-1]


def full_text(asked: Question, data: DataConfig, tokenizer: Any) -> str:
    """The prompt text that is tokenized. A chat template writes its special tokens itself."""
    if not data.chat_template:
        return asked.text
    return chat(asked.messages, data.system, tokenizer, **data.chat_template_kwargs)


def chat(messages: Sequence[Message], system: str | None, tokenizer: Any, **arguments: Any) -> str:
    """Render the messages up to the assistant's turn. `system`: None keeps the template's default, "" means none."""
    if not tokenizer.chat_template:
        raise ConfigError("data.chat_template = true needs a tokenizer with a template: set data.chat_template = false")
    has_system = any(message["role"] == "system" for message in messages)
    if system and not has_system:
        return _render([{"role": "system", "content": system}, *messages], tokenizer, arguments)
    plain = _render(messages, tokenizer, arguments)
    return plain if system is None or has_system else _without_system(plain, messages, tokenizer, arguments)


def _without_system(plain: str, messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """Remove a template's default system message by an empty one; `plain` when that cannot be done."""
    empty = {"role": "system", "content": ""}
    try:
        head = str(tokenizer.apply_chat_template([empty], tokenize=False, **arguments))
        both = _render([empty, *messages], tokenizer, arguments)
    except Exception:  # noqa: BLE001  templates raise any error (Gemma's: TemplateError) for an unsupported role
        return plain
    if not head or not both.startswith(head):
        return plain
    tail, begin = both[len(head) :], tokenizer.bos_token or ""
    cut_too_much = begin and head.startswith(begin) and not tail.startswith(begin)
    return begin + tail if cut_too_much else tail


def _render(messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    options = {**arguments, "tokenize": False, "add_generation_prompt": True}
    return str(tokenizer.apply_chat_template([for_template(message) for message in messages], **options))
