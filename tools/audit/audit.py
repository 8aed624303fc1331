"""Audits one run: reads its files in the order in which evidence is needed, then judges and counts."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tools.audit import run_settings as setup
from tools.audit.findings import Coverage, Findings, Judgement
from tools.audit.journal_reader import Handler, JournalFile, Line
from tools.audit.replay import terms
from tools.audit.replay.actor_logs import Evidence, GeneratorLog, LearnerLog, RewardLog, Start
from tools.audit.replay.head_replay import HeadReplay
from tools.audit.replay.ledger import TRAINED, TRAINING
from tools.audit.run_settings import RunSettings
from tools.breakdown.incarnations import Incarnation
from tools.run import Run

WALL_S = 0.1  # `wall_s` of an end line counts from just before the start line


class EveryLine:
    """Takes each line of one process in order."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence = file, evidence
        self.terms = {0} | {beginning.term for beginning in evidence.terms.all}
        role, _, place = file.name.partition("-")
        rank, _, inc = place.partition(".")
        self.writer = (role, rank, inc)
        self._t = self._began = float("-inf")
        self._term = self._told = 0

    def look(self, line: Line) -> None:
        if line["event"] == "start":
            self._t = self._began = line["t"]
            self._term = 0
            self.evidence.starts.setdefault(self.file.name, []).append(Start(line.get("pid"), line.get("host")))
        writer = (line["role"], str(line["rank"]), str(line["inc"]))
        if writer != self.writer:
            self.file.add("journal", f"a line has the name of its writer: {'-'.join(writer)} in {self.file.name}")
        if line["t"] < self._t:
            self.file.add("journal", f"the clock of a process never goes back: {line['t']} after {self._t}")
        self._t = line["t"]
        self._look_at_term(line["term"])
        if line["event"] == "end" and abs(line["wall_s"] - (self._t - self._began)) > WALL_S:
            text = f"wall_s counts from the start: {self._t - self._began:.3f} s, not {line['wall_s']}"
            self.file.add("I12", text)

    def _look_at_term(self, term: int) -> None:
        is_known = term in self.terms or not self.evidence.terms.all
        is_new, self._told = term != self._told, term
        if is_new and (not is_known or term < self._term):
            self.file.add("I6", f"terms are begun by the head and never go back: {term} after {self._term}")
        self._term = max(term, self._term) if is_known else self._term


@dataclass(slots=True)
class Audit:
    """The result of an audit."""

    setup: RunSettings
    findings: Findings
    evidence: Evidence
    head: HeadReplay | None  # None when the run has no file of the head
    n_lines: int
    files: list[JournalFile]

    @property
    def lives(self) -> list[Incarnation]:
        return [life for file in self.files for life in file.lives]

    @property
    def torn(self) -> list[str]:
        return [file.path.name for file in self.files if file.torn]


def audit(run: Run) -> Audit:
    """Read every journal file once, the heads last."""
    heads = run.journals("head")
    rules = setup.read(run.config(), run.earlier_configs(), run.origin())
    findings, evidence = Findings(), Evidence(terms.scan(heads))
    files, n_lines = [], 0
    for path in run.journals():
        if path not in heads:
            file = JournalFile(path, findings)
            files.append(file)
            handlers = handlers_of(path.name.partition("-")[0], file, evidence)
            n_lines += file.drive(handlers, EveryLine(file, evidence).look)
            label(file)
    head: HeadReplay | None = None
    for path in heads:  # last: the head's lines are compared with the others'
        file = JournalFile(path, findings)
        files.append(file)
        head = head or HeadReplay(rules, file, evidence)
        n_lines += file.drive(head.enter(file), EveryLine(file, evidence).look)
        head.leave()
        label(file)
    if head is not None:
        head.close(ended=ended(head))
    return Audit(rules, findings, evidence, head, n_lines, files)


def handlers_of(role: str, file: JournalFile, evidence: Evidence) -> dict[str, Handler]:
    match role:
        case "generator":
            return GeneratorLog(file, evidence).handlers()
        case "reward":
            return RewardLog(file, evidence).handlers()
        case "learner":
            return LearnerLog(file, evidence).handlers()
    return {}


