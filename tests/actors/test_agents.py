"""The built-in agents: a second try after a wrong answer, and calls of functions."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.agents import calculator, schema, with_counts
from actors.endpoint.agent_pool import AgentCode
from actors.rewards.loading import load_reward
from actors.runtime import user_code
from actors.runtime.user_code import add_user_folder
from actors.workflows.loading import check_workflow
from areal_bus.config.loader import resolve
from areal_bus.errors import ConfigError
from areal_bus.messages import MAX_PARTS
from tests.support.talking import agent_config, talking
from tools.offline.synchronous_reference import check_loop

MINE = '''
def score(prompt, completion, row):
    if completion == "fail":
        raise ValueError("no such answer")
    return -1.0 if completion == "bad" else 0.5

def lookup(word: str, times: int = 1) -> str:
    """A word, repeated."""
    return word * times

def takes_list(words: list) -> str: ...

async def later(word: str) -> str:
    return word + "!"

class Calls:
    def __call__(self, word: str) -> str: ...

nameless = Calls()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_folders", [])
    (tmp_path / "mine.py").write_text(MINE)
    add_user_folder(tmp_path)
    return tmp_path


settings = partial(agent_config, data={"task": "sums", "prompt": "{question}=", "chat_template": False})


def test_a_wrong_answer_is_answered_and_a_later_one_is_worth_less(folder: Path) -> None:
    config = settings("multi_turn", reward_fn="exact", max_turns=3, discount=0.5, retry="{question}?")
    row = {"question": "1+2", "answer": "3"}
    with talking(folder, config) as talk:
        first = talk.hold(row, ["3<eos>"])
        assert (first["reward"], first["correct"], first["parts"]) == (1.0, True, {"n_turns": 1})
        third = talk.hold(row, ["4<eos>", "5<eos>", "3<eos>"])
        assert talk.text == "user>1+2=<eos>assistant>4<eos>user>1+2?<eos>assistant>5<eos>user>1+2?<eos>assistant>3<eos>"
        assert [n for n, _ in talk.run.segments] == [len("user>1+2=$assistant>"), *[len("user>1+2?$assistant>")] * 2]
        assert (third["reward"], third["correct"], third["parts"]) == (0.25, True, {"n_turns": 3})
        assert talk.hold(row, ["4<eos>"] * 3)["reward"] == 0.0  # and no fourth call
        score: Any = load_reward("agent", folder)("", "", {"agent": third})
        assert (score.reward, score.correct, score.parts) == (0.25, True, {"n_turns": 3})


def test_the_users_reward_decides_and_its_error_is_no_reward(folder: Path) -> None:
    row = {"question": "1+2", "answer": "3"}
    config = settings("multi_turn", agent={"max_tokens": 40}, reward_fn="mine:score", discount=0.5)
    with talking(folder, config) as talk:
        fields = talk.hold(row, ["bad<eos>"])  # a second message does not fit: the first answer counts
        assert (fields["reward"], fields["correct"], fields["parts"]) == (-1.0, None, {"n_turns": 1})
        failed = talk.hold(row, ["fail<eos>"])
        assert "reward" not in failed
        with pytest.raises(ValueError, match=r"reward_fn: ValueError: no such answer \(.*mine.py:4\)"):
            load_reward("agent", folder)("", "", {"agent": failed})


def test_a_template_that_the_row_cannot_fill_ends_the_run_and_a_judge_has_one_budget(folder: Path) -> None:
    config = settings("multi_turn", reward_fn="exact", retry="{answr}?")
    with (
        talking(folder, config) as talk,
        pytest.raises(ConfigError, match=r"unknown field \{answr\} in workflow.arguments.retry"),
    ):
        talk.hold({"question": "1+2", "answer": "3"}, [])
    judge = config.reward.judge.model_copy(update={"url": "http://127.0.0.1:1/v1"})
    judged = config.model_copy(update={"reward": config.reward.model_copy(update={"judge": judge})})
    built_in = AgentCode.of(judged, folder).built_in
    assert built_in is not None
    assert Path(built_in["reward"]["judge"]["folder"]).is_relative_to(folder.resolve())  # shared by all processes


def test_a_conversation_is_set_by_options_and_its_reward_is_that_of_sources_also_of_named_tasks() -> None:
    sources = [{"task": "gsm8k", "path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1, "reward": "exact"}]
    tree = {"model": {"path": "m"}, "data": {"source": sources}, "workflow": {"function": "multi_turn"}}
    options = ("workflow.arguments.reward_fn=math", "workflow.arguments.max_turns=3")
    config = resolve(tree, "mine.toml", options, {})
    assert config.workflow.arguments == {"reward_fn": "math", "max_turns": 3}
    assert [source.reward for source in config.data.source] == ["agent", "exact"]


def test_a_loop_in_one_process_refuses_conversations_in_other_processes() -> None:
    with pytest.raises(ConfigError, match="no conversations in worker processes"):
        check_loop(settings("multi_turn", reward_fn="exact"), 1)


def test_counts_fit_among_the_parts_of_a_reward() -> None:
    parts = with_counts({"reward": 1.0, "parts": {str(part): 0.0 for part in range(MAX_PARTS)}}, n_turns=2)["parts"]
    assert (len(parts), parts["n_turns"]) == (MAX_PARTS, 2)


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tool_results_and_tool_errors_are_returned_to_the_model(folder: Path) -> None:
    config = settings("tools", reward_fn="exact", tools="calculator, mine:lookup, mine:later", max_turns=3)
    row = {"question": "1+2", "answer": "3"}
    sum_of, twice = called("calculator", '{"expression": "1+2"}'), called("lookup", '{"word": "ab", "times": 2}')
    with talking(folder, config) as talk:
        right = talk.hold(row, [sum_of + twice + "<eos>", "3<eos>"])
        tools = "tool calculator;tool lookup;tool later;"
        assert talk.text == (
            f"{tools}user>1+2=<eos>assistant>{sum_of}{twice}<eos>tool>3<eos>tool>abab<eos>assistant>3<eos>"
        )
        assert [n for n, _ in talk.run.segments] == [
            len(f"{tools}user>1+2=$assistant>"),
            len("tool>3$tool>abab$assistant>"),
        ]
        assert (right["reward"], right["parts"]) == (1.0, {"n_tool_calls": 2, "n_failed_calls": 0})
        wrong = [called("calculator", '{"expression": "x"}'), called("delete", "{}"), called("lookup", '{"wort": "a"}')]
        last = talk.hold(row, ["".join(wrong) + "<eos>", "4<eos>"])
        told = [message["content"] for message in last["messages"] if message["role"] == "tool"]
        assert [text.partition(":")[0] for text in told] == ["error"] * 3
        assert "there is no tool 'delete': the tools are calculator, lookup, later" in told[1]
        assert (last["reward"], last["parts"]) == (0.0, {"n_tool_calls": 3, "n_failed_calls": 3})
        talk.hold(row, [called("later", '{"word": "ab"}') + "<eos>", "3<eos>"])  # an async function
        assert "tool>ab!<eos>" in talk.text
        endless = talk.hold(row, [sum_of + "<eos>"] * 3)  # the last answer is a call: it answers nothing
        assert (endless["reward"], endless["parts"]["n_tool_calls"]) == (0.0, 2)


EXACT = {"reward_fn": "exact"}
UNFIT: dict[str, list[tuple[dict[str, Any], str]]] = {
    "multi_turn": [
        ({}, "needs reward_fn: set workflow.arguments.reward_fn"),
        (EXACT | {"max_turn": 2}, "takes no argument max_turn: the nearest is max_turns"),
        (EXACT | {"max_turns": "2"}, "max_turns of 'multi_turn' must be a whole number"),
        (EXACT | {"max_turns": 0}, "max_turns must be at least 1"),
        (EXACT | {"retry": "{"}, "retry must be a template"),
        ({"reward_fn": "mine:nothing"}, "workflow.arguments.reward_fn 'mine:nothing' must name a function"),
        ({"reward_fn": "agent"}, "reward_fn must score an answer: 'agent' is what 'multi_turn' returns"),
        ({"reward_fn": "judge"}, 'the reward "judge" needs reward.judge.url'),
        ({"reward_fn": "weighted"}, "add a table"),
    ],
    "tools": [
        (EXACT, "missing tools: set workflow.arguments.tools or workflow.arguments.mcp"),
        (EXACT | {"mcp": "true"}, "workflow.arguments.mcp: the MCP server 'true' failed in initialize: it has ended"),
        (EXACT | {"tools": "abacus"}, 'must list calculator or "module:function"'),
        (
            EXACT | {"tools": "mine:nothing"},
            r"missing function 'nothing' in module 'mine' \(workflow.arguments.tools\)",
        ),
        (EXACT | {"tools": "mine:nameless"}, "invalid tool"),
        (EXACT | {"tools": "mine:lookup, mine:lookup"}, "'lookup' occurs twice"),
        (EXACT | {"tools": "mine:takes_list"}, "its type must be str, int, float or bool"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("function", UNFIT)
def test_arguments_that_do_not_fit_are_a_sentence(folder: Path, function: str) -> None:
    for arguments, why in UNFIT[function]:
        with pytest.raises(ConfigError, match=why):
            check_workflow(settings(function, **arguments))


def test_a_tool_is_described_by_its_signature() -> None:
    def add(a: int, b: float = 1.0, *, exact: bool = True) -> float:
        """The sum."""
        return a + b

    assert schema(add)["function"] == {
        "name": "add",
        "description": "The sum.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "exact": {"type": "boolean"}},
            "required": ["a"],
        },
    }


@given(st.integers(-999, 999), st.sampled_from(["+", "-", "*"]), st.integers(0, 999))
def test_the_calculator_counts_as_python_does(a: int, operation: str, b: int) -> None:
    assert calculator(f"({a}) {operation} {b}") == str(eval(f"({a}) {operation} {b}"))


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "2**65", "(2**64)**64*2**64", "1/0", "1e308*10", "(-1)**0.5", "abs(1)", "'a'*9", "a", "1 if 1 else 2",
     "True+1", "1j", "(" * 150, "1;2", "", "1" * 201, "__import__('os')"],
)  # fmt: skip
def test_the_calculator_refuses_input_other_than_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError, SyntaxError, MemoryError)):
        calculator(expression)
