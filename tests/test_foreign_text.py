"""Text of a model, of user code or of a peer: every scan over it is linear, none raises, none controls a terminal."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.agents import calculator
from actors.data.tasks import boxed
from actors.endpoint.tool_calls import FORMS, MOST_CALLS, read_calls
from actors.engines.stop_strings import before_stop
from actors.head import alerts
from actors.rewards.functions import formats, reasoning
from actors.rewards.judge import grade_of
from actors.runtime.context import Context
from actors.runtime.process import CRASHED, OVER
from actors.runtime.start import report, sentence
from actors.runtime.user_code import describe, shown
from areal_bus.core.evaluation import final_answer
from areal_bus.core.members.console_reports import VARIES
from areal_bus.errors import UserCodeFailed
from areal_bus.foreign_text import cut, described, printable, valid, valid_json
from areal_bus.weights.process_group import brief
from areal_code import scoring as code
from areal_math import plain_numbers
from areal_math.verdict import is_right
from tools import terminal
from tools.alarms import alarm_reader

IN_A_LOOP = 100_000, 0.05  # characters, and the CPU seconds of a scan that others wait for; a quadratic one takes many
IN_A_WORKER = 20_000, 0.2  # of a scan in a worker process, which has a deadline

UNITS = (
    *("\\boxed{", "\\boxed {", "\\boxed", "\\fbox{"),
    *("{", "}", "{}", "\\{", "\\", '"', "'", "$", "\\[", "(", "[", "[[", "[a.c:"),
    *("<", "<think>", "</think>", "<answer>", "</answer>", "<answer>x", "<tool_call>", "<tool_call>{", "</tool_call>"),
    *("<parameter=", "<function=a>", "[TOOL_CALLS]", "[ARGS]", "[f(", "[f(a=", "[f(),"),
    *('<tool_call>{"name":"a"}</tool_call>', "<tool_call>x</tool_call>", '{"name":', "####", "#### ", "####\n", "```"),
    *("``` ", "```python ", "```python\n", "~~~", "0", "1,", "1,000", "1.", "1/", "-", "-1"),
    *(" ", "\t", "\n", " \n", "\r"),
    *("a", "a ", "answer is ", "answer:", "answer is not ", "score", "score: ", "score: 1 ", "*", "_", "\\text{"),
    *("\\frac{1}{", "\\sqrt{", "^{", "=", "1+", "is ", ". ", "(A)", "or ", "\\begin{matrix}", "%"),
    *("\x00", "\x1b[2J", "é", "\ud83d", "\u202e", "\U0001f600"),
)  # fmt: skip
BEFORE = ("", "\\boxed{", "<tool_call>", "<answer>", "#### ", "```", "score:", "answer is ", "5")
AFTER = ("", "}", "</answer>", "</tool_call>", "x")

IN_LOOPS: dict[str, Callable[[str], object]] = {  # in the head, a generator, a reward or a tool
    "final_answer": final_answer,
    **{
        f"tool calls ({name})": lambda text, form=form: read_calls(text, form, 0)  # type: ignore[misc]
        for name, form in FORMS.items()
    },
    "stop strings": lambda text: before_stop(text, ("stop", "\n\n\nEnd")),
    "answers of alerts": alerts._short,
    "kinds of errors": lambda text: VARIES.sub("*", text),
    "error of a push": lambda text: brief(RuntimeError(text)),
    "repeats": alarm_reader.repeated_share,
    "template": lambda text: alarm_reader.template_of("what is 5", text),
    "one line": terminal.one_line,
    "valid": valid,
    "printable": printable,
    "box of a row": boxed,
}
IN_WORKERS: dict[str, Callable[[str], object]] = {
    **{f"format {name}": template for name, template in formats.TEMPLATES.items()},
    "last number": plain_numbers.last_number,
    "number": plain_numbers.read_number,
    "code block": code.program_in,
    "printed output": lambda text: code.same_output(text, "5"),
    "grade of a judge": lambda text: grade_of(text, 10),
    "reasoning": reasoning.answer_of,
    "math, a number": lambda text: is_right(text, "5"),
    "math, a formula": lambda text: is_right(text, "x + \\frac{1}{2}"),
    "math, a letter": lambda text: is_right(text, "B"),
    "calculator": calculator,
    "quotation": lambda text: terminal.quote(text, indent="| ", width=100),
}


def seconds_of(scan: Callable[[str], object], text: str, *, most_s: float) -> float:
    """CPU time of the fastest of a few tries; ValueError and SyntaxError are answers, too."""
    best = float("inf")
    for _ in range(4):
        began = time.thread_time()
        with contextlib.suppress(ValueError, SyntaxError):
            scan(text)
        best = min(best, time.thread_time() - began)
        if best < most_s:
            break
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_LOOPS, *IN_WORKERS])
def test_a_scan_is_linear_in_repeated_characters_and_tags(name: str) -> None:
    n, most_s = IN_A_LOOP if name in IN_LOOPS else IN_A_WORKER
    scan = IN_LOOPS.get(name) or IN_WORKERS[name]
    for unit in UNITS:
        body = unit * (n // len(unit))
        for text in (*(f"{before}{body}" for before in BEFORE), *(f"{body}{after}" for after in AFTER[1:])):
            spent = seconds_of(scan, text, most_s=most_s)
            assert spent < most_s, f"{text[:40]!r} ... {text[-12:]!r}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{1} then \\boxed{2{}", "1"),
        ("\\boxed{\\boxed{3}", "3"),
        ("\\boxed{a{b}c} }", "a{b}c"),
        ("} \\boxed{4}", "4"),
        ("{ \\boxed{4}", "4"),
        ("\\boxed{1 \\boxed{2} 3}", "2"),
        ("#### 7\n<answer>8</answer>", "8"),
        ("<answer>8</answer>\n#### 7", "7"),
        ("<answer>#### 7</answer>", "####7"),
        ("<answer>#### 7\nx", "7"),
        ("<answer><answer>9</answer>", "<answer>9"),
        ("<answer></answer> 5", ""),
        ("#### \n 5", ""),
    ],
)
def test_final_answer_reads_boxes_and_marks_as_before(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_an_answer_with_too_many_tool_calls_is_text() -> None:
    one = '<tool_call>{"name":"a"}</tool_call>'
    assert len(read_calls(one * MOST_CALLS, FORMS["hermes"], 0)[1]) == MOST_CALLS
    assert read_calls(one * (MOST_CALLS + 1), FORMS["hermes"], 0) == (one * (MOST_CALLS + 1), [])


def test_a_tool_call_with_half_a_pair_is_valid_unicode() -> None:
    _, [call] = read_calls(
        '<tool_call>{"name": "a\\ud83d", "arguments": {"b\\ud83d": "\\udc00"}}</tool_call>', FORMS["hermes"], 0
    )
    assert call["function"]["name"] == "a\ufffd"
    assert json.loads(call["function"]["arguments"]) == {"b\ufffd": "\ufffd"}


def test_text_becomes_valid_cut_and_printable() -> None:
    assert valid("a\ud83db") == "a\ufffdb"
    assert valid("\U0001f600") == "\U0001f600"
    assert valid_json({"a": ["\ud83d"]}) == {"a": ["\ufffd"]}
    assert cut("abcdef", 5) == "ab..."
    assert cut("abcde", 5) == "abcde"
    assert printable("\x1b[2J\x07a\nb\u202e\ud83d\x9b") == "\\x1b[2J\\x07a\nb\\u202e\\ud83d\\x9b"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Ending(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_any_error_of_user_code_is_described_shortly() -> None:
    assert described(Ending()) == "Ending: (its text raises SystemExit)"
    assert described(type("\u4e00" * 65_000, (ValueError,), {})("bad")) == "\u4e00" * 197 + "...: bad"
    assert described(ValueError("\u4e00" * 21_000)) == "ValueError: " + "\u4e00" * 1997 + "..."
    assert described(ValueError("bad \ud83d")) == "ValueError: bad \ufffd"
    assert described(Mute()) == "Mute: (its text raises RuntimeError)"
    assert described(ValueError()) == "ValueError"
    assert describe(Mute(), "agent.py:3") == "Mute: (its text raises RuntimeError) (agent.py:3)"
    assert sentence(ValueError("x" * 65_000), CRASHED) == "ValueError: " + "x" * 1997 + "..."


def test_an_error_is_described_in_a_working_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="bad") as raised:
        raise ValueError("bad")
    assert describe(raised.value).startswith("ValueError: bad")
    assert shown("logs/x.txt") == "logs/x.txt"
    assert shown("/logs/x.txt") == "/logs/x.txt"


def test_the_report_of_an_actor_is_one_printable_line_and_keeps_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    identity = {"role": "generator", "index": 3, "incarnation": 0, "rank": 2, "job": "job", "head": "", "address": ""}
    about = {"interface": "", "device": "cpu", "n_generators": 1, "n_rewards": 1, "n_learners": 1}
    folders = {"run_folder": str(tmp_path), "config_folder": "", "model_folder": ""}
    context = Context.from_json(json.dumps({**identity, **about, **folders}))
    first = sentence(UserCodeFailed("bad \ud83d \x1b[2J"), OVER)
    assert report(context, first, code=OVER) == OVER
    assert capfd.readouterr().err == "rank 2 (generator-3): bad \ufffd \\x1b[2J\n"
    assert (tmp_path / "logs" / "generator-3.0.error.txt").exists()
