"""Whether a run is healthy. Each rule looks at one thing and returns a remark, or None when it is fine.

Remarks of other checks of the journal belong at the end of `remarks_on`.
"""

from collections.abc import Callable
from statistics import fmean

from tools.report.facts.run_facts import RunFacts
from tools.report.verdict.learning import MIN_UPDATES, parts
from tools.report.verdict.remarks import Grade, Remark, counted, percent

MASKED = 0.1  # share of tokens
SILENT = 0.5  # share of groups without a signal
CUT = 0.5  # share of answers
ESS = 0.5
KL_RISE, KL_LEAST = 5.0, 0.01
ENTROPY_LEFT = 0.1
REFUNDED = 0.05  # share of admitted prompts
INCIDENTS = "Read the incidents below, and the tracebacks in RUN/logs."
ORDERLY = ("end_of_run", "end_of_data", "no_signal")  # refunds that are no fault


def remarks_on(facts: RunFacts) -> tuple[Remark, ...]:
    """All remarks, worst first; one good remark when no rule has any."""
    found = [remark for rule in RULES if (remark := rule(facts)) is not None]
    if all(remark.grade == Grade.GOOD for remark in found):
        found.append(Remark(Grade.GOOD, "No rule of this report found a fault."))
    return tuple(sorted(found, key=lambda remark: list(Grade).index(remark.grade), reverse=True))


def _state(facts: RunFacts) -> Remark | None:
    status = facts.status
    if status is None or not any(actor.name.startswith("head-") for actor in status.actors):
        return None  # a single process without a ring
    grade = {"alive": Grade.GOOD, "ended": Grade.GOOD, "stalled": Grade.BAD}.get(status.state, Grade.BAD)
    advice = () if grade == Grade.GOOD else ("Ask python -m tools.why who waits for whom, or how the run ended.",)
    verdict = f"The head's last verdict: {status.verdict}." if status.verdict else ""
    return Remark(grade, f"{status.sentence[:1].upper()}{status.sentence[1:]}.", verdict, advice)


def _deaths(facts: RunFacts) -> Remark | None:
    of = facts.incidents.n_of
    n = max(of["restart"], of["death"], of["failure"])
    if not n:
        return None
    counts = ", ".join(counted(of[kind], kind) for kind in ("failure", "death", "restart") if of[kind])
    undone = f" {facts.incidents.n_undone} versions were trained again." if facts.incidents.n_undone else ""
    advice = (INCIDENTS,)
    return Remark(
        Grade.BAD if facts.incidents.n_undone else Grade.NOTE, f"Processes died: {counts}.{undone}", "", advice
    )


def _stalls(facts: RunFacts) -> Remark | None:
    of = facts.incidents.n_of
    if not of["stall"] and not of["broken push"]:
        return None
    counts = f"{counted(of['stall'], 'stall')}, broken pushes: {of['broken push']}"
    return Remark(Grade.NOTE, f"Progress stopped for a while: {counts}.", "", (INCIDENTS,))


def _not_finite(facts: RunFacts) -> Remark | None:
    bad = {name: curve.n_not_finite for name, curve in facts.curves.items() if curve.n_not_finite}
    if not bad:
        return None
    names = ", ".join(f"{name} ({n})" for name, n in bad.items())
    advice = ("Lower actor.lr, or look at the batch of the first such update.",)
    return Remark(Grade.BAD, "Some figures are not finite numbers.", f"Updates: {names}.", advice)


def _masked(facts: RunFacts) -> Remark | None:
    mean = _mean(facts, "staleness/masked_share")
    if mean is None or mean <= MASKED:
        return None
    advice = ("Raise rollout.max_head_offpolicyness, or shorten answers: masked tokens are sampled and not trained.",)
    return Remark(Grade.BAD, f"{percent(mean)} of the sampled tokens are too old to train.", "", advice)


def _silent(facts: RunFacts) -> Remark | None:
    late = _late(facts, "rollout/zero_advantage_share")
    if late is None or late <= SILENT:
        return None
    sentence = f"{percent(late)} of the groups have no signal in the last fifth of the updates: all rewards are equal."
    advice = ("Choose harder or easier problems, more samples a group (gconfig.n_samples), or data.max_refill.",)
    return Remark(Grade.NOTE, sentence, "", advice)


