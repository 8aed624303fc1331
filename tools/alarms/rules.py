"""The rules of the alarms, pure functions of the history: each compares means of WINDOW updates."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from areal_bus.config.sections import AlarmName
from areal_bus.core.parts.collapse import COLLAPSE_ESS, COLLAPSE_KL
from areal_bus.limits import MASKED_SHARE, NO_SIGNAL_SHARE
from tools.alarms.history import REPEATED, Evaluated, History, Window, summed
from tools.run import Line, is_number

WINDOW = 5  # updates over which a rule takes the mean
HORIZON = 20  # updates between the two windows that a rule of change compares; fewer in a shorter run
HELD_OUT_DROP = 0.05  # of the best evaluation
REWARD_DROP = 0.5  # standard deviations of the rewards of a batch
LENGTH_RATIO = 1.5  # by which the mean length grows or shrinks
REPEATED_SHARE = 0.2  # of samples that are repeated n-grams for more than half
TEMPLATE_SHARE = 0.5  # of samples with one text, or one opening, for different prompts
UNENDED_SHARE = 0.5  # of right answers that no accepted stop ended
LEAST_ACCURACY = 0.05  # fewer right answers raise nothing
ENTROPY_RATIO = 0.35  # to the entropy before
MISMATCH_KL = COLLAPSE_KL  # between sampler and learner
LEARNER_WAIT_SHARE = 0.9  # of its time that a learner waits for batches
GENERATOR_WAIT_SHARE = 0.75  # higher than a clean ring on a busy host has
MISMATCH_RISE = 3.0  # the factor by which the mismatch rises
TEMPLATE_RISE = 1.5  # a template that was there from the first updates on is the task's
EVALUATION_ERRORS = 3.0  # standard errors: the best of several evaluations is high by chance
REWARD_ERRORS = 2.0
SHOWN = 3  # names in a text


@dataclass(frozen=True, slots=True)
class Reading:
    """A rule holds: the value that is beyond its limit, and a sentence with what was seen."""

    value: float
    limit: float
    seen: str


Rank = Callable[[Line], float]  # of the samples to read, the largest first


@dataclass(frozen=True, slots=True)
class Rule:
    """One alarm."""

    name: AlarmName
    sentence: str  # the rule in one line
    advice: str  # what to try
    check: Callable[[History], Reading | None]
    is_seen: Callable[[History], bool]  # whether the journal has what the rule reads
    needs: str  # that
    rank: Rank = lambda sample: 0.0  # which samples to read


def _held_out(history: History) -> Reading | None:
    """Per set of problems: the last evaluation against the best one before."""
    for problems in dict.fromkeys(one.problems for one in history.evaluations):
        *earlier, last = [one for one in history.evaluations if one.problems == problems]
        best = max((one for one in earlier if one.metric == last.metric), key=lambda one: one.value, default=None)
        if best is None or not _fell(best, last):
            continue
        before, after = (history.until("rollout/reward", one.version, WINDOW) for one in (best, last))
        if before is not None and after is not None and _rose(before, after):
            of = f" of {problems}" if problems else ""
            fell = f"from {best.value:.3f} (version {best.version}) to {last.value:.3f} (version {last.version})"
            rose = f"the reward rose from {before.mean:.3f} to {after.mean:.3f}"
            seen = f"held-out {last.metric}{of} fell {fell}, and {rose}"
            return Reading(best.value - last.value, HELD_OUT_DROP, seen)
    return None


def _fell(best: Evaluated, last: Evaluated) -> bool:
    error = EVALUATION_ERRORS * sqrt(best.variance + last.variance)
    return best.value - last.value > max(HELD_OUT_DROP, error)


def _rose(before: Window, after: Window) -> bool:
    return after.mean - before.mean > REWARD_ERRORS * sqrt(before.variance + after.variance)


def _reward(history: History) -> Reading | None:
    pair = history.pair("rollout/reward", WINDOW, HORIZON)
    spread = history.last("rollout/reward_std", WINDOW)
    if pair is None or spread is None:
        return None
    before, after = pair
    fall = before.mean - after.mean
    if fall <= REWARD_DROP * spread.mean or fall <= REWARD_ERRORS * sqrt(before.variance + after.variance):
        return None
    seen = f"the mean reward fell from {before.mean:.3f} ({before}) to {after.mean:.3f} ({after})"
    return Reading(fall / (spread.mean or fall), REWARD_DROP, seen)


def _length(history: History) -> Reading | None:
    """Against the shortest (longest) update of the window before: a drift may begin with the first update."""
    pair = history.pair("rollout/length", WINDOW, HORIZON)
    if pair is None or min(pair[0].values) <= 0:
        return None
    before, after = pair
    growth, shrinkage = after.mean / min(before.values), after.mean / max(before.values)
    if growth > LENGTH_RATIO:
        return _length_reading(after, growth, LENGTH_RATIO, f"shortest update of {before}")
    if shrinkage < 1 / LENGTH_RATIO:
        return _length_reading(after, shrinkage, 1 / LENGTH_RATIO, f"longest update of {before}")
    return None


def _length_reading(after: Window, ratio: float, limit: float, what: str) -> Reading:
    seen = f"a sample has {after.mean:.1f} tokens on average ({after}), {ratio:.2f} times those of the {what}"
    return Reading(ratio, limit, seen)


def _repetition(history: History) -> Reading | None:
    last = history.last(REPEATED, WINDOW)
    if last is None or last.mean <= REPEATED_SHARE:
        return None
    return Reading(last.mean, REPEATED_SHARE, f"{last.mean:.0%} of the samples repeat themselves ({last})")


def _template(history: History) -> Reading | None:
    n = WINDOW
    if len(history.templates) < 2 * n:
        return None
    now, first = (summed(shares for _, shares in part) for part in (history.templates[-n:], history.templates[:n]))
    name = max(now, key=lambda one: now[one])
    share, before = now[name] / n, first.get(name, 0.0) / n
    if share <= max(TEMPLATE_SHARE, TEMPLATE_RISE * before):
        return None
    seen = f"{share:.0%} of the samples follow one template, {before:.0%} did in the first {n} updates: {name[:80]!r}"
    return Reading(share, TEMPLATE_SHARE, seen)


def _unended(history: History) -> Reading | None:
    right, ended = (history.last(f"rollout/{name}", WINDOW) for name in ("accuracy", "completed_accuracy"))
    if right is None or ended is None or right.mean < LEAST_ACCURACY:
        return None
    share = 1 - ended.mean / right.mean
    if share <= UNENDED_SHARE:
        return None
    seen = f"{right.mean:.0%} of the answers are right, {ended.mean:.0%} are right and ended by a stop ({right})"
    return Reading(share, UNENDED_SHARE, seen)


def _entropy(history: History) -> Reading | None:
    pair = history.pair("train/entropy", WINDOW, HORIZON)
    if pair is None or pair[1].mean >= ENTROPY_RATIO * pair[0].mean:
        return None
    before, after = pair
    seen = f"the entropy fell from {before.mean:.3f} ({before}) to {after.mean:.3f} nats ({after})"
    return Reading(after.mean / before.mean, ENTROPY_RATIO, seen)


def _mismatch(history: History) -> Reading | None:
    """Against the least value of the window before: a rise may begin with the first update."""
    pair = history.pair("train/kl", WINDOW, HORIZON)
    if pair is None or pair[1].mean <= max(MISMATCH_KL, MISMATCH_RISE * min(pair[0].values)):
        return None
    before, after = pair
    least = f"{min(before.values):.2g} ({before})"
    seen = f"the KL between sampler and learner rose from {least} to {after.mean:.2g} ({after})"
    return Reading(after.mean, MISMATCH_KL, seen)


def _collapse(history: History) -> Reading | None:
    last = history.last("train/ess", 1)
    if last is None or not history.signs:
        return None
    return Reading(last.mean, COLLAPSE_ESS, f"update {history.version}: {', '.join(history.signs)}")


def _masked(history: History) -> Reading | None:
    last = history.last("staleness/masked_share", WINDOW)
    if last is None or last.mean <= MASKED_SHARE:
        return None
    return Reading(last.mean, MASKED_SHARE, f"{last.mean:.1%} of the tokens are too old to train ({last})")


def _no_signal(history: History) -> Reading | None:
    last = history.last("rollout/zero_advantage_share", WINDOW)
    if last is None or last.mean <= NO_SIGNAL_SHARE:
        return None
    seen = f"in {last.mean:.0%} of the groups all rewards are equal ({last}): they train nothing"
    return Reading(last.mean, NO_SIGNAL_SHARE, seen)


def _waiting(history: History, role: str, limit: float, what: str) -> Reading | None:
    """Over two windows: a busy host delays some updates by much."""
    n = 2 * WINDOW
    shares = history.waited_share(role, n)
    worst = sorted((name for name in shares if shares[name] > limit), key=lambda name: -shares[name])
    if not worst:
        return None
    names = ", ".join(f"{name} ({shares[name]:.0%})" for name in worst[:SHOWN]) + (", ..." if worst[SHOWN:] else "")
    seen = f"{len(worst)} of {len(shares)} {role}s waited for {what} most of the last {n} updates: {names}"
    return Reading(shares[worst[0]], limit, seen)


def _series(name: str) -> Callable[[History], bool]:
    return lambda history: name in history.points


def _worst_rewarded(sample: Line) -> float:
    """Wrong samples with a high reward first."""
    reward = sample.get("reward")
    return (1e9 if sample.get("correct") is False else 0.0) + (_figure(reward, -1e9))


def _figure(value: Any, otherwise: float) -> float:
    return float(value) if is_number(value) else otherwise


def _tokens(key: str) -> Rank:
    return lambda sample: _figure(sample.get(key), 0.0)


RULES = (
    Rule(
        "held_out_falls",
        f"the last evaluation is more than {HELD_OUT_DROP:g} and three standard errors below the best one, while the "
        "training reward rose by more than two",
        "read which wrong answers earn reward and repair the reward function; or take the checkpoint of the best "
        "evaluation; or train on more rows, add actor.kl_ctl, or lower actor.lr",
        _held_out,
        lambda history: len(history.evaluations) > 1,
        "two evaluations (evaluate.every_steps)",
        rank=_worst_rewarded,
    ),
    Rule(
        "reward_falls",
        f"the mean reward falls by more than {REWARD_DROP:g} standard deviations of a batch's rewards in {HORIZON} "
        "updates",
        "go back to a checkpoint before the fall, lower actor.lr or rollout.max_head_offpolicyness, set "
        "actor.behav_imp_weight_cap, add actor.kl_ctl; or the data became harder (data.shuffle)",
        _reward,
        _series("rollout/reward_std"),
        "trajectory lines of the head with rewards",
    ),
    Rule(
        "length_drift",
        f"the mean length is above {LENGTH_RATIO:g} times the least one, or below 1/{LENGTH_RATIO:g} of the greatest "
        f"one, of the updates {HORIZON} before",
        "if the long answers earn no more than the short ones: actor.overlong_tokens, actor.length_penalty, "
        'actor.aggregation = "seq-mean-token-sum-norm"; if short ones win: check that the reward needs the steps',
        _length,
        _series("rollout/length"),
        "trajectory lines of the head",
        rank=_tokens("n_tokens"),
    ),
    Rule(
        "repetition",
        f"more than {REPEATED_SHARE:.0%} of the samples consist for more than half of n-grams that occurred before",
        "lower actor.lr or gconfig.max_new_tokens, add actor.kl_ctl, and let the reward be 0 for cut answers "
        '(actor.truncated_samples = "zero")',
        _repetition,
        _series(REPEATED),
        "samples (journal.samples = true)",
    ),
    Rule(
        "one_template",
        f"more than {TEMPLATE_SHARE:.0%} of the samples begin alike for different prompts, and half as many more than "
        f"in the first {WINDOW} updates",
        "check whether the reward pays for the form alone; raise gconfig.temperature, add actor.kl_ctl, lower "
        'actor.lr; if the task asks for this form, set watch.off = ["one_template"]',
        _template,
        lambda history: bool(history.templates),
        "samples of four or more prompts a batch (journal.samples = true)",
    ),
    Rule(
        "unended_answers",
        f"more than {UNENDED_SHARE:.0%} of the right answers were cut at the limit, not ended by an accepted stop",
        "the policy does not learn to stop: raise gconfig.max_new_tokens, check gconfig.stop and the end token of the "
        'chat template, and let cut answers earn nothing (actor.truncated_samples = "zero")',
        _unended,
        _series("rollout/completed_accuracy"),
        "the figure `completed_accuracy` of a step",
        rank=_tokens("n_tokens"),
    ),
    Rule(
        "entropy_cliff",
        f"the entropy falls below {ENTROPY_RATIO:g} of its value in {HORIZON} updates",
        "lower actor.lr, raise actor.eps_clip_higher or gconfig.temperature, add actor.kl_ctl; harmless if the "
        "held-out accuracy is near its maximum",
        _entropy,
        _series("train/entropy"),
        "the figure `entropy` of a step",
    ),
    Rule(
        "mismatch_rises",
        f"the KL between sampler and learner is above {MISMATCH_KL:g} and three times its least value {HORIZON} "
        "updates before",
        "lower actor.lr or rollout.max_head_offpolicyness, set actor.behav_imp_weight_cap; with a server engine: the "
        "same dtype and kernels as the learner, and `tools.audit --recompute`",
        _mismatch,
        _series("train/kl"),
        "the figure `mismatch_kl` of a step",
    ),
    Rule(
        "collapse_ahead",
        "the policy moves too far in a version for a stable update, or two of these: a low effective sample size, a "
        "large KL between sampler and learner, many clipped tokens, an entropy far from that of the first updates",
        'lower actor.lr or rollout.max_head_offpolicyness; or set watch.on_collapse = "rollback"',
        _collapse,
        _series("train/ess"),
        "the figure `ess` of a step",
    ),
    Rule(
        "masked_tokens",
        f"more than {MASKED_SHARE:.0%} of the sampled tokens are too old to train",
        "raise rollout.max_head_offpolicyness, lower gconfig.max_new_tokens, use more generators or fewer concurrent "
        "samples, so that a sample lasts for fewer updates",
        _masked,
        _series("staleness/masked_share"),
        "the figure `masked_share` of a step",
        rank=_tokens("n_masked"),
    ),
    Rule(
        "no_signal",
        f"in more than {NO_SIGNAL_SHARE:.0%} of the groups all rewards are equal",
        "use harder or easier prompts, data.max_refill, a reward with steps between 0 and 1, or more samples a "
        "prompt; check the reward function on these answers",
        _no_signal,
        _series("rollout/zero_advantage_share"),
        "the figure `zero_advantage_share` of a step",
    ),
    Rule(
        "starved_learner",
        f"a learner waits for batches for more than {LEARNER_WAIT_SHARE:.0%} of its time: generators starve it",
        "use more generators and fewer learners, more rollout.max_concurrent_rollouts, shorter answers, a larger eta "
        "(docs/profiling.md)",
        lambda history: _waiting(history, "learner", LEARNER_WAIT_SHARE, "batches"),
        lambda history: any("learner-0" in waiting.total for _, waiting in history.waits),
        "`spans` lines of a learner",
        rank=_tokens("n_tokens"),
    ),
    Rule(
        "starved_generators",
        f"a generator waits for prompts or weights for more than {GENERATOR_WAIT_SHARE:.0%} of its time",
        "use fewer generators and more learners, a larger eta, faster pushes (docs/profiling.md); if one of many "
        "starves: `python -m tools.why`",
        lambda history: _waiting(history, "generator", GENERATOR_WAIT_SHARE, "prompts or weights"),
        lambda history: any("generator-0" in waiting.total for _, waiting in history.waits),
        "`spans` lines of a generator",
    ),
)
