import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.errors import ConfigError
from areal_bus.storage.journal import Journal
from tests.tools.audit.forged_terms import HEADS, crashed_run
from tools import samples, terminal
from tools.episodes import split_spans
from tools.report.page.episodes_page import samples_page
from tools.run import find

Out = pytest.CaptureFixture[str]


def sample(**fields: Any) -> dict[str, Any]:
    """A kept training sample as the head writes it."""
    return {
        "kind": "evaluation" if fields.get("evaluation") else "train",
        "evaluation": "",
        "step": None if fields.get("evaluation") else 0,
        "version": 0,
        "uid": 0,
        "sample": 0,
        "attempt": 0,
        "generator": "generator-0.0",
        "prompt": "What is 3+4?",
        "completion": "7",
        "reward": 1.0,
        "correct": True,
        "status": "value",
        "finish": "stop",
        "versions": [[0, 2]],
        "n_tokens": 2,
        "n_masked": 0,
    } | fields


def forge(folder: Path, kept: list[dict[str, Any]] | None = None) -> Path:
    """A run with these logged samples."""
    Journal(folder / "journal", role="head", index=0, incarnation=0).close()
    if kept is not None:
        (folder / "samples").mkdir()
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (folder / "samples" / "samples.jsonl").write_text(text)
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Evaluation "before", steps 0 and 1 of two groups of two, evaluation "after"."""
    lines = [sample(evaluation="before", completion="eh", reward=0.0, correct=False)]
    for step in (0, 1):
        for uid in (2 * step, 2 * step + 1):
            for i in (0, 1):
                text = f"answer {step}/{uid}/{i}"
                spans = [[0, 3], [1, 2]] if step else [[0, 5]]
                lines.append(
                    sample(step=step, version=step, uid=uid, sample=i, completion=text, reward=1 - uid / 4 - i / 8)
                    | {"versions": spans, "n_tokens": 5, "n_masked": 3 * step}
                )
    lines.append(sample(evaluation="after", version=2, completion="final words"))
    return forge(tmp_path / "kept", lines)


def shown(out: Out) -> list[str]:
    """The completions printed, in order."""
    return [line.removeprefix("  > ") for line in out.readouterr().out.splitlines() if line.startswith("  > ")]


def test_a_sample_without_a_verdict_is_the_worst_and_shows_no_number(tmp_path: Path, capsys: Out) -> None:
    folder = forge(tmp_path / "one", [sample(), sample(uid=1, status="timeout", reward=None, completion="slow")])
    assert samples.main([str(folder), "--worst", "--n", "1"]) == 0
    out = capsys.readouterr().out
    assert "> slow" in out
    assert "reward none (timeout)" in out


def test_a_sample_is_printed_with_all_its_fields(kept: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    samples.main([str(kept), "--n", "1"])
    out = capsys.readouterr().out
    assert "  | What is 3+4?" in out
    assert "reward 0.500 (right)   finish stop   5 tokens, 3 masked   versions 0 x3, 1 x2 (lag 0 to 1)" in out
    assert "uid 2 sample 0 attempt 0, step 1, generator-0.0" in out


def test_every_turn_of_a_sample_is_shown(tmp_path: Path, capsys: Out) -> None:
    turns = [["user: 3+4?", "8"], ["user: sure?", "7"]]
    forge(tmp_path / "one", [sample(turns=turns, completion="7"), sample(uid=1, turns=turns, completion="8, then 7")])
    assert samples.main([str(tmp_path / "one")]) == 0
    out = capsys.readouterr().out
    for part in ("turn 1 of 2: prompt\n  | user: 3+4?", "turn 1 of 2: completion\n  > 8", "| user: sure?", "> 7"):
        assert out.count(part) == 2
    assert out.count("text for the reward\n  > 8, then 7") == 1


def test_an_episode_is_a_tree_with_roles_tools_versions_and_masked_tokens_of_each_turn(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    call = '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'
    turns = [["3+4?", call], ["your move", "5"], ["7", "it is 7"]]
    conversation = {"turns": turns, "segments": [[4, 6], [2, 1], [1, 3]], "trajectories": [0, 1, 0]}
    roles = {"roles": "first second", "parts": {"role/first": 1.0, "role/second": -1.0}}
    line = sample(**conversation, **roles, versions=[[3, 4], [5, 6]], n_tokens=10, n_masked=5, version=6)
    forge(tmp_path / "one", [line])
    samples.main([str(tmp_path / "one")])
    assert capsys.readouterr().out.splitlines()[4:] == [
        "trajectory 0 (first): 2 turns, reward 1",
        "  turn 1 of 3: prompt",
        "    | 3+4?",
        "  turn 1 of 3: completion (6 tokens, versions 3 x4, 5 x2, 5 masked), calls calculator",
        f"    > {call}",
        "  turn 3 of 3: result of the call",
        "    | 7",
        "  turn 3 of 3: completion (3 tokens, version 5)",
        "    > it is 7",
        "trajectory 1 (second): 1 turn, reward -1",
        "  turn 2 of 3: prompt",
        "    | your move",
        "  turn 2 of 3: completion (1 token, version 5)",
        "    > 5",
        "text for the reward",
        "  > 7",
        "reward 1.000 (right) (role/first 1, role/second -1)   finish stop   10 tokens, 5 masked   versions 3",
        " x4, 5 x6 (lag 1 to 3)",
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_the_versions_of_turns_are_those_of_the_sample_in_order(sizes: list[int], data: st.DataObject) -> None:
    tokens = sorted(data.draw(st.lists(st.integers(0, 4), min_size=sum(sizes), max_size=sum(sizes))))
    spans = [(version, tokens.count(version)) for version in sorted(set(tokens))]
    each = split_spans(spans, sizes)
    assert [sum(n for _, n in turn) for turn in each] == sizes
    assert [version for turn in each for version, n in turn for _ in range(n)] == tokens


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], ["answer 1/2/0", "answer 1/3/0", "answer 1/2/1", "answer 1/3/1"]),  # the latest step, groups in turn
        (["--step", "0", "--worst", "--n", "3"], ["answer 0/1/1", "answer 0/1/0", "answer 0/0/1"]),
        (["--uid", "1"], ["answer 0/1/0", "answer 0/1/1"]),
        (["--evaluation", "after"], ["final words"]),
        (["--text", "ANSWER 1/3"], ["answer 1/3/0", "answer 1/3/1"]),
        (["--reward", "0.8:"], ["answer 0/0/0", "answer 0/0/1"]),
        (["--reward", ":0.125"], ["answer 1/3/1"]),
        (["--reward", "0.5", "--tokens", "5:6"], ["answer 1/2/0"]),
        (["--uid", "3", "--sample", "1"], ["answer 1/3/1"]),
        (["--evaluation", "before", "--verdict", "wrong"], ["eh"]),
    ],
)
def test_flags_select_samples_of_the_whole_run(kept: Path, capsys: Out, flags: list[str], wanted: list[str]) -> None:
    assert samples.main([str(kept), *flags]) == 0
    assert shown(capsys) == wanted


def test_a_selection_without_samples_is_refused_with_the_existing_ones(kept: Path, tmp_path: Path, capsys: Out) -> None:
    for text in ("3:1", "x", ":", "nan"):
        with contextlib.suppress(SystemExit):
            samples.main([str(kept), "--reward", text])
        assert ("invalid range" in capsys.readouterr().err) == (text != ":")
    for flags, why in (
        (
            ["--text", "zebra", "--reward", "0.5:"],
            r"no logged sample matches --text zebra, --reward 0\.5:inf; there are",
        ),
        (["--step", "7"], r"no logged sample matches --step 7; .* steps 0 to 1, .*\['before', 'after'\]"),
        (["--step", "1", "--evaluation", "after"], "give either --step"),
        (["--n", "0"], "--n must be at least 1: 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            samples.main([str(kept), *flags])
    with pytest.raises(ConfigError, match=r"journal\.samples = false"):
        samples.main([str(forge(tmp_path / "one"))])


def test_samples_of_an_older_run_lack_fields_and_are_shown(tmp_path: Path, capsys: Out) -> None:
    old = {key: sample()[key] for key in ("evaluation", "step", "version", "uid", "sample", "prompt", "completion")}
    folder = forge(tmp_path / "one", [old | {"turns": [["a", "b"], ["c", "d"]]}])
    assert samples.main([str(folder), "--verdict", "none"]) == 0
    assert "turn 2 of 2: completion\n  > d" in capsys.readouterr().out


EVIL = "<script>document.title=1</script> \x00 \ud800 \u202e \u05e9\u05dc\u05d5\u05dd"


def test_a_page_shows_one_episode_whole_and_no_text_as_markup(tmp_path: Path) -> None:
    folder = forge(tmp_path / "one", [sample(turns=[[EVIL, "x" * 100_000], ["b", "7"]], segments=[[1, 1], [1, 1]])])
    assert samples.main([str(folder), "--uid", "0", "--html", str(folder / "page.html")]) == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "x" * 100_000 in page
    assert page.count("<script>") == 1
    assert "&lt;script&gt;document.title=1&lt;/script&gt; \\x00 \\ud800 \\u202e \u05e9" in page
    assert '<article class="right">' in page
    assert "turn 2: completion (1 token, version 0)" in page
    page = samples_page(find(str(folder)), {"token": "t", "text": "\ud800"}).decode()
    assert 'value="\\ud800"' in page  # in the form, too
    with pytest.raises(ConfigError, match="must be writable"):
        samples.main([str(folder), "--html", "/proc/none/page.html"])


def crashed(folder: Path, *, until: str = "end") -> Path:
    """A run of three terms that kept what it trained, up to this event of the second head."""
    forge = crashed_run()
    last = forge.of(HEADS[1], until)[0]
    forge.lines[HEADS[1]] = [line for line in forge.lines[HEADS[1]] if line["t"] <= last["t"]]
    forge.save(folder)
    kept = []
    for line in (line for name in HEADS for line in forge.of(name, "trajectory")):
        ids = {name: line[name] for name in ("step", "uid", "sample", "attempt", "reward")}
        text = f"term {line['term']}: {line['step']}/{line['uid']}/{line['sample']}"
        kept.append(sample(**ids, version=line["clock"], completion=text))
    (folder / "samples").mkdir()
    (folder / "samples" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return folder


def test_samples_of_undone_steps_are_marked(tmp_path: Path, capsys: Out) -> None:
    run = str(crashed(tmp_path / "run"))
    samples.main([run, "--step", "2", "--n", "12"])
    out = capsys.readouterr().out
    assert "step 2, trained at version 2; 12 of 12 samples, 8 of them undone" in out
    assert "all 4 surviving: mean reward 179.550" in out  # 104 and 204.1 of prompt 4, 205.0 and 205.1 of prompt 5
    assert out.count("step 2 (undone)") == 8
    samples.main([run, "--step", "2", "--n", "12", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["completion"][:6] for line in lines if not line.get("undone")} == {"term 2"}


def test_a_sample_that_is_trained_again_counts_the_second_time(tmp_path: Path, capsys: Out) -> None:
    samples.main([str(crashed(tmp_path / "run")), "--uid", "3", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["completion"], line.get("undone", False)) for line in lines] == [
        ("term 1: 1/3/0", False), ("term 1: 1/3/1", False), ("term 0: 1/3/0", True), ("term 0: 1/3/1", True),
    ]  # fmt: skip


def test_the_latest_step_is_the_latest_that_is_not_undone(tmp_path: Path, capsys: Out) -> None:
    """Until it is trained again, what the learner lost is not shown as what it has."""
    samples.main([str(crashed(tmp_path / "run", until="term"))])
    out = capsys.readouterr().out
    assert "step 1, trained at version 1; 4 of 4 samples" in out
    assert "undone" not in out


def test_a_models_output_cannot_control_the_terminal() -> None:
    text = terminal.quote("a\x1b[2Jb\r\x07 c\nd", indent="> ", width=80)
    assert text == "> a\\x1b[2Jb\\r\\x07 c\n> d"
    assert all(len(line) <= 40 for line in terminal.quote("word " * 50 + "x" * 90, indent="  ", width=40).split("\n"))
