"""The workflow protocol: a workflow turns one data row into one episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.engines.protocol import SamplingControls
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion."""

    ids: list[int]  # sampled tokens, the stop token included
    text: str  # decoded without special tokens
    finish: str  # messages.Finish
    logps: list[float] = field(default_factory=list)  # of each token, under the version stamped on it
    spans: list[list[int]] = field(default_factory=list)  # [[version, n_tokens], ...]


@dataclass(slots=True)
class Episode:
    """The result of an episode: the text for the reward. The runner records its tokens as they are sampled."""

    text: str
    prompt_text: str = ""  # for logs and the reward; empty: the decoded first prompt
    row: dict[str, Any] = field(default_factory=dict)  # fields for the reward, in addition to those of the data row
    fields: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    # numbers for the learner by name: one of each sampled token, or one for the whole sample (docs/own-parts.md)
    roles: Sequence[str] = ()  # of each trajectory: advantages compare those of one role (docs/self-play.md)


def at_turn_ends(lengths: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """The field `token_reward` of an episode: the reward of each turn at the last of its sampled tokens, 0 elsewhere.

    `lengths`: sampled tokens of each turn, in the order in which they were sampled. Raises ValueError.
    """
    pairs = zip(lengths, rewards, strict=True)
    return [x for n, reward in pairs for x in [*[0.0] * (n - 1), float(reward)]]


class Ask(Protocol):
    """Samples completions for a workflow. Each call's tokens must begin with all tokens so far of its trajectory."""

    tokenizer: Any  # a transformers tokenizer
    name: str  # of the sample, for logs
    temperature: float  # sampling temperature
    gconfig: GenerationConfig  # of this sample: of its source, or its set of an evaluation

    async def __call__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        anew: bool = False,
        trajectory: int | None = None,
        controls: SamplingControls | None = None,
    ) -> Turn:
        """Sample a completion of `ids`.

        `anew`: the episode restarts here; earlier tokens are dropped. `trajectory`: number of the trajectory that the
        call extends (None: that of the call before); the next number begins another one, whose tokens need not begin
        with earlier ones. `controls`: instead of those of [gconfig] (None).

        Raises EngineError when the engine cannot hold the request. The episode is unchanged and may continue.
        """


class Workflow(Protocol):
    """Built once in each generator with the whole config; `episode` runs once for each sample."""

    def __init__(self, config: Config) -> None: ...

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """Sample one trajectory. An exception refunds the group as sampling_error."""
