"""Training alerts: warn when a metric is past its threshold for several batches (docs/journal.md, "Warnings"). Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from actors.runtime.stages import stages_of
from areal_bus.config.sections import Config
from areal_bus.core.effects import Keep
from areal_bus.core.parts.stages import stage_at
from areal_bus.limits import FEW_SIGNALS_SHARE, LEAST_ESS, TRUNCATED_SHARE
from areal_bus.messages import Scored

MIN_STREAK = 3  # consecutive batches before an alert: one odd batch raises none
REPEAT_AFTER = 20  # batches between two alerts of one kind
N_RECENT = 10  # last batches that the final alerts cover
N_SAMPLES = 3  # answers that an alert quotes
HEAD, TAIL = 60, 90  # characters of a quoted text


@dataclass(frozen=True, slots=True)
class Alert:
    """One sentence for the console and the journal, with sample answers below it."""

    level: str  # "warning": training learns nothing or may diverge; "note": training is less efficient than possible
    text: str


class Alerts:
    """Receives each step once, in order."""

    def __init__(self, config: Config) -> None:
        self._stages = stages_of(config)
        self._cap = config.actor.behav_imp_weight_cap
        self._eta = config.rollout.max_head_offpolicyness
        self._streaks: dict[str, int] = {}  # alert -> consecutive batches past its threshold
        self._recent: deque[Mapping[str, float]] = deque(maxlen=N_RECENT)
        self._samples: list[Scored] = []  # of the newest batch, one a prompt
        self._samples_step: int | None = None
        self._rewards: set[float] = set()  # of the newest batch
        self.n_batches = 0
        self.n_without_signal = 0

    def keep(self, effect: Keep) -> None:
        """Add a sample of the batch that is trained next. Evaluation samples are ignored."""
        if effect.step is None:
            return
        if effect.step != self._samples_step:
            self._samples_step, self._samples, self._rewards = effect.step, [], set()
        self._rewards.add(effect.scored.reward)
        if len(self._samples) < N_SAMPLES and effect.scored.uid not in {scored.uid for scored in self._samples}:
            self._samples.append(effect.scored)

    def step(self, metrics: Mapping[str, float]) -> list[Alert]:
        """Return the alerts of one update. A custom loop may leave metrics out."""
        self.n_batches += 1
        self._recent.append(metrics)
        is_without_signal = metrics.get("zero_advantage_share") == 1.0
        self.n_without_signal += is_without_signal
        alerts = []
        if self._is_due("signal", is_without_signal):
            alerts.append(Alert("warning", self._without_signal(self._streaks["signal"])))
        if self._is_due("zero", not is_without_signal and metrics.get("zero_advantage_share", 0.0) > FEW_SIGNALS_SHARE):
            alerts.append(Alert("note", _few_signals(metrics["zero_advantage_share"])))
        if self._is_due("truncated", metrics.get("truncated_share", 0.0) > TRUNCATED_SHARE):
            alerts.append(Alert("note", self._truncated(metrics["truncated_share"])))
        if self._is_due("ess", metrics.get("ess", 1.0) < LEAST_ESS, at=1):
            alerts.append(Alert("warning", self._low_ess(metrics["ess"])))
        return alerts

    def end(self) -> list[Alert]:
        """Return the alerts over the last batches, and a warning when no batch had a signal."""
        alerts = []
        if self.n_without_signal and (self.n_without_signal == self.n_batches or self._streaks.get("signal", 0)):
            alerts.append(Alert("warning", self._never_a_signal()))
        zero, truncated = self._mean("zero_advantage_share"), self._mean("truncated_share")
        when = f"in the last {len(self._recent)} batches"
        if FEW_SIGNALS_SHARE < zero < 1.0:
            alerts.append(Alert("note", f"{when} {_few_signals(zero)}"))
        if truncated > TRUNCATED_SHARE:
            alerts.append(Alert("note", f"{when} {self._truncated(truncated)}"))
        return alerts

    def _is_due(self, name: str, is_beyond: bool, *, at: int = MIN_STREAK) -> bool:
        n = self._streaks[name] = self._streaks.get(name, 0) + 1 if is_beyond else 0
        return n >= at and (n - at) % REPEAT_AFTER == 0

    def _mean(self, name: str) -> float:
        values = [metrics[name] for metrics in self._recent if name in metrics]
        return sum(values) / len(values) if values else 0.0

    def _without_signal(self, n: int) -> str:
        return (
            f"no group had a signal in {n} batches in a row: the rewards of each group were all equal "
            f"({self._all_rewards()}), so nothing is learned. Check the reward function on these answers, or use "
            f"{'harder' if min(self._rewards, default=0.0) > 0 else 'easier'} prompts:{self._answers()}"
        )

    def _never_a_signal(self) -> str:
        which = "none" if self.n_without_signal == self.n_batches else f"{self.n_batches - self.n_without_signal}"
        return (
            f"{which} of {self.n_batches} batches had a group with a signal, and the last one had none "
            f"({self._all_rewards()}): a batch whose groups each have equal rewards trains nothing. "
            f"Some of its answers:{self._answers()}"
        )

    def _all_rewards(self) -> str:
        if len(self._rewards) == 1:
            return f"every reward is {next(iter(self._rewards)):g}"
        return f"rewards from {min(self._rewards, default=0.0):g} to {max(self._rewards, default=0.0):g}"

    def _answers(self) -> str:
        return "".join(f"\n  reward {s.reward:g}: {_short(s.prompt_text)} -> {_short(s.text)}" for s in self._samples)

    def _truncated(self, share: float) -> str:
        stage = stage_at(self._stages, self._samples_step or 0)
        limit = max((one.max_new_tokens for one in stage.sources), default=stage.max_new_tokens)
        return (
            f"{share:.0%} of the answers are cut off at gconfig.max_new_tokens = {limit}: raise it, unless short "
            "answers are enough for the reward"
        )

    def _low_ess(self, share: float) -> str:
        advice = f"lower rollout.max_head_offpolicyness ({self._eta}) or actor.lr"
        if self._cap is None:
            advice = f"set actor.behav_imp_weight_cap (for example 5), or {advice}"
        else:
            advice = f"actor.behav_imp_weight_cap = {self._cap:g} bounds each weight; {advice} if this continues"
        return (
            f"the effective sample share is {share:.2f}, below {LEAST_ESS:g}: a few tokens with large weights (learner "
            f"over sampler) dominate the update; {advice}"
        )


def _few_signals(share: float) -> str:
    return (
        f"{share:.0%} of the groups have no signal (all rewards of a group are equal) and train nothing: the model has "
        "learned the task, or the prompts are too hard or too easy"
    )


def _short(text: str) -> str:
    """The text in quotes on one line; a long text is cut in the middle."""
    line = " ".join(text.split())
    return repr(line if len(line) <= HEAD + TAIL + 5 else f"{line[:HEAD]} ... {line[-TAIL:]}")
