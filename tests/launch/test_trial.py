"""The user's workflow and reward are called once before an actor starts: a fault costs one line."""

from pathlib import Path

import pytest

from areal_bus.config.loader import load
from launch.run.prepare import prepare
from tests.launch.test_prepare import file, refusal

__all__ = ["file"]

WORKFLOW = """
from actors.workflows.protocol import Episode
class Mine:
    def __init__(self, config): pass
    {episode}
"""
ASKS = "turn = await ask(ask.tokenizer('ab')['input_ids']); return Episode(turn.text, row={'seen': row['answer']})"


def with_workflow(file: Path, name: str, episode: str) -> str:
    """The setting of a workflow in a module of its own."""
    (file.parent / f"{name}.py").write_text(WORKFLOW.format(episode=episode))
    return f"workflow.function={name}:Mine"


def with_reward(file: Path, name: str, body: str) -> str:
    (file.parent / f"{name}.py").write_text(f"def score(prompt, completion, row):\n    {body}\n")
    return f"reward.function={name}:score"


@pytest.mark.parametrize(
    ("name", "episode", "found"),
    [
        ("flow_plain", "def episode(self, row, ask): ask([3])", "it returned a NoneType"),
        ("flow_lambda", "episode = lambda self, row, ask: Episode('a')", "it returned a Episode"),
        ("flow_yields", "async def episode(self, row, ask): yield 1", "it returned a async_generator"),
        ("flow_short", "async def episode(self, row): return 1", "TypeError"),
        (
            "flow_key",
            "async def episode(self, row, ask): row['gold']",
            "no field 'gold', it has answer, question, unit",
        ),
        ("flow_text", "async def episode(self, row, ask): await ask([3]); return 'a'", "must return an Episode"),
        (
            "flow_silent",
            "async def episode(self, row, ask): return Episode('a')",
            "at least one token; it sampled none",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'Asker.__call__' was never awaited")
def test_a_workflow_that_cannot_run_is_refused_at_the_start_with_the_users_file(
    file: Path, name: str, episode: str, found: str
) -> None:
    output = refusal(file, with_workflow(file, name, episode))
    assert output.startswith(f"workflow.function '{name}:Mine' failed in a trial before the start, on ")
    assert "rows.jsonl:1" in output
    assert found in output
    assert f"{name}.py:" in output or name == "flow_short"  # the call itself fails


@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        ("score_key", "return float(completion == row['gold'])", "KeyError: 'gold' ("),
        ("score_name", "return flaot(completion)", "NameError"),
        ("score_none", "pass", "NoneType"),
        ("score_text", "return 'right'", "str"),
    ],
)
def test_a_reward_that_fails_for_every_completion_is_refused_at_the_start(
    file: Path, name: str, body: str, found: str
) -> None:
    output = refusal(file, with_reward(file, name, body))
    assert output.startswith(f"reward.function '{name}:score' failed in a trial before the start, on ")
    assert "rows.jsonl:1: " in output
    assert found in output
    if name == "score_key":
        assert "no field 'gold', it has answer, question, unit" in output


def test_a_reward_that_fails_for_some_completions_only_starts(file: Path) -> None:
    prepare(load(file, [with_reward(file, "score_some", "return 1.0 / len(completion)")], {}), file)
    last = with_reward(file, "score_last", "return 1.0 if completion != row['answer'] else 1 / 0")
    prepare(load(file, [last], {}), file)


def test_code_that_fails_for_some_rows_only_starts(file: Path) -> None:
    flow = "async def episode(self, row, ask):\n        if 'unit' in row: raise ValueError\n        "
    prepare(load(file, [with_workflow(file, "flow_fussy", flow + ASKS)], {}), file)
    prepare(load(file, [with_reward(file, "score_fussy", "return 1.0 if 'unit' not in row else 1 / 0")], {}), file)


def test_the_reward_sees_the_text_and_the_fields_of_the_workflows_episode(file: Path) -> None:
    flow = with_workflow(file, "flow_good", f"async def episode(self, row, ask): {ASKS}")
    seen = "assert row['seen'] == row['answer'] and completion in ('c', '<unk>', ''); return 1.0"
    prepare(load(file, [flow, with_reward(file, "score_seen", seen)], {}), file)
    wrong = with_reward(file, "score_unseen", "return row['unseen']")
    assert "it has answer, question, seen, unit" in refusal_again(file, flow, wrong)


def refusal_again(file: Path, *overrides: str) -> str:
    """As `refusal`, beside a run that has started."""
    (file.parent / "runs").rename(file.parent / "runs-before")
    return refusal(file, *overrides)


def test_a_workflow_that_never_stops_asking_does_not_hold_up_the_start(file: Path) -> None:
    body = "ids = [3]\n        while True: ids = [*ids, *(await ask(ids)).ids]"
    prepare(
        load(file, [with_workflow(file, "flow_endless", f"async def episode(self, row, ask):\n        {body}")], {}),
        file,
    )
