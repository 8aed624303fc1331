"""Whether a run learns: reward and held-out score, early against late, with standard errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from areal_bus.limits import FEW_SIGNALS_SHARE
from tools.report.facts.curves import Curve
from tools.report.facts.run_facts import RunFacts
from tools.report.verdict.remarks import Grade, Remark, percent

PART = 5  # the first and the last fifth of the updates are compared
MIN_UPDATES = 6
N_SE_REWARD = 3.0  # a change of so many standard errors is clear; rewards of neighbouring updates are not independent
N_SE_HELD_OUT = 2.0
METRICS = ("eval/avg_at_k", "eval/accuracy", "eval/reward")


@dataclass(frozen=True, slots=True)
class Change:
    """A mean early and late in a run, with the standard error of the difference (None: not known)."""

    first: float
    last: float
    se: float | None
    n_se: float

    @property
    def direction(self) -> int:
        """1: it rose, -1: it fell, 0: no clear change."""
        difference = self.last - self.first
        if self.se is None or abs(difference) <= self.n_se * self.se or difference == 0:
            return 0
        return 1 if difference > 0 else -1

    @property
    def figures(self) -> str:
        error = "" if self.se is None else f" (standard error of the difference {self.se:.2g})"
        return f"from {self.first:.3g} to {self.last:.3g}{error}"


def parts(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last fifth of the values, at least two each."""
    n = max(2, len(values) // PART)
    return values[:n], values[-n:]


def reward_change(curve: Curve) -> Change | None:
    """The mean reward of the last fifth of the updates against the first; None for fewer than MIN_UPDATES."""
    if len(curve) < MIN_UPDATES:
        return None
    first, last = parts(curve.values)
    se = sqrt(stdev(first) ** 2 / len(first) + stdev(last) ** 2 / len(last))
    return Change(fmean(first), fmean(last), se, N_SE_REWARD)


def held_out_change(facts: RunFacts) -> tuple[str, Change] | None:
    """The metric and its change from the first to the last evaluation; None with fewer than two."""
    for name in METRICS:
        curve = facts.curve(name)
        if len(curve) < 2:
            continue
        errors = [_error(facts, name, place) for place in (0, -1)]
        se = None if None in errors else sqrt(sum((error or 0.0) ** 2 for error in errors))
        return name.partition("/")[2], Change(curve.values[0], curve.values[-1], se, N_SE_HELD_OUT)
    return None


def best_before_the_end(facts: RunFacts) -> tuple[float, float] | None:
    """Version and score of the best evaluation, if it is neither the first nor as good as the last; else None."""
    curve = next((curve for name in METRICS if len(curve := facts.curve(name)) >= 2), None)
    if curve is None:
        return None
    score, version = max(zip(curve.values, (-version for version in curve.versions), strict=True))
    is_between = score > curve.values[-1] and -version > curve.versions[0]
    return (-version, score) if is_between else None


def early_stop(facts: RunFacts) -> str:
    """Why evaluate.early_stop_patience ended the run; "" if it did not."""
    reason = facts.status.sentence.removeprefix("it ended: ") if facts.status is not None else ""
    return reason if reason.startswith("stopped at version") else ""


def _error(facts: RunFacts, name: str, place: int) -> float | None:
    """Standard error of one evaluation: over problems where it was written, else of a share of n answers."""
    curve, written, counts = facts.curve(name), facts.curve("eval/avg_at_k_se"), facts.curve("eval/n")
    version, value = curve.versions[place], curve.values[place]
    if name == "eval/avg_at_k" and (error := written.at(version)) is not None:
        return error
    n = counts.at(version)
    return sqrt(value * (1 - value) / n) if n and name != "eval/reward" and 0 <= value <= 1 else None


def whether_it_learns(facts: RunFacts) -> Remark:
    reward, held_out = reward_change(facts.curve("rollout/reward")), held_out_change(facts)
    told = [f"Mean reward went {reward.figures}, first against last fifth of the updates."] if reward else []
    if held_out:
        told.append(f"Held-out {held_out[0]} went {held_out[1].figures}, first against last evaluation.")
    if peak := best_before_the_end(facts):
        told.append(f"The best evaluation is {peak[1]:.3g}, at version {peak[0]:g}.")
    evidence = " ".join(told)
    if reward is None and held_out is None:
        n = len(facts.curve("rollout/reward"))
        return Remark(Grade.NOTE, f"Too early to tell whether it learns: {n} updates.", evidence)
    return _judge(facts, reward, held_out[1] if held_out else None, evidence)


def _judge(facts: RunFacts, reward: Change | None, held_out: Change | None, evidence: str) -> Remark:
    trained, tested = (change.direction if change else 0 for change in (reward, held_out))
    if tested > 0:
        return Remark(Grade.GOOD, "It learns: the held-out score rises.", evidence)
    if tested < 0:
        also = "while reward rises: the model may exploit the reward" if trained > 0 else "and reward does not rise"
        advice = ("Read the samples with the highest rewards: does the reward pay for what you want?",)
        return Remark(Grade.BAD, f"The held-out score falls {also}.", evidence, advice)
    if trained > 0 and held_out is None:
        advice = ("Evaluate on held-out problems (evaluate.before, evaluate.after, evaluate.every_steps).",)
        return Remark(Grade.GOOD, "Reward rises; there is no held-out score to confirm it.", evidence, advice)
    if trained > 0:
        advice = ("Use more held-out problems or samples (evaluate.n_samples): the change may hide in the noise.",)
        return Remark(Grade.NOTE, "Reward rises, but the held-out score shows no clear change.", evidence, advice)
    verb = "Reward falls" if trained < 0 else "No clear sign of learning"
    return Remark(Grade.BAD if trained < 0 else Grade.NOTE, f"{verb}.", evidence, _why_not(facts))


def _why_not(facts: RunFacts) -> tuple[str, ...]:
    silent = facts.curve("rollout/zero_advantage_share").values
    if silent and fmean(silent) > FEW_SIGNALS_SHARE:
        share = percent(fmean(silent))
        return (f"In {share} of the groups all rewards are equal: choose problems of medium difficulty.",)
    if reason := early_stop(facts):
        remedy = "Lower actor.lr, take more data, or look at the samples of the last versions."
        return (f"It was {reason}: more steps of the same run will not help. {remedy}",)
    if peak := best_before_the_end(facts):
        remedy = "take that model (checkpoint.keep_best), and lower actor.lr or take more data before you train longer"
        return (f"The held-out score was best at version {peak[0]:g}: {remedy}.",)
    return (
        "Train longer, or raise actor.lr if gradient norm and clip share are small.",
        "Compare several seeds before you judge (python -m areal_lab.sweep).",
    )
