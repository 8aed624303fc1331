"""Tool calls in the forms of the model families."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from actors.endpoint.tool_calls import FORMS, MOST_PYTHON, form_of, read_calls, split_thought, text_with_marks

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", 'so <tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>', "so ", [("f", {"a": [1]})]),
        (
            "hermes",
            'so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name": "g"}</tool_call>',
            "so ",
            [("f", {"a": 1}), ("g", {})],
        ),
        ("llama3_json", ' {"name": "f", "parameters": {"a": "x"}} ', "", [("f", {"a": "x"})]),
        ("llama3_json", 'I look.<|python_tag|>{"name": "f", "arguments": {}}', "I look.", [("f", {})]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
        (
            "qwen3_xml",
            "ok\n<tool_call>\n<function=search>\n<parameter=q>\n42\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            "ok\n",
            [("search", {"q": "42", "n": 3})],
        ),
        (
            "qwen3_xml",
            "<tool_call><function=search><parameter=q>\na\n  <b>\n</parameter><parameter=n>many</parameter></function>"
            "</tool_call><tool_call>\n<function=other>\n</function>\n</tool_call>",
            "",
            [("search", {"q": "a\n  <b>", "n": "many"}), ("other", {})],
        ),
        (
            "mistral",
            'well[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
            "well",
            [("f", {"a": 1}), ("g", {})],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": "{"}', "", [("f", {"a": 1}), ("g", {"b": "{"})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]000000001[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
        (
            "pythonic",
            "[f(a=1, b='x', c=[True, None], d={'k': -1.5}), ns.g()]",
            "",
            [("f", {"a": 1, "b": "x", "c": [True, None], "d": {"k": -1.5}}), ("ns.g", {})],
        ),
    ],
)
def test_a_call_of_each_form_is_read(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found, records = read_calls(text, FORMS[form], 7, TOOLS)
    assert [(r["function"]["name"], json.loads(r["function"]["arguments"])) for r in records] == calls
    assert found == content
    ids = [record["id"] for record in records]
    assert ids[0] == ("000000007" if form == "mistral" else "call_7")
    assert len(set(ids)) == len(ids)


NO_CALLS = {
    "hermes": [
        "no call",
        *(
            f"<tool_call>{call}</tool_call>"
            for call in (
                *('{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "arguments": "a"}', '{"name": 1}', "{"),
                *(f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("NaN", "[-Infinity]", "1e999")),
                '{"name": "f"}</tool_call><tool_call>[]',  # only where all are valid
            )
        ),
    ],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": NaN}}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        *('{"answer": 5}', "5"),
    ],
    "qwen3_xml": [
        "<tool_call>{}</tool_call>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "<tool_call><function=f>1</function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
    ],
    "mistral": [
        *('[TOOL_CALLS][{"name": "f", "arguments": [1]}]', "[TOOL_CALLS][1]", "[TOOL_CALLS]3"),
        *('[TOOL_CALLS]{"a": 1}', "[TOOL_CALLS]f[ARGS]{"),
    ],
    "pythonic": [
        *("[f(1)]", "[f(a=g())]", "[f(a={1, 2})]", "[f(**{'a': 1})]", "[(lambda: 1)()]", "[f(a=1e999)]", "[f(a=b'x')]"),
        *("[f(a=" + "9" * 5000 + ")]", "[f(a=" + "(" * 1000 + ")]", "[f(a=" + "-" * (MOST_PYTHON - 10) + "1)]"),
        *("[f(a='" + "x" * MOST_PYTHON + "')]", "The list [1, 2] has f(x)"),
    ],
}


@pytest.mark.parametrize("form", NO_CALLS)
def test_an_answer_without_a_valid_call_is_text(form: str) -> None:
    for text in NO_CALLS[form]:
        assert read_calls(text, FORMS[form], 0, TOOLS) == (text, [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>\n' }}", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_xml"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ('{"name": function name, "parameters": dictionary} Environment: ipython', "llama3_json"),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_chat_template_tells_the_form(template: str, form: str) -> None:
    assert form_of(template) is FORMS[form]


def test_marks_that_are_special_tokens_are_read_and_other_special_tokens_are_not() -> None:
    names = ["[TOOL_CALLS]", "</s>", '[{"name": "f"}]']
    tokenizer = SimpleNamespace(
        all_special_ids=[0, 1],
        convert_ids_to_tokens=names.__getitem__,
        decode=lambda ids, skip_special_tokens: "".join(names[i] for i in ids),
    )
    assert text_with_marks(tokenizer, [0, 2, 1]) == '[TOOL_CALLS][{"name": "f"}]'


CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "thought"),
    [
        ("", "<think>a</think>b", "<think>a</think>"),
        ("", "a</think>b", "a</think>"),
        ("", "<think>a<tool_call>{}</tool_call>", "<think>a<tool_call>{}</tool_call>"),
        ("", "<think>a</think>b<think>c", "<think>a</think>b<think>c"),
        ("", "b", ""),
        ("assistant\n<think>\n", CALL, CALL),  # opened by the prompt, and never closed
        ("assistant\n<think>\n", f"a</think>{CALL}", "a</think>"),
        ("assistant\n<think>\n\n</think>\n\n", CALL, ""),
    ],
)
def test_a_thought_is_split_from_the_answer(prompt: str, text: str, thought: str) -> None:
    assert split_thought(text, prompt) == (thought, text.removeprefix(thought))
