"""Draws a frame for a terminal with rich."""

import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_bus.process.commands import as_here
from tools import terminal
from tools.watch.live_run import Alarm, Frame, Points

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH, MIN_SPARK = 40, 8
OF_FIGURES = 56  # columns of a curve beside its line
OF_RING = 80  # columns of the table of prompts
OF_ACTORS = 90  # columns of the whole table of actors
STYLES = {"alive": "green", "ended": "green", "stalled": "yellow"}  # other states: red
MAX_ACTORS = 12
MAX_SAMPLES = 3


def render(frame: Frame, width: int | None = None) -> Group:
    """The whole frame. `width`: columns of the terminal; a narrow one gets shorter curves and fewer columns."""
    columns = terminal.width() if width is None else width
    curves, actors = _curves(frame, columns), _actors(frame, columns)
    parts: list[RenderableType] = [_heading(frame), *_alarms(frame), _ring(frame, columns), curves, actors]
    return Group(*parts, *([_samples(frame)] if frame.samples else []))


def _heading(frame: Frame) -> Text:
    text = Text()
    text.append(f"{terminal.printable(frame.run)}: ", "bold")
    text.append(terminal.printable(frame.sentence), STYLES.get(frame.state, "red"))
    version = "no update yet" if frame.version is None else f"version {frame.version}"
    total = "" if frame.n_steps is None else f" of {frame.n_steps}"
    text.append(f"\n{version}{total}, published {frame.published}, term {frame.term}{_left(frame)}, ")
    text.append(time.strftime("%H:%M:%S", time.localtime(frame.wall)), "dim")
    if frame.verdict:
        text.append(f"\n{terminal.printable(frame.verdict)}", "yellow" if frame.state == "stalled" else "dim")
    return text


def _left(frame: Frame) -> str:
    if frame.left_s is None:
        return ""
    minutes, seconds = divmod(round(frame.left_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f", {hours}:{minutes:02}:{seconds:02} left"


def _alarms(frame: Frame) -> Iterator[Text]:
    for alarm in frame.alarms:
        yield Text(_alarm_line(alarm), "bold red" if alarm.is_active else "dim")


def _alarm_line(alarm: Alarm) -> str:
    over = "" if alarm.is_active else " (over)"
    return f"alarm {alarm.name}{over} since version {alarm.since}: {terminal.printable(alarm.seen)}"


def _ring(frame: Frame, columns: int) -> RenderableType:
    """Prompts at each stage, in the order of the ring; on a narrow terminal one line that wraps between words."""
    if columns < OF_RING:
        return Text(f"prompts: {' → '.join(f'{n} {stage}' for stage, n in frame.flow.items())}")
    table = Table(box=box.ROUNDED, title="prompts in the ring", title_justify="left", expand=False)
    for name in frame.flow:
        table.add_column(f"{name} →" if name != "trained" else name, justify="right")
    table.add_row(*(str(n) for n in frame.flow.values()))
    return table


def _curves(frame: Frame, columns: int) -> Table:
    """One line a series; the least and the largest value are the ends of its scale."""
    spark = max(MIN_SPARK, min(SPARK_WIDTH, columns - OF_FIGURES))
    table = Table(box=None, pad_edge=False, title="curves", title_justify="left")
    for heading in ("series", "last", "least", "most", ""):
        table.add_column(heading, justify="right" if heading in ("last", "least", "most") else "left", no_wrap=True)
    for name, points in frame.curves.items():
        values = [value for _, value in points]
        row = (name, *(figure(x) for x in (values[-1], min(values), max(values))))
        table.add_row(*row, Text(sparkline(points, spark), "cyan"))
    if not frame.curves:
        table.add_row("no update yet", "", "", "", "")
    return table


def _actors(frame: Frame, columns: int) -> Table:
    headings = ("name", "state", "process", "last line", "busy with", "incarnations")
    shown = len(headings) if columns >= OF_ACTORS else 4
    table = Table(box=None, pad_edge=False, title="actors", title_justify="left")
    for heading in headings[:shown]:
        table.add_column(heading, no_wrap=True)
    for actor in frame.actors[:MAX_ACTORS]:
        state = Text(
            actor.state, "red" if actor.state == "dead" or (actor.process == "gone" and frame.is_running) else ""
        )
        row = (actor.name, state, actor.process, f"{actor.silent_s:.0f} s ago", actor.doing, str(actor.n_lives))
        table.add_row(*row[:shown])
    if len(frame.actors) > MAX_ACTORS:
        table.add_row(as_here(f"and {len(frame.actors) - MAX_ACTORS} more: python -m tools.why"), *[""] * (shown - 1))
    return table


def _samples(frame: Frame) -> Panel:
    text = Text()
    for sample in frame.samples[:MAX_SAMPLES]:
        text.append(f"{terminal.printable(sample['heading'])}\n", "bold")
        text.append(
            f"  {terminal.printable(sample['facts'])}\n", {"right": "green", "wrong": "red"}.get(sample["mark"], "")
        )
        text.append(f"  | {terminal.one_line(sample['prompt'], keep_end=True)}\n", "dim")
        text.append(f"  > {terminal.one_line(sample['completion'])}\n")
    text.rstrip()
    return Panel(text, title=f"newest samples (batch of version {frame.samples[0]['version']})", title_align="left")


def sparkline(points: Points, width: int = SPARK_WIDTH) -> str:
    """The last `width` values as blocks between their least and their largest."""
    values = [value for _, value in points[-width:]]
    low, span = min(values), max(values) - min(values)
    return "".join(BLOCKS[round((x - low) / span * (len(BLOCKS) - 1)) if span else 0] for x in values)


def figure(value: float) -> str:
    return f"{value:.4g}"


def log_lines(before: Frame | None, frame: Frame) -> Sequence[str]:
    """What changed since `before`, as lines for a file or a pipe."""
    out = []
    if before is None or before.version != frame.version:
        flow = ", ".join(f"{n} {stage}" for stage, n in frame.flow.items())
        values = ", ".join(f"{name} {figure(points[-1][1])}" for name, points in frame.curves.items())
        version = "no update yet" if frame.version is None else f"version {frame.version}"
        out.append(f"{version}; prompts: {flow}" + (f"; {values}" if values else ""))
    if before is None or (before.sentence, before.verdict) != (frame.sentence, frame.verdict):
        out.append(terminal.printable(f"{frame.sentence}{'; ' if frame.verdict else ''}{frame.verdict}"))
    known = {(alarm.name, alarm.since) for alarm in before.alarms} if before is not None else set()
    out += [_alarm_line(alarm) for alarm in frame.alarms if (alarm.name, alarm.since) not in known]
    return [f"{time.strftime('%H:%M:%S', time.localtime(frame.wall))} {line}" for line in out]
