"""Settings of the alarms, [watch], and of recordings by torch.profiler, [profile]."""

from typing import Literal

from pydantic import Field

from areal_bus.config.section import Section

AlarmName = Literal[
    "held_out_falls",
    "reward_falls",
    "length_drift",
    "repetition",
    "one_template",
    "entropy_cliff",
    "mismatch_rises",
    "masked_tokens",
    "no_signal",
    "starved_learner",
    "starved_generators",
]


class WatchConfig(Section):
    console: bool = False
    """Print alarms on the console of the job: a process beside it reads the journal (docs/alarms.md)."""
    off: tuple[AlarmName, ...] = ()
    """Alarms that are not raised."""


class ProfileConfig(Section):
    actor: str = Field("", pattern=r"^((learner|generator)-\d+(\.\d+)?)?$")
    """Actor that is recorded at `steps`: "learner-0.0"; without an incarnation each of them (docs/profiling.md)."""
    steps: tuple[int, int] | None = None
    """First and last step that are recorded. A generator takes part in step N while it holds version N."""