def label(file: JournalFile) -> None:
    """The labels of a process sum to its wall time within 1 % (I12)."""
    for life in file.lives:
        if not life.whole:
            told = f"{life.labelled_s:.3f} s of {life.measured_s:.3f} s are labelled"
            file.add("I12", f"labels sum to the wall time within 1 %: {told}")


def ended(head: HeadReplay) -> bool:
    """Whether the run ended normally, so that nothing may be open. Without an exit code the head ended by an error."""
    return head.end is not None and head.end.get("code") == 0 and not head.unseen and not is_drained(head)


def is_drained(head: HeadReplay) -> bool:
    """Whether its last incarnation was drained: a later one may continue."""
    return head.end is not None and str(head.end.get("reason", "")).startswith("drained")


# verdicts


def judge(found: Audit) -> dict[str, Judgement]:
    seen = Coverage()
    n = found.n_lines
    seen.counts["journal"] = f"{n:,} lines in {len(found.files)} files"
    if found.torn:
        seen.counts["journal"] += f", torn last lines in {', '.join(found.torn)}"
    seen.counts["I12"] = f"labels of {len(found.lives)} lives"
    if found.head is None:
        for name in (f"I{i}" for i in range(1, 13)):
            seen.missing[name] = "the run has no file of the head"
    else:
        _see_safety(found, found.head, seen)
        _see_others(found, found.head, seen)
        _see_end(found, found.head, seen)
    return seen.judge(found.findings)


def _see_safety(found: Audit, head: HeadReplay, seen: Coverage) -> None:
    """Checks that need the head's lines only."""
    rules, clock, prompts = found.setup, head.clock, head.prompts
    if clock.n_admitted:
        counts = states(head)
        seen.counts["I1"] = f"{clock.n_admitted} admissions, at most {clock.most} of {rules.limit} live or in training"
        told = " + ".join(f"{n} {word}" for word, n in counts.items())
        seen.counts["I3"] = f"{told} = {len(prompts.state)} admitted"
    if head.ages.n_trajectories:
        oldest = max(head.ages.trained, default=0)
        seen.counts["I2"] = f"{rules.policy}: the oldest trained token is {oldest} behind (eta {rules.eta})"
        seen.counts["I8"] = f"{head.batches.n} batches of whole groups"
    if clock.n_updates:
        in_terms = f" in {head.terms.n_begun} terms" if head.terms.n_begun > 1 else ""
        n_updates = f"{clock.n_updates} updates{in_terms}, {clock.n_published} published"
        seen.counts["I6"] = f"{n_updates}, u {clock.u}, v {clock.v}"
    if prompts.n_leases:
        seen.counts["I7"] = (
            f"{prompts.n_leases} leases, {head.agreement.n_leases} of them by their generators' own lines"
        )
    if prompts.n_values + prompts.n_failed:
        n_scored = f"{prompts.n_values} values, {prompts.n_failed} timeouts and errors"
        seen.counts["I10"] = f"{n_scored}, {head.evaluations.n} evaluations"
    if head.agreement.n_unheard:
        names = ", ".join(sorted(head.agreement.without_a_file)) or "any reward"
        seen.missing["I10"] = f"{head.agreement.n_unheard} verdicts are of the head alone: no file of {names}"
    if rules.limit is None:
        seen.missing["I1"] = "config.json does not say B and eta"
    if rules.eta is None or rules.policy is None:
        seen.missing["I2"] = "config.json does not say eta and the staleness policy"


