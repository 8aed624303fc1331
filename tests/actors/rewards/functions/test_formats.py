"""The reward "format": templates and patterns of a whole completion."""

import pytest

from actors.rewards.functions import formats
from actors.rewards.functions.formats import FormatOptions


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        (
            "think_answer",
            ["<think>a</think><answer>b</answer>", "\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n"],
            [
                "",
                "b",
                "<think></think><answer>b</answer>",
                "<think>a</think><answer> </answer>",
                "so <think>a</think><answer>b</answer>",
                "<think>a</think>and<answer>b</answer>",
                "<think>a</think><answer>b</answer>.",
                "<answer>b</answer><think>a</think>",
                "<think>a</think><answer>b</answer><answer>c</answer>",
                "<think>a<answer>b</think></answer>",
            ],
        ),
        (
            "think",
            ["<think>a</think>b", "a</think> b"],
            ["a", "a</think>", "</think>b", "a</think>b</think>c", "a<think></think>b"],
        ),
        (
            "boxed",
            [r"so \boxed{2}", r"\boxed{\frac{1}{2}}.", r"\boxed{\{1\}}"],
            ["2", r"\boxed{}", r"\boxed{2", r"\boxed{1} \boxed{", r"\boxed{\}"],
        ),
        (
            "code",
            ["```python\nx = 1\n```", "as here:\n```\nx\n```\nDone."],
            ["x", "```python\nx", "```\n```", "```\na\n```\n```\nb\n```"],
        ),
    ],
)  # fmt: skip
def test_a_format_has_all_of_its_parts_once(template: str, right: list[str], wrong: list[str]) -> None:
    is_right = formats.TEMPLATES[template]
    assert [text for text in right if not is_right(text.strip())] == []
    assert [text for text in wrong if is_right(text.strip())] == []


def test_a_pattern_is_for_the_whole_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_options", FormatOptions(pattern=r"Answer: \d+.*"))
    assert [formats.score("", text, {}).reward for text in (" Answer: 12\nok\n", "The Answer: 12", "Answer: x")] == [
        1,
        0,
        0,
    ]
