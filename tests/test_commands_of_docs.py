"""Every command that README and docs/ show exists, has its options, and takes the settings of its configs."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from areal_bus.config.names.packaged import find_config
from areal_bus.errors import ConfigError
from launch.commands.cli import COMMANDS
from launch.commands.cli import main as console
from launch.commands.main import load_settings, parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"(?<![\w/.-])(?:areal-bus|python -m) (?P<words>[^`|&]+)")
OTHERS = ("pytest", "pip", "venv", "http.server", "build", "gguf")  # modules that are not ours


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(command or module, its words), of all code blocks and of code within sentences."""
    text = page.read_text(encoding="utf-8")
    code = [re.sub(r"\\\n\s*", " ", block) for block in BLOCK.findall(text)]
    code += re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    for line in (line for block in code for line in block.splitlines()):
        for found in COMMAND.finditer(line.partition(" #")[0]):
            words = shlex.split(re.split(r"[<>;]|\$\(", found["words"])[0].replace('"', "").replace("'", ""))
            if words and re.fullmatch(r"\w[\w.-]*", words[0]):
                is_module = found[0].startswith("python -m")
                yield ("python -m " if is_module else "areal-bus ") + words[0], words[1:]


SHOWN = sorted({(command, *words) for page in PAGES for command, words in commands(page)})


@cache
def help_of(command: str, *below: str) -> str:
    """What `COMMAND [SUBCOMMAND] --help` prints; raises for a command that is none."""
    kind, _, name = command.rpartition(" ")
    module = COMMANDS[name][0] if kind == "areal-bus" else name
    if module in ("areal_bus.launch", "launch.commands.local_job"):
        return f"{parser().format_help()} -np"
    before, printed = sys.argv, io.StringIO()
    try:
        sys.argv = ["areal-bus", name, *below, "--help"] if kind == "areal-bus" else [module, *below, "--help"]
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            console() if kind == "areal-bus" else runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        sys.argv = before
    return printed.getvalue()


def is_ours(command: str) -> bool:
    name = command.rpartition(" ")[2]
    return not name.startswith(OTHERS) and name.partition(".")[0] not in ("tests", "NAME", "COMMAND")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy, of a module that a test has imported
@pytest.mark.parametrize("shown", [one for one in SHOWN if is_ours(one[0])], ids=" ".join)
def test_a_command_of_the_docs_exists_and_has_the_options_that_it_is_given(shown: tuple[str, ...]) -> None:
    command, *words = shown
    text = help_of(command)
    assert "usage:" in text, command
    options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"--help", "-h"}
    if words and re.search(rf"[{{,]{re.escape(words[0])}[,}}]", text):
        text += help_of(command, words[0])  # of a subcommand
    missing = {option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)}
    assert not missing, f"{command} has no {missing}"


def settings_of(words: list[str]) -> tuple[list[str], list[str]]:
    configs = [word for word in words if word.endswith(".toml")]
    overrides = [value for word, value in pairwise(words) if word == "--set" and "=" in value]
    return configs, overrides


def is_installed(configs: list[str]) -> bool:
    """Whether all of them are ours: a user's own file is shown with its content, or is an example name."""
    return bool(configs) and all((ROOT / name).is_file() for name in configs)


LOADED = [
    (configs, overrides)
    for command, *words in SHOWN
    for configs, overrides in [settings_of(words)]
    if command.endswith((" run", "areal_bus.launch", "manifest", "doctor")) and is_installed(configs)
]


@pytest.mark.parametrize(("configs", "overrides"), LOADED, ids=lambda words: " ".join(words))
def test_the_settings_of_a_command_of_the_docs_are_taken(
    configs: list[str], overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    values = [one for one in overrides if not re.search(r"[A-Z]{3,}|\.\.\.|VALUE", one.partition("=")[2])]
    config, _ = load_settings(configs, None, values)
    assert config.topology.learners >= 1


def test_the_pages_show_commands_and_a_wrong_one_would_be_found(tmp_path: Path) -> None:
    assert len(SHOWN) > 100
    assert len(LOADED) > 15
    page = tmp_path / "page.md"
    page.write_text(
        "`areal-bus why --nothing` and\n```\nmpirun -np 4 python -m areal_bus.launch a.toml \\\n  --sat x=1\n```\n"
    )
    found = list(commands(page))
    assert found == [("python -m areal_bus.launch", ["a.toml", "--sat", "x=1"]), ("areal-bus why", ["--nothing"])]
    with pytest.raises(ConfigError):
        load_settings(["configs/tiny.toml"], None, ["no.such=1"])
    assert find_config("tiny").is_file()
