"""Sentences: limits, learning, health, advice. Pure: facts in, remarks out. Begin with `remarks.py`."""

from tools.report.facts.run_facts import RunFacts, of_server
from tools.report.verdict.health import remarks_on
from tools.report.verdict.learning import whether_it_learns
from tools.report.verdict.limits import what_limits
from tools.report.verdict.remarks import Verdict


def judge(facts: RunFacts) -> Verdict:
    if facts.clients is not None:
        found: Verdict = of_server().judge_server(facts)
        return found
    return Verdict(what_limits(facts), whether_it_learns(facts), remarks_on(facts))
