"""What a chat request may ask for, and how the tokens of a conversation go on, without a server or an engine."""

import functools
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.endpoint.conversation import Conversation, HistoryRewritten
from actors.endpoint.openai_api import ChatCall, RequestRejected, as_event, read_call
from actors.models.loading import load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import ScratchConfig
from areal_bus.foreign_text import ERROR

HELLO = [{"role": "user", "content": "hello"}]
PLAIN = (  # the answer has an end of its own, written "<eos>"
    "{% for m in messages %}{{ m['role'] + '>' + m['content'] | trim + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant>{% endif %}"
)
FORGETFUL = PLAIN.replace("m['content']", "(m['content'] if loop.last else m['content'].split(' ')[-1])")  # no thoughts
DEAF = PLAIN.replace("m['content']", "(m['content'] if m['role'] == 'user' else 'gone')")
WITH_TOOLS = "{% for t in tools or [] %}{{ t['function']['name'] + ' ' }}{% endfor %}" + PLAIN
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def call(**fields: Any) -> ChatCall:
    return read_call(json.dumps({"model": "any", "messages": HELLO, **fields}).encode())


@cache
def letters() -> Any:
    """One token a character."""
    with tempfile.TemporaryDirectory() as folder:
        write_scratch_folder(Path(folder), ScratchConfig(characters="abcdefghijklmnopqrstuvwxyz >"))
        return load_tokenizer(folder)


@pytest.fixture
def tokenizer() -> Any:
    return letters()


def test_a_call_is_parsed_to_a_sampling_request_with_its_parameters() -> None:
    read = call(max_tokens=9, max_completion_tokens=7, temperature=1, stream=True, logprobs=True, user="me", n=3)
    assert read.n == 3
    assert (read.max_tokens, read.temperature, read.stream, read.logprobs) == (7, 1.0, True, True)
    assert read.messages == ({"role": "user", "content": "hello"},)
    assert call(stop=None, seed=5, tools=[]).tools == ()
    assert call(tools=WEATHER, tool_choice="required").reads_tool_calls
    assert not call(tools=WEATHER, tool_choice="none").reads_tool_calls
    assert call(stop=None, logit_bias={}).controls == {"logit_bias": ()}
    fields = {"stop": "x", "top_k": -1, "min_tokens": 3, "stop_token_ids": [4], "ignore_eos": True, "min_p": 0.1}
    read = call(**fields, logit_bias={"7": -2}, presence_penalty=1, chat_template_kwargs={"enable_thinking": False})
    assert read.controls == {
        "stop": ("x",), "top_k": 0, "min_new_tokens": 3, "stop_token_ids": (4,), "ignore_eos": True, "min_p": 0.1,
        "logit_bias": ((7, -2.0),), "presence_penalty": 1.0,
    }  # fmt: skip
    assert read.template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 17}, "invalid n: .*equal to 16: it is 17"),
        ({"n": 0}, "invalid n: .*equal to 1: it is 0"),
        ({"stop": ["x", ""]}, r"invalid stop\[1\]: .*at least 1 character"),
        ({"stop": 3}, "invalid stop: .*a valid list: it is 3"),
        ({"stop_token_ids": [1.5]}, "valid integer: it is 1.5"),
        ({"top_k": -2}, "greater than or equal to -1"),
        ({"ignore_eos": "yes"}, "invalid ignore_eos: .*boolean"),
        ({"chat_template_kwargs": {"tokenize": True}}, "arguments of the template"),
        ({"logit_bias": {"x": -100}}, "invalid logit_bias.x"),
        ({"logit_bias": {"4": "much"}}, "invalid logit_bias.4: .*valid number"),
        ({"logit_bias": {"4" * 5000: 1}}, "invalid logit_bias.4444"),
        ({"presence_penalty": True}, "invalid presence_penalty: .*valid number"),
        ({"top_logprobs": 3}, "top_logprobs = 3 .*of sampled tokens only"),
        ({"response_format": {"type": "json_object"}}, "response_format = .*no engine constrains tokens"),
        ({"tool_choice": {"type": "function"}}, "invalid tool_choice: .*'auto', 'none' or 'required'"),
        ({"some_new_field": 1}, "some_new_field"),
        ({"max_tokens": 0}, "invalid max_tokens: .*equal to 1: it is 0"),
        ({"max_tokens": True}, "invalid max_tokens: .*valid integer: it is true"),
        ({"temperature": "hot"}, "invalid temperature: .*valid number"),
        ({"temperature": 10**400}, "invalid temperature: .*valid number"),
        ({"stream": 1}, "invalid stream: .*boolean"),
        ({"stream_options": {"other": 1}}, "invalid stream_options.other"),
        ({"stream_options": {"include_usage": True}}, "need stream = true"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid stream_options.include_usage: .*boolean"),
        ({"messages": []}, "invalid messages: .*at least 1 item"),
        ({"messages": "hello"}, "invalid messages: .*a valid list"),
        ({"messages": [3]}, r"invalid messages\[0\]: .*it is 3"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"invalid messages\[0\]\.role: .*'system'"),
        ({"messages": [{"role": "user", "content": 5}]}, r"invalid messages\[0\]\.content: .*a valid list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\]\.type: .*'text'"),
        (
            {"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]},
            r"messages\[0\]\.audio: it is not .* leave it out",
        ),
        ({"messages": [{"role": "user", "content": {}}]}, r"invalid messages\[0\]\.content: .*a valid list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            r"invalid messages\[0\]\.tool_calls\[0\]",
        ),
        ({"tools": [{"type": "function"}]}, r"invalid tools\[0\]\.function: field required$"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 513}, "invalid tools: .*at most 512 items"),
        ({"stop_token_ids": functools.reduce(lambda inner, _: [inner], range(500), [])}, "nested at most 200 deep"),
    ],
)
def test_unsupported_request_fields_are_refused_with_the_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestRejected, match=why):
        call(**fields)