def _cut(facts: RunFacts) -> Remark | None:
    late = _late(facts, "rollout/truncated_share")
    if late is None or late <= CUT:
        return None
    sentence = f"{percent(late)} of the answers are cut at gconfig.max_new_tokens in the last fifth of the updates."
    return Remark(Grade.NOTE, sentence, "", ("Raise gconfig.max_new_tokens, or penalise long answers.",))


def _few_tokens_dominate(facts: RunFacts) -> Remark | None:
    late = _late(facts, "train/ess")
    if late is None or late >= ESS:
        return None
    sentence = f"A few tokens with large weights dominate the update: the effective sample size is {percent(late)}."
    advice = ("Lower actor.lr or rollout.max_head_offpolicyness, or use a correction (actor.correction).",)
    return Remark(Grade.NOTE, sentence, "", advice)


def _mismatch(facts: RunFacts) -> Remark | None:
    values = facts.curve("train/kl").values
    if len(values) < MIN_UPDATES:
        return None
    early, late = (fmean(part) for part in parts(values))
    if late < KL_LEAST or late < KL_RISE * early:
        return None
    sentence = f"Sampler and learner drift apart: their KL rose from {early:.2g} to {late:.2g}."
    advice = ("Check that sampler and learner compute the same model: dtype, template, sampling settings.",)
    return Remark(Grade.BAD, sentence, "", advice)


def _entropy(facts: RunFacts) -> Remark | None:
    values = facts.curve("train/entropy").values
    if len(values) < MIN_UPDATES:
        return None
    early, late = (fmean(part) for part in parts(values))
    if early <= 0 or late >= ENTROPY_LEFT * early:
        return None
    sentence = f"Entropy fell from {early:.2g} to {late:.2g}: the model hardly explores any more."
    advice = ("Stop here if the score is good; else add an entropy bonus, clip higher, or lower actor.lr.",)
    return Remark(Grade.NOTE, sentence, "", advice)


def _refunds(facts: RunFacts) -> Remark | None:
    faults = {reason: n for reason, n in facts.incidents.refunds.items() if reason not in ORDERLY}
    admitted = facts.incidents.n_admitted
    if not admitted or sum(faults.values()) <= REFUNDED * admitted:
        return None
    largest = max(faults, key=lambda reason: faults[reason])
    sentence = f"{percent(sum(faults.values()) / admitted)} of the prompts were refunded untrained, most as {largest}."
    return Remark(Grade.NOTE, sentence, "", ("Read logs/*.failures.txt and docs/troubleshooting.md.",))


def _stragglers(facts: RunFacts) -> Remark | None:
    slow = facts.breakdown.stragglers if facts.breakdown else []
    if not slow:
        return None
    more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    advice = (f"Look at the host of {slow[0].name}: other processes, clocks, network.",)
    return Remark(
        Grade.NOTE, f"{slow[0].name}{more} is slower than others of its role.", f"{slow[0].sentence}.", advice
    )


def _labels(facts: RunFacts) -> Remark | None:
    bad = [actor.name for actor in facts.breakdown.actors if not actor.whole] if facts.breakdown else []
    if not bad:
        return None
    return Remark(Grade.NOTE, f"Seconds without a label (I12) in {len(bad)} processes: {', '.join(bad[:3])}.")


Rule = Callable[[RunFacts], Remark | None]
RULES: tuple[Rule, ...] = (_state, _deaths, _stalls, _not_finite, _masked, _silent, _cut, _few_tokens_dominate,
                           _mismatch, _entropy, _refunds, _stragglers, _labels)  # fmt: skip


def _mean(facts: RunFacts, name: str) -> float | None:
    values = facts.curve(name).values
    return fmean(values) if values else None


def _late(facts: RunFacts, name: str) -> float | None:
    """Mean over the last fifth of the updates; None for fewer than MIN_UPDATES."""
    values = facts.curve(name).values
    return fmean(parts(values)[1]) if len(values) >= MIN_UPDATES else None
