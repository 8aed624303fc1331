"""What a sample may hold (tokens, turns, log-probs) under the run's settings; checked by the head. Pure: no I/O."""

from array import array
from dataclasses import dataclass

from areal_bus.core.parts.stages import Stage
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Partial, Sampled, Scored
from areal_bus.trajectories import split

# The highest byte of a float32 shows its size: of 0 to 1/128 (rounding may pass 0), and of 0 to -32. A token of a lower
# log-prob is drawn less than once in 10^9, and its importance weight would overflow the norm of the gradient.
LOGP_BYTES = bytes([*range(0x3C), *range(0x80, 0xC2)])


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Limits of one run. None: the settings give none."""

    vocabulary: int | None = None  # token ids are below this
    positions: int | None = None  # tokens of a whole trajectory: what the model holds
    prompt: int | None = None  # given tokens, where every sample has one turn with the stage's limit of new tokens
    bounds_logps: bool = False  # nothing but the temperature changes what is drawn
    bounds_guests: bool = False  # the same, unless a workflow of the user asks otherwise: for samples of guests

    def check(self, sample: Scored | Partial, stage: Stage | None, *, is_guests: bool = False) -> None:
        """Raises ImpossibleEvent for a sample that no engine can have made. `stage`: that of its prompt."""
        bounds_logps = self.bounds_logps or (is_guests and self.bounds_guests)
        if broken := self._of_tokens(sample, bounds_logps=bounds_logps) or self._of_turns(sample, stage):
            raise ImpossibleEvent(f"a sample of {sample.uid}/{sample.sample} exceeds a limit: {broken}")

    def check_count(self, report: Sampled, stage: Stage | None) -> None:
        """Raises ImpossibleEvent for a report of more tokens than one turn may have. `stage`: that of its prompt."""
        if broken := self._of_one_turn(report.n_tokens, stage):
            raise ImpossibleEvent(f"a report of {report.uid}/{report.sample} exceeds a limit: {broken}")

    def _of_one_turn(self, n_sampled: int, stage: Stage | None) -> str:
        if self.prompt is not None and stage is not None and n_sampled > stage.max_new_tokens:
            return f"{n_sampled} sampled tokens, over gconfig.max_new_tokens = {stage.max_new_tokens}"
        return ""

    def _of_turns(self, sample: Scored | Partial, stage: Stage | None) -> str:
        segments = sample.segments
        if not segments or segments[0][0] < 1 or sample.n_sampled < 1:
            return f"a sample begins with a token of its prompt and has one or more sampled ones; got {segments[:4]}"
        numbers = sample.trajectories if isinstance(sample, Scored) else []
        n_tokens = max(one.n for one in split(segments, numbers)) if numbers else sum(map(sum, segments))
        if self.positions is not None and n_tokens > self.positions:
            return f"{n_tokens} tokens, and the model holds {self.positions}"
        if self.prompt is None:
            return ""
        n_given, n_sampled = segments[0]
        if len(segments) > 1 or n_given > self.prompt:
            return f"one turn, after at most data.max_prompt_tokens = {self.prompt} tokens; got {segments[:4]}"
        return self._of_one_turn(n_sampled, stage)

    def _of_tokens(self, sample: Scored | Partial, *, bounds_logps: bool) -> str:
        if self.vocabulary is not None and sample.ids:
            highest = max(array("i", sample.ids))
            if highest >= self.vocabulary:
                return f"token id {highest}, and the vocabulary has {self.vocabulary} tokens"
        if bounds_logps and sample.logps[3::4].translate(None, LOGP_BYTES):
            return "log-probs are from -32 to 0; one is outside"
        return ""


NO_LIMITS = SampleLimits()  # of simulated samples, which have no tokens