@pytest.mark.parametrize("fields", [{"x" * 100_000: 1}, {"messages": [{"role": "user", "x" * 100_000: 1}]}])
def test_a_refusal_is_short_whatever_it_quotes(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected) as refused:
        call(**fields)
    assert len(str(refused.value)) == ERROR


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"messages": "\\ud800"}', b"1" * 5000],
    ids=["empty", "cut", "list", "no text", "nan", "deep", "half a character", "long number"],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRejected, match="the body must be"):
        read_call(body)


def test_an_event_is_one_line_whatever_the_text_and_wherever_a_client_ends_lines() -> None:
    record = {"text": "a\u2028b\u0085c\nd é"}
    event = as_event(record).decode()
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == record


def test_a_message_is_read_as_the_template_gets_it() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    function = {"name": "f", "arguments": "{}"}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [{"id": "1", "type": "function", "function": function, "index": 0}],
    }
    read = call(messages=[{"role": "developer", "content": parts}, answer]).messages
    assert read[0] == {"role": "system", "content": "ab"}
    assert read[1]["content"] == ""
    assert read[1]["tool_calls"] == [{"id": "1", "type": "function", "function": function}]


def answered(conversation: Conversation, messages: list[Any], answer: str, ids: list[int], finish: str) -> list[Any]:
    before = conversation.extend(messages, ())
    message = {"role": "assistant", "content": answer}
    conversation.record(messages, (), [*before, *ids], message, finish)
    return [*messages, message]


def test_a_further_call_keeps_all_tokens_and_appends_the_new_ones(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, PLAIN)
    first = conversation.extend(HELLO, ())
    assert tokenizer.decode(first) == "user>hello<eos>assistant>"
    odd = [*tokenizer("hi")["input_ids"], tokenizer.unk_token_id, tokenizer.eos_token_id]  # no text gives these again
    messages = answered(conversation, HELLO, "hi", odd, "stop")
    second = conversation.extend([*messages, {"role": "user", "content": "more"}], ())
    assert second[: len(first) + len(odd)] == [*first, *odd]
    assert tokenizer.decode(second[len(first) + len(odd) :]) == "user>more<eos>assistant>"


TEXT = st.text("abc >", max_size=6)


