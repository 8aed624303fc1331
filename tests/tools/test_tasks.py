"""Named tasks: rows in their published forms, the settings that a name fills in, and the check of a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.data import loading
from actors.data.loading import load_problems, load_rows, load_sets
from actors.data.tasks import data_set
from actors.rewards.loading import load_reward
from areal_bus.config.loader import load, resolve
from areal_bus.config.names.named_tasks import GYM_REFUSED, NAMED_TASKS, fill
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tools import evaluate, tasks
from tools.offline.check_task import check_task

ADD = "print(sum(map(int, input().split())))"
DOUBLE = "print(2 * int(input()))"
TESTS = {"input": ["1 2"], "output": ["3"]}
PUBLISHED: dict[str, list[dict[str, Any]]] = {  # two rows each, with different answers
    "gsm8k": [{"question": "2 + 2?", "answer": "2 and 2\n#### 4"}, {"question": "Big?", "answer": "so\n#### 1,200"}],
    "math500": [{"problem": "Half?", "answer": "\\frac{1}{2}"}, {"problem": "Pair?", "answer": "(3,\\pi)"}],
    "aime24": [{"id": 1, "problem": "?", "answer": "033"}, {"id": 2, "problem": "?", "answer": "204"}],
    "aime25": [{"problem": "?", "answer": 70}, {"problem": "?", "answer": 588}],
    "amc23": [{"question": "?", "answer": 27.0}, {"question": "?", "answer": 0.5}],
    "deepscaler": [{"problem": "?", "answer": "-\\sqrt{3}", "solution": ""}, {"problem": "?", "answer": "x^2+1"}],
    "humaneval": [
        {"prompt": f"def {name}(x):\n", "entry_point": name, "canonical_solution": f"    return x + {n}\n",
         "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n"} for name, n in (("f", 1), ("g", 2))
    ],
    "mbpp": [
        {"text": "Add one.", "code": "def f(x):\n    return x + 1", "test_list": ["assert f(1) == 2"]},
        {"prompt": "Double it.", "entry_point": "g", "canonical_solution": "def g(x):\n    return 2 * x",
         "assertion": "assert g(1) == 2", "base_input": [[1]], "plus_input": [[3]], "atol": 0},
    ],
    "livecodebench": [
        {"question_content": "Add.", "question_id": "a", "starter_code": "",
         "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]'},
    ],
    "codecontests": [
        {"name": "add", "description": "Add.", "public_tests": TESTS,
         "solutions": {"language": [2, 3], "solution": ["x", ADD]}},
        {"name": "double", "description": "Double.", "public_tests": {"input": ["4"], "output": ["8"]},
         "solutions": {"language": [3], "solution": [DOUBLE]}},
    ],
    "codeforces": [
        {"id": "1/A", "description": "Add.", "input_format": "Two numbers",
         "official_tests": [{"input": "1 2", "output": "3"}]},
    ],
}  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_every_task_has_rows_here() -> None:
    assert PUBLISHED.keys() == NAMED_TASKS.keys()


@pytest.mark.parametrize("name", NAMED_TASKS)
def test_gold_answers_are_right_and_those_of_other_rows_wrong(name: str, tmp_path: Path) -> None:
    rows = PUBLISHED[name]
    found = check_task(name, str(write(tmp_path, rows)), None, lambda n, n_all: None)
    n_gold = 0 if name in ("livecodebench", "codeforces") else len(rows)
    assert (found["n"], found["n_gold"], found["gold_right"], found["wrong_right"]) == (len(rows), n_gold, n_gold, 0)


OTHER_FORMS = [  # of the same sets, by other publishers: question and answer
    ("aime24", {"id": 60, "problem": "Q", "solution": r"\boxed{204}", "url": ""}, "204"),  # math-ai
    ("aime24", {"ID": "2024-I-4", "Problem": "Q", "Solution": "...", "Answer": 116}, "116"),  # Maxwell-Jia
    ("aime25", {"question": "Q", "answer": "70"}, "70"),  # opencompass
    ("amc23", {"id": 0, "problem": "Q", "answer": 142.0, "url": ""}, "142"),  # AI-MO
    ("math500", {"problem": "Q", "solution": r"So \boxed{\frac{1}{2}}$ or $\boxed{\{3\}}$."}, r"\{3\}"),  # MATH
    ("math500", {"problem": "Q", "solution": r"First $\boxed{1}$, so $\boxed 2$."}, "2"),
    ("math500", {"problem": "Q", "solution": r"It is $\boxed{1}$, in all $\fbox {\text{a}}$."}, r"\text{a}"),
    ("deepscaler", {"problem": "Q", "answer": r"\frac{3}{2}", "solution": ""}, r"\frac{3}{2}"),
    (
        "mbpp",
        {"prompt": "Q", "code": "def f(): pass", "test_list": ["assert f() is None"], "test_imports": []},
        "def f(): pass",
    ),
]


@pytest.mark.parametrize(("name", "row", "answer"), OTHER_FORMS)
def test_other_published_forms_are_read(name: str, row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "m"\n[data]\ntask = "{name}"\npath = "{write(tmp_path, [row])}"\n')
    (found,) = load_rows(load(config, (), {}), tmp_path)
    assert (found["question"][0], found["answer"]) == ("Q", answer)


def test_a_row_whose_tests_cannot_be_read_is_counted_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = {**PUBLISHED["livecodebench"][0], "private_test_cases": "{no json"}
    file = write(tmp_path, [*PUBLISHED["livecodebench"], broken])
    assert tasks.main(["check", "livecodebench", "--data", str(file), "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["n_errors"] == 1
    assert "no score             1 of 2 (the reward failed: row 1)" in err
    assert "private_test_cases must be JSON" in err


def test_a_task_name_sets_the_keys_that_are_not_set(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n[data]\ntask = "aime24"\nprompt = "{question} ?"\n')
    config = load(file, ["gconfig.max_new_tokens=99"], {})
    assert (config.data.path, config.data.split) == ("HuggingFaceH4/aime_2024", "train")
    assert (config.reward.function, config.evaluate.n_samples, config.evaluate.temperature) == ("math", 32, 0.6)
    assert (config.data.prompt, config.gconfig.max_new_tokens) == ("{question} ?", 99)
    assert load(file, ["data.task=math500"], {}).data.split == "test"  # the only one that it has
    assert load(file, ["data.task=math500", "data.path=mine"], {}).data.split == "train"
    code = load(file, ["data.task=mbpp", "reward.code.test_timeout_s=3"], {}).reward
    assert (code.code.memory_mib, code.code.test_timeout_s, code.timeout_s) == (2048, 3.0, 60.0)


def test_a_set_of_an_evaluation_may_be_another_named_task(tmp_path: Path) -> None:
    files = {}
    for name in ("gsm8k", "aime24"):
        (tmp_path / name).mkdir()
        files[name] = write(tmp_path / name, PUBLISHED[name])
    config = tmp_path / "c.toml"
    sets = [f'{{name = "aime", task = "aime24", path = "{files["aime24"]}"}}', '{name = "hub", task = "amc23"}']
    config.write_text(
        f'[model]\npath = "m"\n[data]\ntask = "gsm8k"\npath = "{files["gsm8k"]}"\n'
        f"[evaluate]\nafter = true\nn_samples = 2\nsets = [{', '.join(sets)}]\n"
    )
    found = load(config, (), {})
    assert [(one.path, one.n_samples, one.temperature) for one in found.evaluate.sets] == [
        (str(files["aime24"]), 32, 0.6),
        ("math-ai/amc23", 32, 0.6),
    ]
    alone = found.model_copy(update={"evaluate": found.evaluate.model_copy(update={"sets": found.evaluate.sets[:1]})})
    assert [row["answer"] for row in load_sets(alone, tmp_path)["aime"]] == ["033", "204"]
    for change, sentence in (
        ('{name = "x", task = "humaneval"}', "the task of x has another reward"),
        ('{name = "x", task = "aime-24"}', "the nearest is 'aime24'"),
        ('{name = "x", task = "sums"}', "its task 'sums' is generated"),
        ('{name = "x"}', "missing path in .*evaluate.sets.*: x"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load(config, [f"evaluate.sets=[{change}]"], {})


def test_the_split_is_that_of_the_evaluated_set_and_not_of_the_training_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def read(path: str, *, split: str) -> Iterator[tuple[str, Any]]:
        asked[path] = split
        yield path, PUBLISHED["math500"][0]

    monkeypatch.setattr(loading, "read_hub", read)
    sets = [{"name": "a", "task": "aime24"}, {"name": "b", "task": "aime24", "path": "math-ai/aime24"}]
    tree: dict[str, Any] = {
        "data": {"task": "deepscaler"},
        "evaluate": {"after": True, "path": "HuggingFaceH4/MATH-500", "sets": sets},
    }
    fill(tree)
    load_sets(Config.model_validate(tree), Path.cwd())
    assert asked == {"HuggingFaceH4/MATH-500": "test", "HuggingFaceH4/aime_2024": "train", "math-ai/aime24": "test"}


@pytest.mark.parametrize(
    "data",
    [
        'task = "sums"',
        'task = "reasoning-gym:chain_sum"',
        'path = "a.jsonl"',
        'source = [{task = "gsm8k", path = "a.jsonl", weight = 1}, {task = "math500", path = "b.jsonl", weight = 1}]',
    ],
)
def test_a_set_is_not_scored_by_the_reward_of_other_answers(data: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'[model]\npath = "m"\n[data]\n{data}\n[evaluate]\nafter = true\nsets = [{{name = "a", task = "aime24"}}]\n'
    )
    with pytest.raises(ConfigError, match="the task of a has another reward; set that"):
        load(config, (), {})
    assert load(config, ["reward.function=math"], {}).evaluate.sets[0].task == "aime24"
    assert load(config, ["reward.function=mine:score"], {}).evaluate.sets[0].task == "aime24"


def test_the_prompt_of_a_row_is_filled(tmp_path: Path) -> None:
    file = write(tmp_path, PUBLISHED["mbpp"])
    config = tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "m"\n[data]\ntask = "mbpp"\npath = "{file}"\n')
    first, second = load_rows(load(config, (), {}), tmp_path)
    assert first["question"] == "Add one.\nYour code must pass this test:\nassert f(1) == 2"
    assert second["question"] == "Double it."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["data.task=gsm-8k"], "data.task must be one of sums, .*: it is 'gsm-8k'; the nearest is 'gsm8k'"),
        (["data.task=livecodebench"], "data.task = 'livecodebench' has no Hugging Face id here: set data.path"),
        (["data.task=sums", "data.path=x.jsonl"], "one data source only"),
    ],
)
def test_a_wrong_task_is_refused(changes: list[str], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n')
    with pytest.raises(ConfigError, match=sentence):
        load(file, changes, {})


@pytest.mark.parametrize(
    ("name", "row", "sentence"),
    [
        ("gsm8k", {"question": "?", "answer": "4"}, 'row of gsm8k: .*rows.jsonl:1 has question, answer, .*no "####"'),
        ("math500", {"question": "?"}, "row of math500: .*none of solution, Solution, answer, Answer"),
        ("aime24", {"problem": "?", "solution": "It is 5."}, "row of aime24: .*no box in the solution"),
        ("mbpp", {"text": "?", "code": ""}, "row of mbpp: .*test_list"),
        ("humaneval", ["?"], "invalid line of data: .*rows.jsonl:1 is a list; each line must be one JSON object"),
    ],
)
def test_a_row_of_another_form_is_named(name: str, row: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_task(name, str(write(tmp_path, [row])), None, lambda n, n_all: None)


def test_the_command_counts_and_names_wrong_gold(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = {"problem": "?", "answer": "4\\text{ or }\\text{not}"}
    file = write(tmp_path, [*PUBLISHED["math500"], {"problem": "?", "answer": "\\frac12"}, broken])
    assert tasks.main(["check", "math500", "--data", str(file), "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["n"], found["wrong_right"]) == (4, 0)
    assert f"gold answers right   {found['gold_right']} of 4" in err
    assert tasks.main(["list"]) == 0
    assert all(name in capfd.readouterr().out for name in ["gsm8k"])
    with pytest.raises(ConfigError, match="the nearest is 'humaneval'"):
        tasks.main(["check", "human-eval"])


def test_evaluate_takes_the_protocol_of_a_task() -> None:
    order = evaluate.make_order(evaluate.parser().parse_args(["m", "--task", "aime25", "--max-new-tokens", "9"]))
    assert order["data"] == "math-ai/aime25"
    config = order["config"]
    assert (config.evaluate.n_samples, config.gconfig.max_new_tokens) == (32, 9)
    assert "\\boxed" in config.data.prompt


GYM = pytest.importorskip  # the extra reasoning-gym


def gym_config(folder: Path, name: str, **data: Any) -> Any:
    file = folder / "gym.toml"
    keys = {"task": f"reasoning-gym:{name}", "size": 30, "held_out": 10, **data}
    lines = [f"data.{key} = {json.dumps(value)}" for key, value in keys.items() if key != "task_options"]
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in data.get("task_options", {}).items())
    file.write_text(
        "\n".join(['model.path = "M"', *lines, *([f"data.task_options = {{ {options} }}"] if options else [])])
    )
    return load(file, environ={})


def test_problems_of_reasoning_gym_are_repeatable_and_held_out(tmp_path: Path) -> None:
    GYM("reasoning_gym")
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = gym_config(tmp_path, "chain_sum", task_options=small, size=200)
    assert (config.reward.function, config.evaluate.temperature) == ("reasoning_gym", 0.0)
    rows, problems = load_rows(config, tmp_path), load_problems(config, tmp_path)
    assert rows == load_rows(config, tmp_path)
    assert len(problems) == 10
    assert 0 < len(rows) < 200  # one-digit sums repeat
    assert not {row["question"] for row in rows} & {row["question"] for row in problems}
    score = load_reward("reasoning_gym", tmp_path)
    row = json.loads(json.dumps(rows[0]))
    answer, question = row["answer"], row["question"]
    said = [f"<answer> {answer} </answer>", f"\n{answer} ", f"<answer>9</answer> no, <answer>{answer}</answer>"]
    assert [score(question, text, row).correct for text in said] == [True] * 3
    for text in ("", f"The answer is {answer}", f"{answer} or 9", f"<answer>{answer}</answer> <answer>x</answer>"):
        assert score(question, text, row).reward == 0.0
    assert 0 < score(question, f"The answer is {answer}", row).parts["score"] < 1  # partial credit is not trained


@pytest.mark.parametrize("name", ["spell_backward", "basic_arithmetic", "arc_1d", "rearc", "propositional_logic"])
def test_a_task_of_reasoning_gym_is_checked_like_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    GYM("reasoning_gym")
    found = check_task(f"reasoning-gym:{name}", "", 6, lambda n, n_all: None)
    n_gold = 0 if name == "propositional_logic" else 6
    assert (found["n"], found["n_gold"], found["gold_right"], found["wrong_right"]) == (6, n_gold, n_gold, 0)
    assert found["nonsense_right"] == 0


def test_traps_of_reasoning_gym(tmp_path: Path) -> None:
    GYM("reasoning_gym")
    for name, why in GYM_REFUSED.items():
        with pytest.raises(ConfigError, match=f"'reasoning-gym:{name}' cannot be trained on: {why}"):
            gym_config(tmp_path, name)
        source = {"task": f"reasoning-gym:{name}", "weight": 1.0}
        with pytest.raises(ConfigError, match=f"'reasoning-gym:{name}' cannot be trained on: {why}"):
            resolve({"model": {"path": "M"}, "data": {"source": [source]}}, "own.toml", (), {})
        with pytest.raises(ConfigError, match="cannot be trained on"):  # also without the config's check
            data_set(name, "{}")
    with pytest.raises(ConfigError, match="nearest is 'reasoning-gym:chain_sum'"):
        load_rows(gym_config(tmp_path, "chain-sums"), tmp_path)
    with pytest.raises(ConfigError, match=r"options of 'reasoning-gym:chain_sum': .*terms"):
        load_rows(gym_config(tmp_path, "chain_sum", task_options={"terms": 2}), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.task_options are for"):
        gym_config(tmp_path, "chain_sum", task="gsm8k", task_options={"terms": 2})
    row = load_rows(gym_config(tmp_path, "prime_factorization", size=1, held_out=0), tmp_path)[0]
    with pytest.raises(ValueError, match="invalid literal"):  # an error of the score, never a 0
        load_reward("reasoning_gym", tmp_path)("", "no idea", row)
