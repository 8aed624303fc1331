"""Whether a run is healthy: its alarms, and rules that each look at one thing and return a remark, or None."""

from collections.abc import Callable
from statistics import fmean

from areal_bus.limits import LEAST_ESS, TRUNCATED_SHARE
from tools.alarms.alarm_reader import Finding
from tools.report.facts.run_facts import RunFacts
from tools.report.verdict.learning import MIN_UPDATES, parts
from tools.report.verdict.remarks import Grade, Remark, as_sentence, counted, percent

REFUNDED = 0.05  # share of admitted prompts
INCIDENTS = "Read the incidents below, and the tracebacks in RUN/logs."
ORDERLY = ("end_of_run", "end_of_data", "no_signal")  # refunds that are no fault


def remarks_on(facts: RunFacts, *more: Remark | None) -> tuple[Remark, ...]:
    """All remarks, and `more`, worst first; one good remark when no rule has any."""
    found = [_alarm(finding) for finding in facts.alarms.findings()] if facts.alarms is not None else []
    found += [remark for remark in (*(rule(facts) for rule in RULES), *more) if remark is not None]
    if all(remark.grade == Grade.GOOD for remark in found):
        found.append(Remark(Grade.GOOD, "No rule of this report found a fault."))
    return tuple(sorted(found, key=lambda remark: list(Grade).index(remark.grade), reverse=True))


def _alarm(finding: Finding) -> Remark:
    """An alarm that still holds is worse than one that is over. A starved actor costs time, not learning."""
    holds = "and holds" if finding.is_active else f"held last at version {finding.last}"
    evidence = f"Alarm {finding.name}, raised at version {finding.since}, {holds}. Rule: {finding.rule}."
    is_bad = finding.is_active and not finding.name.startswith("starved_")
    grade = Grade.BAD if is_bad else Grade.NOTE
    return Remark(grade, as_sentence(finding.seen), evidence, (as_sentence(finding.advice),))


def _state(facts: RunFacts) -> Remark | None:
    status = facts.status
    if status is None or not any(actor.name.startswith("head-") for actor in status.actors):
        return None  # a single process without a ring
    grade = {"alive": Grade.GOOD, "ended": Grade.GOOD, "stalled": Grade.BAD}.get(status.state, Grade.BAD)
    advice = () if grade == Grade.GOOD else ("Ask python -m tools.why who waits for whom, or how the run ended.",)
    verdict = f"The head's last verdict: {status.verdict}." if status.verdict else ""
    return Remark(grade, as_sentence(status.sentence), verdict, advice)


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


def _cut(facts: RunFacts) -> Remark | None:
    late = _late(facts, "rollout/truncated_share")
    if late is None or late <= TRUNCATED_SHARE:
        return None
    sentence = f"{percent(late)} of the answers are cut at gconfig.max_new_tokens in the last fifth of the updates."
    return Remark(Grade.NOTE, sentence, "", ("Raise gconfig.max_new_tokens, or penalise long answers.",))


def _few_tokens_dominate(facts: RunFacts) -> Remark | None:
    late = _late(facts, "train/ess")
    if late is None or late >= LEAST_ESS:
        return None
    sentence = f"A few tokens with large weights dominate the update: the effective sample size is {percent(late)}."
    advice = ("Lower actor.lr or rollout.max_head_offpolicyness, or use a correction (actor.correction).",)
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
RULES: tuple[Rule, ...] = (
    _state, _deaths, _stalls, _not_finite, _cut, _few_tokens_dominate, _refunds, _stragglers, _labels,
)  # fmt: skip


def _late(facts: RunFacts, name: str) -> float | None:
    """Mean over the last fifth of the updates; None for fewer than MIN_UPDATES."""
    values = facts.curve(name).values
    return fmean(parts(values)[1]) if len(values) >= MIN_UPDATES else None
