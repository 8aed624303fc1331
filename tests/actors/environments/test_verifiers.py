"""Environments of the package verifiers run unchanged, in processes of their own, by way of the endpoint."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.data.loading import load_problems, load_rows
from actors.environments.environment_code import EnvironmentCode
from actors.environments.loading import installed, load
from actors.rewards.loading import load_reward
from actors.runtime import user_code
from actors.runtime.user_code import add_user_folder
from areal_bus.config.loader import load as load_config
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, WorkflowError
from tests.support.talking import agent_config, talking

CONFIGS = Path(__file__).parents[3] / "configs"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason='needs the extra envs: pip install "areal-bus[envs]"'
)
ODD = """
import os
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"word {i}", "answer": "yes", "info": {"number": i}} for i in range(10)]

def right(completion, answer, info):
    return float(completion[-1]["content"] == answer)

def raises(completion):
    return 1 / 0

def no_number(completion):
    return float("nan")

def listed(completion):
    return [1.0]

def too_few(completions):
    return [1.0]

def of_a_group(completions):
    return [1.0] * len(completions)

class Stops(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if state["answer"] == "dies":
            os.kill(os.getpid(), 9)
        if state["answer"] == "dies once" and not os.path.exists(state["info"]["died"]):
            open(state["info"]["died"], "w").close()
            os.kill(os.getpid(), 9)
        if state["answer"] == "breaks":
            raise vf.SandboxError("the sandbox is gone")
        if state["answer"] == "tells its key":
            return [{"role": "user", "content": os.environ["OPENAI_API_KEY"]}]
        return [{"role": "user", "content": "x" * int(state["info"]["number"])}]

async def shares(completions, answers, infos) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [n / sum(lengths) + (answer == "no") + infos[0]["number"] for n, answer in zip(lengths, answers)]

def load_environment(rewards="right", fails=False, single=False):
    if fails:
        raise ValueError("no data today")
    funcs = [globals()[name] for name in rewards.split()]
    kind, more = (vf.SingleTurnEnv, {}) if single else (Stops, {"max_turns": 3})
    weights = [0.5 if single else 1.0] * len(funcs)
    return kind(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=funcs, weights=weights), **more)
"""

TASKSET = """
import verifiers.v1 as vf

class WordData(vf.TaskData):
    answer: str

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (4 - len(trace.last_reply))

class WordConfig(vf.TasksetConfig):
    words: str = "abc defg"

class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for number, word in enumerate(self.config.words.split()):
            yield WordTask(WordData(idx=number, prompt=word, answer=word[::-1]), self.config.task)

