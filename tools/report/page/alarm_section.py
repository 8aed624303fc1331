"""The sections of alarms, and of recordings by torch.profiler."""

import re

from tools.alarms.alarm_reader import Finding
from tools.report.facts.run_facts import RunFacts
from tools.report.page.axes import number
from tools.report.page.parts import PageTable, SampleCard, Section
from tools.run import Line
from tools.samples import texts

SAMPLES = 3  # of each alarm
MAX_TEXT = 3000  # characters of a text
PROFILE = re.compile(r"profiles/[A-Za-z0-9._-]+\.json\.gz")


def alarms_section(facts: RunFacts) -> Section:
    """Each alarm with its rule, what was seen, what to try, and samples to read."""
    section = Section("alarms", "Alarms")
    found = facts.alarms.findings() if facts.alarms is not None else []
    rows = [[one.name, str(one.since), _until(one), one.seen, one.rule, one.advice] for one in found]
    if rows:
        columns = ["alarm", "since version", "until", "seen", "rule", "what to try"]
        section.tables.append(PageTable(columns, rows, right=frozenset({1, 2})))
    for one in found:
        cards = [_card(sample) for sample in one.samples[:SAMPLES]]
        section.samples += [(f"{one.name}: samples to read", cards)] if cards else []
    unseen = facts.alarms.unseen() if facts.alarms is not None else {}
    section.note = "" if rows else "No alarm was raised."
    if unseen:
        section.note = f"{section.note} Not checked, because the journal lacks its data: {', '.join(unseen)}.".strip()
    return section


def _until(one: Finding) -> str:
    return "holds" if one.is_active else str(one.last)


def _card(sample: Line) -> SampleCard:
    reward = sample.get("reward")
    worth = number(float(reward)) if isinstance(reward, int | float) else "none"
    told = f"step {sample['step']}; reward {worth}; finish {sample.get('finish')}; {sample.get('n_tokens')} tokens"
    shown = [(title, text[:MAX_TEXT]) for title, text, _ in texts(sample)]
    return SampleCard(f"uid {sample['uid']} sample {sample['sample']}", told, shown)


def profiles_section(facts: RunFacts) -> Section | None:
    """Links to the recordings, relative to the run's folder; None without one."""
    found = [line for line in facts.profiles if PROFILE.fullmatch(str(line.get("file", "")))]
    if not found:
        return None
    section = Section("profiles", "Profiles", "Recordings by torch.profiler: open them in ui.perfetto.dev.")
    for line in found:
        about = f"{line['role']}-{line['rank']}.{line['inc']}, steps {line.get('first')} to {line.get('last')}"
        section.links.append((str(line["file"]), about))
    return section
