"""Settings of the loops in one process: the ring's own, a given lag and virtual time. Imports without torch.

The ring's settings have neither. In a file or on the command line they are rollout.exact_lag and virtual_time.KEY.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from areal_bus.config import loader
from areal_bus.config.section import Section
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

LAG, TIME = "rollout.exact_lag", "virtual_time"


class VirtualTimeConfig(Section):
    """Only for `python -m areal_lab.loops.virtual_time` and `areal_lab.sweep`. All times are virtual seconds."""

    seconds: float | None = Field(None, gt=0)
    """Virtual seconds of training; a run ends earlier at run.total_train_steps. Unset: a ring. See docs/sweep.md."""
    token_s: float = Field(0.05, ge=0)
    """Time of the first token of a sample, before the random factor of the sample."""
    token_growth: float = Field(1.0, ge=1)
    """The next token takes this factor longer, so that long answers are slow; 1: all take the same time."""
    tail: Literal["log-normal", "pareto"] = "log-normal"
    """Law of a sample's random factor, which has mean 1."""
    spread: float = Field(0.0, ge=0, le=4)
    """Of "log-normal": standard deviation of the log; 0: the factor is 1."""
    exponent: float = Field(2.0, gt=1)
    """Of "pareto": P(factor > x) falls as x to the power of -exponent; below 2 the variance is infinite."""
    update_s: float = Field(0.5, gt=0)
    """Time of a training step."""
    push_s: float = Field(0.0, ge=0)
    """From the end of a training step until the generator samples with its weights."""
    window: int = Field(0, ge=0)
    """Windowed first-in-first-out: a batch takes only prompts that are among `window` in order of admission, from the
    oldest one that is not trained; 0: no window."""


class Added(Section):
    """What a loop in one process needs beside the settings of a ring."""

    exact_lag: int | tuple[int, ...] | None = None
    """The batch of version c is sampled by version c - exact_lag. With several values each prompt draws one, so that
    repeated values weigh more. Unset or []: a ring, whose lag follows from timing."""
    virtual_time: VirtualTimeConfig = VirtualTimeConfig()


class LabConfig(Config, Added):
    """The settings of a loop in one process."""

    @property
    def lags(self) -> tuple[int, ...]:
        """The values of exact_lag; () when it is unset."""
        if self.exact_lag is None:
            return ()
        return (self.exact_lag,) if isinstance(self.exact_lag, int) else self.exact_lag


def load(path: Path | str, overrides: Sequence[str] = ()) -> LabConfig:
    """The checked settings, as `areal_bus.config.loader.load`. Raises ConfigError for any fault."""
    tree = loader.read_file(Path(path))
    found: dict[str, Any] = {TIME: tree.pop(TIME, {})}
    if "exact_lag" in (rollout := tree.get("rollout", {})):
        found["exact_lag"] = rollout.pop("exact_lag")
    for option in (mine := [option for option in overrides if is_added(option)]):
        key, _, raw = option.partition("=")
        where, name = (
            (found, "exact_lag") if key.strip() == LAG else (found[TIME], key.strip().removeprefix(f"{TIME}."))
        )
        where[name] = plain(raw.strip())
    ring = loader.resolve(tree, str(path), [option for option in overrides if option not in mine])
    try:
        added = Added.model_validate(found)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])).replace("exact_lag", LAG)
        raise ConfigError(f"invalid {name} in {path}: {fault['msg']} (it is {fault['input']!r})") from None
    config = LabConfig.model_construct(**{name: getattr(ring, name) for name in Config.model_fields}, **dict(added))
    check(config)
    return config


def is_added(option: str) -> bool:
    key = option.partition("=")[0].strip()
    return key == LAG or key.startswith(f"{TIME}.")


def plain(raw: str) -> Any:
    """A value as TOML, else the word itself."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def check(c: LabConfig) -> None:
    """Raises ConfigError for a lag beyond eta, for both ways at once, and for a window below a batch."""
    eta, window = c.rollout.max_head_offpolicyness, c.virtual_time.window
    if c.lags and not 0 <= min(c.lags) <= max(c.lags) <= eta:
        raise ConfigError(
            f"rollout.exact_lag = {c.exact_lag} must lie between 0 and rollout.max_head_offpolicyness ({eta}), or its "
            "tokens are masked"
        )
    if c.lags and c.virtual_time.seconds is not None:
        raise ConfigError(
            "either the lag is given or it follows from virtual time: remove rollout.exact_lag or virtual_time.seconds"
        )
    if 0 < window < c.data.batch_size:
        raise ConfigError(
            f"a batch fits into virtual_time.window: {window} is less than data.batch_size ({c.data.batch_size})"
        )
