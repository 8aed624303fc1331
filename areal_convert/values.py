"""Readers of values: what a value of another system is here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_convert.mapping import Foreign, Ours, is_off

PRECISIONS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32", "float": "float32"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "builtin"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
LEAST_CLIP = 1e-6


def skip(value: Any, foreign: Foreign) -> Ours:
    """Read with another key."""
    return {}


def unless(*values: Any) -> Callable[[Any, Foreign], bool]:
    """Off at these values, besides those that switch anything off."""
    return lambda value, foreign: is_off(value, foreign) or value in values


def number(value: Any) -> float:
    """Raises ValueError, also for true and false."""
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def whole(value: Any) -> int:
    """Raises ValueError for anything but a whole number."""
    if number(value) != int(number(value)):
        raise ValueError
    return int(number(value))


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError
    return value


def path_of(ours: str) -> Callable[[Any, Foreign], Ours]:
    """A path with ~ resolved, or a Hugging Face id."""
    return lambda value, foreign: {ours: str(Path(str(value)).expanduser())}


def as_number(ours: str) -> Callable[[Any, Foreign], Ours]:
    return lambda value, foreign: {ours: number(value)}


def taus(first: str, second: str) -> Callable[[Any, Foreign], Ours]:
    """SAPO's two temperatures, from two keys."""
    return lambda value, foreign: {
        "actor.sapo_tau": [number(foreign.get(key, one)) for key, one in ((first, 1.0), (second, 1.05))]
    }


def as_whole(ours: str) -> Callable[[Any, Foreign], Ours]:
    return lambda value, foreign: {ours: whole(value)}


def as_truth(ours: str) -> Callable[[Any, Foreign], Ours]:
    return lambda value, foreign: {ours: truth(value)}


def positive(ours: str) -> Callable[[Any, Foreign], Ours]:
    """A whole number above 0; anything below means "not set"."""
    return lambda value, foreign: {ours: whole(value)} if whole(value) > 0 else {}


def warmup_share(theirs: str) -> Callable[[Any, Foreign], Ours]:
    """Of a run whose number of steps `fitting` knows."""

    def read_share(value: Any, foreign: Foreign) -> Ours:
        if number(value) > 0:
            foreign.warmup = (theirs, number(value))
        return {}

    return read_share


def clip_range(ours: str, theirs: str) -> Callable[[Any, Foreign], Ours]:
    """A range above 0."""

    def read_range(value: Any, foreign: Foreign) -> Ours:
        if number(value) <= 0:
            foreign.notes[ours] = "a range is above 0"
        return {ours: max(number(value), LEAST_CLIP)}

    return read_range


def chosen(ours: str, theirs: str, names: Mapping[str, Any]) -> Callable[[Any, Foreign], Ours]:
    """A name of theirs as ours; another name has no counterpart."""

    def read_name(value: Any, foreign: Foreign) -> Ours:
        name = str(value).lower()
        if name in names:
            return {ours: names[name]}
        return foreign.lose(theirs, f"{name!r} is not there; {ours} keeps its default")

    return read_name


def adapters(rank: Any, alpha: Any, modules: Any, dropout: Any = None) -> Ours:
    """[actor.lora]; "all-linear" is its default."""
    names = [modules] if isinstance(modules, str) else [str(one) for one in modules or []]
    ours: Ours = {"actor.lora.rank": whole(rank), "actor.lora.alpha": number(alpha)}
    if names and "all-linear" not in names:
        ours["actor.lora.target_modules"] = [name.rpartition(".")[2] for name in names]
    return ours if dropout is None else ours | {"actor.lora.dropout": number(dropout)}


def trackers(names: Any) -> list[str]:
    """Of theirs, those that we have."""
    given = [names] if isinstance(names, str) else names
    ours = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")
    return [name for name in dict.fromkeys(str(one).lower() for one in given) if name in ours]


def in_module(path: str, function: str) -> str:
    """ "module:function" for a file."""
    return f"{path.rpartition('/')[2].removesuffix('.py')}:{function}"


def run_name(text: Any) -> str:
    """A name that a run folder may have."""
    return "".join(one if one.isalnum() or one in "._-" else "-" for one in str(text)).strip("-.")
