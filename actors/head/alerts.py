"""What people should know before a run is over: figures and samples of its steps in, sentences out. Pure.

A figure beyond its threshold is reported when it lasts, and once more at the end (docs/journal.md, "Warnings").
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from areal_bus.config.sections import Config
from areal_bus.core.effects import Keep
from areal_bus.messages import Scored

STREAK = 3  # batches in a row, so that one odd batch is no news
AGAIN = 20  # batches after which what lasts is said again
RECENT = 10  # batches that the end looks back on
MOST_SHARE = 0.5  # of groups without a signal, and of answers that are cut off
LEAST_ESS = 0.5  # effective sample share
N_SAMPLES = 3  # answers to read
HEAD, TAIL = 60, 90  # characters of a text


@dataclass(frozen=True, slots=True)
class Alert:
    """A sentence for people; lines to read may follow it."""

    level: str  # "warning": nothing is learned, or it may go wrong; "note": training is less than it could be
    text: str


class Alerts:
    """Looks at each step once, in order."""

    def __init__(self, config: Config) -> None:
        self._limit = config.gconfig.max_new_tokens
        self._cap = config.actor.behav_imp_weight_cap
        self._eta = config.rollout.max_head_offpolicyness
        self._streaks: dict[str, int] = {}  # batches in a row beyond a figure's threshold
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)
        self._samples: list[Scored] = []  # of the newest batch, of different prompts
        self._of_step: int | None = None
        self._rewards: set[float] = set()  # of the newest batch
        self.n_batches = 0
        self.n_without_signal = 0

    def keep(self, effect: Keep) -> None:
        """A sample of the batch that is about to be trained, or of an evaluation, which is passed over."""
        if effect.step is None:
            return
        if effect.step != self._of_step:
            self._of_step, self._samples, self._rewards = effect.step, [], set()
        self._rewards.add(effect.scored.reward)
        if len(self._samples) < N_SAMPLES and effect.scored.uid not in {scored.uid for scored in self._samples}:
            self._samples.append(effect.scored)

    def step(self, figures: Mapping[str, float]) -> list[Alert]:
        """Those of one update; figures of a loop that computes none are looked for in vain."""
        self.n_batches += 1
        self._recent.append(figures)
        has_none = figures.get("zero_advantage_share") == 1.0
        self.n_without_signal += has_none
        said = []
        if self._is_due("signal", has_none):
            said.append(Alert("warning", self._without_signal(self._streaks["signal"])))
        if self._is_due("zero", not has_none and figures.get("zero_advantage_share", 0.0) > MOST_SHARE):
            said.append(Alert("note", _few_signals(figures["zero_advantage_share"])))
        if self._is_due("truncated", figures.get("truncated_share", 0.0) > MOST_SHARE):
            said.append(Alert("note", self._cut_off(figures["truncated_share"])))
        if self._is_due("ess", figures.get("ess", 1.0) < LEAST_ESS, at=1):
            said.append(Alert("warning", self._uneven(figures["ess"])))
        return said

    def end(self) -> list[Alert]:
        """What the last batches were like, and whether anything was learned at all."""
        said = []
        if self.n_without_signal and (self.n_without_signal == self.n_batches or self._streaks.get("signal", 0)):
            said.append(Alert("warning", self._never_a_signal()))
        zero, truncated = self._mean("zero_advantage_share"), self._mean("truncated_share")
        when = f"in the last {len(self._recent)} batches"
        if MOST_SHARE < zero < 1.0:
            said.append(Alert("note", f"{when} {_few_signals(zero)}"))
        if truncated > MOST_SHARE:
            said.append(Alert("note", f"{when} {self._cut_off(truncated)}"))
        return said

    def _is_due(self, name: str, is_beyond: bool, *, at: int = STREAK) -> bool:
        n = self._streaks[name] = self._streaks.get(name, 0) + 1 if is_beyond else 0
        return n >= at and (n - at) % AGAIN == 0

    def _mean(self, name: str) -> float:
        found = [figures[name] for figures in self._recent if name in figures]
        return sum(found) / len(found) if found else 0.0

    def _without_signal(self, n: int) -> str:
        return (
            f"no group had a signal in {n} batches in a row: the rewards of each group were all equal "
            f"({self._all_rewards()}), so nothing is learned. Check the reward function by these answers, or take "
            f"{'harder' if min(self._rewards, default=0.0) > 0 else 'easier'} prompts:{self._to_read()}"
        )

    def _never_a_signal(self) -> str:
        which = "none" if self.n_without_signal == self.n_batches else f"{self.n_batches - self.n_without_signal}"
        return (
            f"{which} of {self.n_batches} batches had a group with a signal, and the last one had none "
            f"({self._all_rewards()}): a batch whose groups each have equal rewards trains nothing. "
            f"Some of its answers:{self._to_read()}"
        )

    def _all_rewards(self) -> str:
        if len(self._rewards) == 1:
            return f"every reward is {next(iter(self._rewards)):g}"
        return f"rewards from {min(self._rewards, default=0.0):g} to {max(self._rewards, default=0.0):g}"

    def _to_read(self) -> str:
        """A line an answer."""
        return "".join(f"\n  reward {s.reward:g}: {_short(s.prompt_text)} -> {_short(s.text)}" for s in self._samples)

    def _cut_off(self, share: float) -> str:
        return (
            f"{share:.0%} of the answers are cut off at gconfig.max_new_tokens = {self._limit}: raise it, unless the "
            "reward needs no more of an answer"
        )

    def _uneven(self, share: float) -> str:
        mend = f"lower rollout.max_head_offpolicyness ({self._eta}) or actor.lr"
        if self._cap is None:
            mend = f"set actor.behav_imp_weight_cap (for example 5), or {mend}"
        else:
            mend = f"actor.behav_imp_weight_cap = {self._cap:g} bounds each of them; {mend} if it stays so"
        return (
            f"the effective sample share is {share:.2f}, below {LEAST_ESS:g}: a few tokens with large weights (learner "
            f"over sampler) decide the update; {mend}"
        )


def _few_signals(share: float) -> str:
    return (
        f"{share:.0%} of the groups have no signal (all rewards of a group are equal) and train nothing: what the task "
        "teaches is learned, or its prompts are too hard or too easy"
    )


def _short(text: str) -> str:
    """In quotes, on one line; of a long text the beginning and the end."""
    line = " ".join(text.split())
    return repr(line if len(line) <= HEAD + TAIL + 5 else f"{line[:HEAD]} ... {line[-TAIL:]}")