@given(st.lists(st.tuples(st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), TEXT), min_size=1), TEXT)))
def test_any_conversation_has_the_tokens_of_its_whole_rendering(rounds: list[tuple[list[Any], str]]) -> None:
    """Where the model's answers are what the tokenizer would make of their text: then a call is no more than its text.

    Messages of others, assistants among them, are given; every call begins with the tokens of the one before.
    """
    tokenizer = letters()
    conversation, messages = Conversation(tokenizer, PLAIN), list(HELLO)
    for given_now, answer in rounds:
        messages += [{"role": role, "content": text} for role, text in given_now]
        before = conversation.ids
        assert conversation.extend(messages, ())[: len(before)] == before
        ids = tokenizer(f"{answer.strip()}<eos>")["input_ids"]
        messages = answered(conversation, messages, answer.strip(), ids, "stop")
        whole = tokenizer.apply_chat_template(messages, chat_template=PLAIN, tokenize=False)
        assert tokenizer.decode(conversation.ids) == whole


def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, PLAIN)
    ids = tokenizer("hi")["input_ids"]
    messages = answered(conversation, HELLO, "hi", ids, "length")
    more = conversation.extend([*messages, {"role": "user", "content": "more"}], ())
    assert tokenizer.decode(more[len(conversation.ids) :]) == "<eos>user>more<eos>assistant>"
    endless = Conversation(tokenizer, PLAIN.replace(" + '<eos>'", ""))  # whose next message begins as the answer ended
    messages = answered(endless, HELLO, "hu", tokenizer("hu")["input_ids"], "length")
    more = endless.extend([*messages, {"role": "user", "content": "more"}], ())
    assert tokenizer.decode(more[len(endless.ids) :]) == "user>moreassistant>"


def test_a_template_that_leaves_thoughts_out_of_older_answers_changes_no_token_of_them(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, FORGETFUL)
    messages = HELLO
    for question in ("one", "two"):
        messages = answered(conversation, messages, "thought word", tokenizer("thought word<eos>")["input_ids"], "stop")
        messages = [*messages, {"role": "user", "content": question}]
    turn = "assistant>thought word<eos>user>"
    whole = tokenizer.decode(conversation.extend(messages, ()))
    assert whole == f"user>hello<eos>{turn}one<eos>{turn}two<eos>assistant>"


def test_a_template_that_does_not_write_the_last_answer_is_refused(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, DEAF)
    messages = answered(conversation, HELLO, "hi", tokenizer("hi<eos>")["input_ids"], "stop")
    with pytest.raises(RequestRejected, match="does not so for the last answer"):
        conversation.extend([*messages, {"role": "user", "content": "more"}], ())


def test_white_space_around_an_answer_may_be_cut_and_nothing_else_changed(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, PLAIN)
    messages = answered(conversation, HELLO, " hi ", tokenizer(" hi <eos>")["input_ids"], "stop")
    more = {"role": "user", "content": "more"}
    cut = [*HELLO, {"role": "assistant", "content": "hi"}, more]
    assert conversation.extend(cut, ()) == conversation.extend([*messages, more], ())
    for changed, why in [
        ([{"role": "user", "content": "hallo"}, messages[1], more], r"messages\[0\] differs"),
        ([messages[0], {"role": "assistant", "content": "ho"}, more], r"messages\[1\] differs"),
        (HELLO, r"messages\[1\] is missing"),
        (messages, "it adds none"),
    ]:
        with pytest.raises(HistoryRewritten, match=why):
            conversation.extend(changed, ())


def test_a_template_that_has_no_form_for_a_message_refuses_it(tokenizer: Any) -> None:
    with pytest.raises(RequestRejected, match=r"cannot render these messages: .*alternate"):
        Conversation(tokenizer, "{{ raise_exception('roles must alternate') }}").extend(HELLO, ())


def test_tools_must_be_rendered_by_the_template_and_must_not_change(tokenizer: Any) -> None:
    with pytest.raises(RequestRejected, match="does not write 'weather'"):
        Conversation(tokenizer, PLAIN).extend(HELLO, WEATHER)
    conversation = Conversation(tokenizer, WITH_TOOLS)
    ids = conversation.extend(HELLO, WEATHER)
    assert tokenizer.decode(ids).startswith("weather user>hello")
    conversation.record(HELLO, WEATHER, ids, {"role": "assistant", "content": "x"}, "stop")
    with pytest.raises(HistoryRewritten, match="must not change"):
        conversation.extend([*HELLO, {"role": "assistant", "content": "x"}, *HELLO], ())
