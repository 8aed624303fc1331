"""Settings of a loop in virtual time: how long samples, updates and pushes take. Imports without torch."""

from typing import Literal

from pydantic import Field

from areal_bus.config.section import Section


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