__all__ = ["WordTaskset"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config's folder with the example and with an environment that fails in many ways."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_folders", [])
    (tmp_path / "turned_words.py").write_text((CONFIGS / "turned_words.py").read_text())
    (tmp_path / "odd_environment.py").write_text(ODD)
    (tmp_path / "word_taskset.py").write_text(TASKSET)
    add_user_folder(tmp_path)
    return tmp_path


def settings(name: str, *, agent: dict[str, Any] | None = None, **arguments: Any) -> Config:
    return agent_config(f"verifiers:{name}", agent=agent, **arguments)


def row_of(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """As the data of a run has it."""
    prompt = [{"role": "user", "content": question}]
    return {
        "question": question,
        "verifiers": {"prompt": prompt, "question": question, "answer": answer, "example_id": 0, **more},
    }


@pytest.mark.slow
@needs_package
def test_a_conversation_has_the_environments_messages_and_the_sampled_tokens(folder: Path) -> None:
    with talking(folder, settings("turned-words", kind="multi_turn")) as talk:
        once = talk.hold(row_of("abc", "cba"), ["cba<eos>"])
        assert talk.text == "user>abc<eos>assistant>cba<eos>"
        assert (once["reward"], once["correct"], once["stop_condition"]) == (1.0, True, "is_right")
        twice = talk.hold(row_of("abc", "cba"), ["abc<eos>", "cbx<eos>"])
        assert talk.text == "user>abc<eos>assistant>abc<eos>user>abc<eos>assistant>cbx<eos>"
        assert talk.run.segments == [[len("user>abc$assistant>"), 4], [len("user>abc$assistant>"), 4]]
        assert talk.run.spans == [[0, 4], [1, 4]]  # a version for each sampled token, none for the others
        assert twice["parts"] == {"right": 0.0, "letters_in_place": 2 / 3, "num_turns": 2.0}
        assert (twice["reward"], twice["correct"]) == (pytest.approx(1 / 3), False)
        assert [message["role"] for message in twice["messages"]] == ["user", "assistant"] * 2
        score: Any = load_reward("agent", folder)("", "", {"agent": twice})
        assert (score.reward, score.correct, dict(score.parts)) == (twice["reward"], False, twice["parts"])
        empty = talk.hold(row_of("abc", "cba"), ["<eos>", "<eos>"])  # an answer of no text is an answer
        assert (empty["reward"], empty["parts"]["num_turns"]) == (0.0, 2.0)


@pytest.mark.slow
@needs_package
def test_a_tool_of_the_environment_is_called_and_its_result_enters_no_loss(folder: Path) -> None:
    call = '<tool_call>{"name": "letters", "arguments": {"word": "abc"}}</tool_call>'
    with talking(folder, settings("turned-words", kind="tool")) as talk:
        fields = talk.hold(row_of("abc", "cba"), [call + "<eos>", "cba<eos>"])
        assert talk.text == f"tool letters;user>abc<eos>assistant>{call}<eos>tool>c b a<eos>assistant>cba<eos>"
        assert [n for n, _ in talk.run.segments] == [
            len("tool letters;user>abc$assistant>"),
            len("tool>c b a$assistant>"),
        ]
        assert (fields["reward"], fields["parts"]["letters_calls"], fields["parts"]["total_tool_calls"]) == (
            1.0,
            1.0,
            1.0,
        )
        bad = talk.hold(row_of("abc", "cba"), ["<tool_call>{letters}</tool_call><eos>"])  # no call: text
        assert (bad["reward"], bad["stop_condition"]) == (0.0, "no_tools_called")


@pytest.mark.slow
@needs_package
def test_a_rubric_that_raises_gives_an_error_and_never_a_reward(folder: Path) -> None:
    with talking(folder, settings("odd_environment", rewards="right raises no_number listed")) as talk:
        fields = talk.hold(row_of("word", "yes", info={"number": 1}), ["yes<eos>"] * 3)
    assert "reward" not in fields
    why = (
        r"^reward function raises: ZeroDivisionError: .*odd_environment.py:\d+\); "
        r"reward function no_number: ValueError: it must return a finite number: it returned nan; "
        r"reward function listed: TypeError"
    )
    with pytest.raises(ValueError, match=why):
        load_reward("agent", folder)("", "", {"agent": fields})


@pytest.mark.slow
@needs_package
def test_a_conversation_that_cannot_go_on_fails_its_sample_and_one_whose_process_is_killed_is_restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    with talking(folder, settings("odd_environment", agent={"max_tokens": 100})) as talk:
        with pytest.raises(WorkflowError, match="SandboxError: the sandbox is gone"):
            talk.hold(row_of("word", "breaks", info={"number": 1}), ["no<eos>"] * 3)
        long = talk.hold(row_of("word", "yes", info={"number": 40}), ["yes<eos>"] * 3)
        assert (long["reward"], long["stop_condition"], long["is_truncated"]) == (1.0, "prompt_too_long", True)
        talk.hold(row_of("word", "tells its key", info={"number": 1}), ["yes<eos>"] * 3)
        assert "user>the user's own<eos>" in talk.text  # so that a judge of the environment is not this policy
        row = row_of("word", "dies once", info={"number": 1, "died": str(folder / "died")})
        fields = talk.hold(row, ["before<eos>", "dies once<eos>", "no<eos>", "dies once<eos>"])
        assert (fields["reward"], fields["n_killed"], fields["stop_condition"]) == (1.0, 1, "max_turns_reached")
        assert "before" not in talk.text
        assert talk.run.n_forgotten == len("before$")
        assert [version for version, _ in talk.run.spans] == [1, 2, 3]
        with pytest.raises(WorkflowError, match="ended by signal SIGKILL"):  # each process of this one
            talk.hold(row_of("word", "dies", info={"number": 1}), ["no<eos>"] * 3)


@needs_package
@pytest.mark.slow
def test_an_environment_brings_its_rows_and_holds_some_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "actors").mkdir()
    (folder / "actors" / "__init__.py").write_text("raise RuntimeError('a package of the user')")
    monkeypatch.chdir(folder)  # the process that reads the rows finds our packages
    config = settings("turned-words", n_words=100)
    rows, problems = load_rows(config, folder), load_problems(config, folder)
    assert (len(rows), len(problems)) == (50, 50)  # it has an evaluation set
    assert rows[0]["verifiers"]["prompt"] == [{"role": "user", "content": rows[0]["question"]}]
    assert not {row["question"] for row in rows} & {row["question"] for row in problems}
    one = settings("odd_environment")
    rows, problems = load_rows(one, folder), load_problems(one, folder)
    assert (len(rows), len(problems)) == (8, 2)  # one set: a fifth of it at most
    assert sorted(row["verifiers"]["info"]["number"] for row in rows + problems) == list(range(10))
    assert load_problems(one, folder) == problems


@needs_package
@pytest.mark.slow
def test_a_taskset_of_the_newer_api_runs_by_its_own_chat_loop(folder: Path) -> None:
    config = settings("word-taskset", words="abc defg hij klm nop qrs", agent={"max_tokens": 60})
    rows, problems = load_rows(config, folder), load_problems(config, folder)
    assert sorted(row["question"] for row in rows + problems) == ["abc", "defg", "hij", "klm", "nop", "qrs"]
    row = next(row for row in rows if row["question"] != "defg")
    word, answer = row["question"], row["answer"]
    with talking(folder, config) as talk:
        fields = talk.hold(row, [f"{answer}<eos>"])
        assert talk.text == f"user>{word}<eos>assistant>{answer}<eos>"
        assert (fields["reward"], fields["parts"]) == (1.0, {"right": 1.0, "short": 1.0})
        assert talk.hold(row, ["<eos>"])["reward"] == 0.125  # an answer of no text is an answer
        failed = talk.hold(row, ["four<eos>"])
        with pytest.raises(ValueError, match="TaskError: task WordTask scoring: ZeroDivisionError"):
            load_reward("agent", folder)("", "", {"agent": failed})
        long = {**row, "verifiers": {**row["verifiers"], "prompt": "x" * 60}}
        with pytest.raises(WorkflowError, match="without a call"):  # nothing was sampled
            talk.hold(long, [])


TRIES = """
import json, sys
from actors.environments.environment_code import EnvironmentCode
from actors.environments.loading import load
from areal_bus.errors import ConfigError

for name, arguments in json.loads(sys.argv[2]):
    try:
        is_grouped = arguments.pop("grouped", False)
        load(EnvironmentCode(name, json.dumps(arguments), "", sys.argv[1], is_grouped=is_grouped))
    except ConfigError as error:
        print(str(error).replace("\\n", " "))
"""
UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("turned_word", {}, "there is no module 'turned_word'; the nearest is 'verifiers:turned_words'"),
    ("chess", {}, "there is no module 'chess'; the environments here are odd_environment, turned_words, word_taskset"),
    ("turned-words", {"longer": 3}, "load_environment raised TypeError: load_environment() got an unexpected keyword"),
    ("odd_environment", {"fails": True}, "load_environment raised ValueError: no data today ("),
    ("odd_environment", {"rewards": "of_a_group"}, 'together: set reward.group = "verifiers"'),
    ("odd_environment", {"rewards": "of_a_group", "grouped": True}, "so it needs a SingleTurnEnv"),
    ("odd_environment", {"grouped": True}, "has no rubric of whole groups: remove"),
    ("word-taskset", {"grouped": True}, "which has no group rubrics: remove reward.group"),
    ("json", {}, "must have a function load_environment, or a taskset in __all__: module 'json'"),
    ("word-taskset", {"wordz": "a"}, "must load: the taskset raised ValidationError"),
]


