"""What a workflow is: one row of data in, one episode out; knows nothing of versions, the bus or the ring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_bus.config.sections import Config

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, as the workflow sees it."""

    ids: list[int]  # sampled tokens, the stop token included
    text: str  # decoded without special tokens
    finish: str  # messages.Finish
    logps: list[float] = field(default_factory=list)  # of each token, under the version stamped on it
    spans: list[list[int]] = field(default_factory=list)  # [[version, n_tokens], ...]


@dataclass(slots=True)
class Episode:
    """What an episode was: the text that the reward reads. Its tokens were recorded as they were sampled."""

    text: str
    prompt_text: str = ""  # for people and for the reward; empty: the decoded first prompt
    row: dict[str, Any] = field(default_factory=dict)  # more fields for the reward, beside those of the data row


class Ask(Protocol):
    """A workflow's way to the model. Within one episode the tokens of a call must begin with all tokens before it."""

    tokenizer: Any  # a transformers tokenizer
    name: str  # of the sample, for people
    temperature: float  # that it is sampled at

    async def __call__(self, ids: Sequence[int], *, max_new_tokens: int | None = None, anew: bool = False) -> Turn:
        """Sample a completion of `ids`. `anew`: the episode begins here, what was sampled before is forgotten.

        Raises EngineError when the engine cannot hold it; then nothing was asked, and the episode may go on.
        """


class Workflow(Protocol):
    """Built once a generator with the whole config; `episode` runs once a sample."""

    def __init__(self, config: Config) -> None: ...

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """Sample one trajectory. Raising refunds the group as sampling_error."""