def _see_others(found: Audit, head: HeadReplay, seen: Coverage) -> None:
    """Checks that need the files of the other actors."""
    evidence = found.evidence
    if not evidence.generators:
        seen.missing["I5"] = "the run has no file of a generator"
    elif head.ages.n_trajectories:
        n = f"{evidence.n_completions} completions, {head.ages.n_trajectories} trajectories"
        seen.counts["I5"] = f"{n}, {evidence.n_digests} digests of {len(evidence.digests)} versions"
    if not evidence.rewards:
        seen.missing["I9"] = "the run has no file of a reward"
    else:
        seen.counts["I9"] = "every verdict was accepted or refused (bounds in bytes are not in the journal)"
    tokens = head.tokens
    seen.counts["I12"] += f", {tokens.received} tokens received"
    if head.batches.n_without_figures:
        seen.counts["I12"] += f" ({head.batches.n_without_figures} updates without figures of tokens)"


def _see_end(found: Audit, head: HeadReplay, seen: Coverage) -> None:
    """Checks that need a run that ended normally."""
    if head.unseen:
        for name in ("I1", "I3", "I4", "I6", "I9", "I11"):
            seen.missing[name] = head.unseen
        return
    if not ended(head):
        why = "the run has not ended (running or killed)"
        if is_drained(head):
            why = f"the run is to go on later: {head.end and head.end['reason']}"
        elif head.end is not None:
            why = f"the run ended before its time: {head.end.get('reason', 'its head wrote no exit code')}"
        seen.missing["I4"] = f"{why}; so far no trajectory is trained twice"
        seen.missing["I9"] = f"{why}: verdicts may be under way"
        seen.missing["I11"] = f"{why}; so far u reached {head.clock.u} without a stall"
        return
    seen.counts["I4"] = f"{head.ages.n_trajectories} trajectories, {head.prompts.passes.n_reissued} rows drawn again"
    if head.terms.n_begun > 1:
        seen.counts["I4"] += f", {head.undone.trajectories} trajectories undone"
    still_s = sum(file.still_s for file in found.files if file.name.startswith("head-"))
    stood = f" (the head itself stood still for {still_s:.0f} s)" if still_s else ""
    seen.counts["I11"] = f"u reached {head.clock.u}, everything published, no stall{stood}"


# figures


def states(head: HeadReplay) -> dict[str, int]:
    """Where the admitted prompts are at the last line (I3)."""
    by_state = Counter(head.prompts.state)
    return {
        "trained": by_state[TRAINED],
        "in training": by_state[TRAINING],
        "refunded": head.prompts.refunds.total(),
        "live": len(head.prompts.open),
    }


def figures(found: Audit) -> dict[str, Any]:
    """Prompts, tokens and lags, as plain JSON."""
    head = found.head
    about = asdict(found.setup) | {"lines": found.n_lines, "files": len(found.files), "torn": found.torn}
    if head is None:
        return {"about": about}
    ages = head.ages
    return {
        "about": about,
        "prompts": {
            "admitted": len(head.prompts.state),
            **{word.replace(" ", "_"): n for word, n in states(head).items()},
            "refunded_by_reason": dict(head.prompts.refunds),
            "drawn_again": head.prompts.passes.n_reissued,
            "refused_messages": dict(head.agreement.refused),
        },
        "tokens": _tokens(found, head),
        "lag": {
            "max_trained_token": max(ages.trained, default=None),
            "trained_tokens": histogram(ages.trained),
            "masked_tokens": histogram(ages.masked),
            "trajectories_by_born": histogram(ages.by_born),
            "trajectories_by_oldest_token": histogram(ages.by_oldest),
        },
        "terms": [{"term": b.term, "version": b.version} for b in head.terms.all[: head.terms.n_begun]],
        "undone": asdict(head.undone),
    }


def _tokens(found: Audit, head: HeadReplay) -> dict[str, Any]:
    batches, tokens = head.batches, head.tokens
    never_received = sum(made.n_tokens for made in found.evidence.completions.values())
    return {
        "received": tokens.received,
        "trained": batches.n_trained,
        "masked": batches.n_masked,
        "skipped": batches.n_skipped,
        "without_figures": tokens.in_batches - batches.n_tokens,
        "dropped": tokens.dropped.total(),
        "dropped_by_reason": dict(tokens.dropped),
        "waiting": tokens.waiting,
        "completed_but_never_received": never_received,
    }


def histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(lag): counts[lag] for lag in sorted(counts) if counts[lag]}