@pytest.mark.slow
@needs_package
def test_an_environment_that_cannot_be_used_is_a_sentence(folder: Path) -> None:
    tries = json.dumps([(name, arguments) for name, arguments, _ in UNUSABLE])
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(folder), tries], stdout=subprocess.PIPE, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == len(UNUSABLE)
    for sentence, (name, _, why) in zip(told, UNUSABLE, strict=True):
        assert why in sentence
        assert name in sentence


GROUPS = """
import json, sys
from actors.rewards.loading import all_options, load_group
from areal_bus.config.loader import resolve
for rewards in ("right shares", "right raises too_few of_a_group"):
    tree = json.loads(sys.argv[2])
    tree["workflow"]["arguments"]["rewards"] = rewards
    config = resolve(tree, "mine.toml", (), {})
    score = load_group("verifiers", sys.argv[1], options=all_options(config, sys.argv[1]))
    samples = [{"completion": text, "reward": 0.0, "correct": None} for text in ("yes", "x")]
    try:
        print(json.dumps(score("asked", samples, json.loads(sys.argv[3]))))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
@needs_package
def test_a_rubric_of_whole_groups_scores_by_the_group_reward(folder: Path) -> None:
    """Each sample has the rubric's other functions first; the group has both, and a failure is no reward of 0."""
    tree = settings("odd-environment", single=True, rewards="right shares").model_dump(mode="json")
    given = {"reward": {"group": "verifiers"}, "gconfig": {"n_samples": 2}}
    sections = {name: tree[name] for name in ("model", "workflow")}
    config = Config.model_validate({**sections, **given, "reward": {"function": "agent", "group": "verifiers"}})
    row = row_of("abc", "yes", info={"number": 2})
    with talking(folder, config) as talk:
        assert talk.hold(row, ["yes<eos>"])["reward"] == 0.5
    words = [json.dumps(sections | given), json.dumps(row)]
    command = [sys.executable, "-c", GROUPS, str(folder), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    first, second = done.stdout.splitlines()[-2:]
    assert json.loads(first) == [0.5 * 1 + 0.5 * (3 / 4 + 2), 0.5 * (1 / 4 + 2)]
    assert "reward function raises: ZeroDivisionError" in second
    assert "reward function too_few: ValueError: it must return 2 finite numbers: it returned [1.0]" in second


def test_packages_that_require_verifiers_are_known_as_environments(folder: Path) -> None:
    requirements = {"wordle": "verifiers>=0.3", "trainer": 'verifiers==0.3.1; extra == "envs"', "other": "verifiers-x"}
    for name, requirement in requirements.items():
        (folder / f"my_{name}-1.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: my-{name}\nVersion: 1\nRequires-Dist: {requirement}\n"
        (folder / f"my_{name}-1.dist-info" / "METADATA").write_text(metadata)
    assert [name for name in installed(str(folder)) if name.startswith("my_")] == ["my_wordle"]


def test_a_missing_package_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install .*'areal-bus\[envs\]'"):
        load(EnvironmentCode("turned-words", "{}", "", str(folder)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("workflow.function='verifiers:'", "it may have letters, digits"),
        ("data.path='rows.jsonl'", "an environment brings its own rows"),
        ("data.task='sums'", "an environment brings its own rows"),
        ("evaluate.path='rows.jsonl'", "an environment brings its own problems"),
        ("data.task='verifiers:other'", "data.task = 'verifiers:other' needs workflow.function = 'verifiers:other'"),
        ("workflow.agent.function='mine:solve'", "an agent needs both keys"),
    ],
)
def test_settings_that_contradict_an_environment_are_refused(change: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(CONFIGS / "verifiers.toml", [change], {})


def test_an_environment_sets_its_defaults_unless_the_config_does() -> None:
    config = load_config(CONFIGS / "verifiers.toml", (), {})
    assert (config.data.task, config.reward.function) == ("verifiers:turned-words", "agent")
    own = load_config(CONFIGS / "verifiers.toml", ["data.held_out=7", "reward.function='exact'"], {})
    assert (own.data.held_out, own.reward.function) == (7, "exact")
