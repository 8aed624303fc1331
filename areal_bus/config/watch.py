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
    window: int = Field(5, ge=2)
    """Updates over which an alarm takes the mean."""
    horizon: int = Field(20, ge=2)
    """Updates between the two windows that are compared; before there are as many, the first window is compared."""
    held_out_drop: float = Field(0.05, gt=0)
    """held_out_falls: the last evaluation is below the best one by more than this, while the reward rises."""
    reward_drop: float = Field(0.5, gt=0)
    """reward_falls: the mean reward falls by more than this many standard deviations of the rewards of a batch."""
    length_ratio: float = Field(1.5, gt=1)
    """length_drift: the mean length grows by more than this factor, or shrinks by it."""
    repeated_share: float = Field(0.2, gt=0, lt=1)
    """repetition: share of samples of which more than half is repeated n-grams."""
    template_share: float = Field(0.5, gt=0, lt=1)
    """one_template: share of samples with one text, or one opening, for different prompts."""
    entropy_ratio: float = Field(0.35, gt=0, lt=1)
    """entropy_cliff: the entropy falls below this share of what it was."""
    mismatch_kl: float = Field(0.1, gt=0)
    """mismatch_rises: KL between sampler and learner, reached by a rise to three times what it was."""
    masked_share: float = Field(0.1, ge=0, lt=1)
    """masked_tokens: share of sampled tokens that are too old to train."""
    no_signal_share: float = Field(0.8, gt=0, lt=1)
    """no_signal: share of groups whose rewards are all equal."""
    learner_wait_share: float = Field(0.9, gt=0, lt=1)
    """starved_learner: share of its time that a learner waits for batches."""
    generator_wait_share: float = Field(0.75, gt=0, lt=1)
    """starved_generators: share of its time that a generator waits for prompts or weights."""


class ProfileConfig(Section):
    actor: str = Field("", pattern=r"^((learner|generator)-\d+(\.\d+)?)?$")
    """Actor that is recorded at `steps`: "learner-0.0"; without an incarnation each of them (docs/profiling.md)."""
    steps: tuple[int, int] | None = None
    """First and last step that are recorded. A generator takes part in step N while it holds version N."""
    seconds: float = Field(10.0, gt=0)
    """Length of a recording on demand (SIGUSR2), and the longest of a generator."""
