"""Prints alarms as text."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from areal_bus.process.commands import as_here
from tools import terminal
from tools.alarms.alarm_reader import AlarmReader, Finding
from tools.run import Line, Run


def headline(folder: Path, finding: Finding) -> str:
    """One line for the console of a job."""
    seen = terminal.safe(finding.seen)
    return as_here(f"alarm {finding.name} at version {finding.since}: {seen}; python -m tools.alarms {folder}")


def render(where: Run, reader: AlarmReader, width: int) -> Iterator[str]:
    """All alarms of a run as lines."""
    found = reader.findings()
    n = f"{len(found)} alarm{'' if len(found) == 1 else 's'}" if found else "no alarm"
    yield f"{where.folder} ({where.name}): {n} in {reader.version} versions"
    for finding in found:
        yield ""
        yield from _alarm(where.folder, finding, width)
    unseen = reader.unseen()
    if unseen:
        yield ""
        yield "not checked, because the journal lacks:"
        yield from terminal.columns([(f"  {name}", needs) for name, needs in unseen.items()])


def _alarm(folder: Path, finding: Finding, width: int) -> Iterator[str]:
    holds = "and holds" if finding.is_active else f"held last at version {finding.last}"
    yield f"{finding.name}: raised at version {finding.since}, {holds}"
    for title, text in (("rule", finding.rule), ("seen", finding.seen), ("try", finding.advice)):
        lines = textwrap.wrap(terminal.safe(text), max(width - 8, 20))
        yield from (f"  {title if i == 0 else '':<5} {line}" for i, line in enumerate(lines))
    if finding.samples:
        yield as_here(f"  read  python -m tools.samples {folder} --step N --uid U")
        yield from (f"    {_sample(sample, width - 4)}" for sample in finding.samples)


def _sample(sample: Line, width: int) -> str:
    reward = sample.get("reward")
    worth = f"{reward:.3f}" if isinstance(reward, int | float) else "none"
    head = f"step {sample['step']} uid {sample['uid']}, reward {worth}: "
    half = max((width - len(head) - 4) // 2, 12)
    prompt = terminal.one_line(sample["prompt"], width=half, keep_end=True)
    return f"{head}{prompt} -> {terminal.one_line(sample['completion'], width=half)}"
