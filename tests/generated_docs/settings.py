"""The text of docs/config.md."""

import re
from typing import Any

from pydantic import BaseModel

from areal_bus.config.loader import bounds, fields, kind, section_of
from areal_bus.config.sections import Config
from launch.commands.settings_help import default

HEADER = """# Settings

Generated from `areal_bus/config/` by `python -m tests.generated_docs`; do not edit.

Precedence, highest first: `--set actor.lr=1e-5`, the environment (`AREAL_BUS_ACTOR__LR=1e-5`), the TOML file (of
several the last), the files that it `extends`, and what `actor.algorithm`, `data.task` and `workflow.function` stand
for. `config.json` of the run has the result.

`extends = "base.toml"` or `extends = ["gpus-8.toml", "algorithms/dapo.toml"]`: the last wins. A name is a path from the
file's folder, else an installed config. A file that is reached twice counts where it is reached first.

`key=default`: a key without a default is unset or empty. `--explain KEY` prints one entry; with files (`--explain
actor.lr my.toml`) also the value and where it comes from.
"""


def page() -> str:
    """The text of docs/config.md."""
    parts = [HEADER]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts.append(table(name, section))
    return "\n".join(parts)


SIGNS = {
    "true or false or a whole number or a number or a string": "scalars",
    " or a string": " or str",
    "true or false or ": "bool or ",
    "a whole number": "int",
    "a number": "float",
    "true or false": "",
    "a path (string)": "",
    "a string": "",
    "a list, each item one of ": "list of ",
    "one of ": "of ",
    "a list, each item ": "list of ",
    "a list of ": "list of ",
    "a table, each value ": "table of ",
    ", of length at least ": " ≥",
    ", at least ": " ≥",
    ", above ": " >",
    " and at most ": ",≤",
    " and below ": ",<",
    "9223372036854775808": "2^63",
}


def limits_of(field: Any) -> str:
    """Type and limits in signs, as the table has them; what the default or the text shows is left out."""
    limits = bounds(field)
    text = f"{kind(field.annotation)}{', ' + limits if limits else ''}"
    for words, sign in SIGNS.items():
        text = text.replace(words, sign)
    return (text if field.default in (None, "") else re.sub(r"^(int|float) (?=[≥>])", "", text)).lstrip(", ")


def table(name: str, section: type[BaseModel]) -> str:
    lines = [f"## [{name}]", ""]
    for key, field in fields(section).items():
        text = " ".join((field.description or "").split())
        shown = default(field) if len(default(field)) < 60 else '"..."'
        value = "" if field.default in (None, "") else f"={shown}"
        limits = limits_of(field)
        is_named = limits.startswith("of ") and all(choice in text for choice in re.findall(r'"[^"]+"', limits))
        if is_named or re.match(r'list of ($|a table|")', limits):
            limits = ""  # the text names each choice, or the page with the items or their keys
        lines.append(f"- `{key}{value}`{f' ({limits})' if limits else ''}: {text}")
    return "\n".join(lines) + "\n"
