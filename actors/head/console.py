"""Console output of a run: one table row for each step, and a summary at the end."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from loguru import logger

from areal_bus.core.evaluation import Evaluation
from areal_bus.core.parts.reward_parts import PREFIX
from areal_bus.foreign_text import printable
from areal_bus.messages import Scored
from areal_bus.process.terminal import columns, columns_of, styled

HEADINGS = {  # of a step's row: its columns, and their width with the space before
    "step": 6,
    "version": 9,
    "reward": 9,
    "accuracy": 10,  # only where the reward function returns `correct`
    "completed": 11,  # likewise: right, and ended by an accepted stop
    "lag mean/max": 14,
    "masked": 8,
    "KL(mism.)": 12,
    "tokens/s": 11,
    "time left": 11,
}
DISPENSABLE = (
    "version",
    "masked",
    "KL(mism.)",
    "lag mean/max",
    "accuracy",
    "completed",
    "time left",
)  # on a narrow terminal


class Console:
    """Prints complete lines to one stream, with styles on a terminal; never redraws, since others print there, too."""

    def __init__(self, *, total_steps: int, sources: Sequence[str] = (), out: TextIO = sys.stdout) -> None:
        """`sources`: their mean rewards have a column each."""
        self._total = total_steps
        self._sources = {name: max(8, len(name) + 2) for name in sources}  # and widths
        self._out = out
        self._notes: dict[str, tuple[float, str]] = {}
        self._began: float | None = None
        self._first_version: int | None = None  # version that training began with
        self._last = time.monotonic()
        self._n_lines = 0
        self._has_accuracy = False
        self._columns: list[str] = []  # under the last heading

    def print(self, text: str, style: str = "") -> None:
        with contextlib.suppress(OSError):  # a full disk, no reader: the line is lost
            print(styled(printable(text), style, self._out), file=self._out, flush=True)

    def on(self, kind: str, fields: dict[str, Any]) -> None:
        """Print one progress event by its kind (areal_bus.core.effects.Progress)."""
        if kind == "late":
            logger.debug("head: {}", fields["text"])
        if kind == "step":
            self._step(fields)
        elif kind == "evaluation":
            self._evaluation(fields)
        elif kind == "note":
            self._note(fields["name"], fields["text"])
        elif kind == "alert":
            self.print(f"{fields['level']}: {fields['text']}", "yellow" if fields["level"] == "warning" else "")
        elif kind == "warning":
            self.print(f"warning: {fields['text']}", "yellow")
        elif kind == "phase" and fields["phase"] == "training":
            self._began = self._last = time.monotonic()
            self._first_version = None

    def _note(self, name: str, text: str) -> None:
        """Print an actor's start-up note when its text changes, and counters at most every 5 s."""
        now = time.monotonic()
        at, before = self._notes.get(name, (-10.0, ""))
        same = before.split(" ")[0] == text.split(" ")[0]
        if text and (not same or now - at >= 5):
            self._notes[name] = (now, text)
            self.print(f"{name}: {text}", "dim")

    def _evaluation(self, figures: dict[str, Any]) -> None:
        accuracy = "" if figures["accuracy"] is None else f"accuracy {figures['accuracy']:.3f}, "
        completed = figures.get("completed_accuracy")
        ended = "" if completed is None else f"completed {completed:.3f}, "
        if accuracy and figures["k"] > 1:
            se = figures["avg_at_k_se"]
            error = "" if se is None else f" +- {se:.3f}"
            shown = {"avg": f"{figures['avg_at_k']:.3f}{error}", "maj": cell(figures["maj_at_k"], "5.3f")}
            shown["pass"] = cell(figures["pass_at_k"], "5.3f")
            accuracy = "".join(f"{name}@{figures['k']} {value}, " for name, value in shown.items())
        reward = "no reward" if figures["reward"] is None else f"reward {figures['reward']:.3f}"
        parts = [f"{key.removeprefix(PREFIX)} {value:.3f}" for key, value in figures.items() if key.startswith(PREFIX)]
        reward += f" ({', '.join(parts)})" if parts else ""
        n, failed = f"{figures['n']}", ""
        if figures["n_failed"]:
            asked, missing = figures["n_asked"], figures["n_missing"]
            n, failed = f"{asked - missing} of {asked}", f", {missing} failed and are not in the means"
        last, versions = figures["version_last"], str(figures["version"])
        if last is not None and last != figures["version"]:
            versions = f"{versions}, answers up to {last}"
        what = f"{accuracy}{ended}{reward} on {n} held-out answers{failed}"
        self.print(f"evaluation {figures['name']} (version {versions}): {what}", "green")

    def _step(self, s: dict[str, Any]) -> None:
        now = time.monotonic()
        is_new = not self._has_accuracy and s.get("correct") is not None
        self._has_accuracy = self._has_accuracy or is_new
        if self._n_lines % 20 == 0 or is_new:
            self._columns = self._fitting_columns()
            self.print(self._row({name: name for name in self._columns}), "bold")
        self._n_lines += 1
        step_s, self._last = now - self._last, now
        elapsed = now - (self._began if self._began is not None else now - step_s)
        self._first_version = s["version"] - 1 if self._first_version is None else self._first_version
        left = elapsed / (s["version"] - self._first_version) * (self._total - s["version"])
        cells = {
            "step": str(s["version"]),
            "version": str(s["v"]),
            "reward": cell(s.get("reward"), "8.3f"),
            "accuracy": cell(s.get("correct"), "8.3f"),
            "completed": cell(s.get("completed_accuracy"), "9.3f"),
            "lag mean/max": f"{s['lag_mean']:.2f}/{s['lag_max']:<3.0f}" if "lag_max" in s else "-  ",
            "masked": f"{100 * s.get('masked_share', 0.0):.1f}%",
            "KL(mism.)": cell(s.get("mismatch_kl"), "9.2e"),
            "tokens/s": f"{s.get('n_tokens', 0) / max(step_s, 1e-9):.0f}",
            "time left": clock(left),
            **{name: cell(s.get(f"reward/{name}"), "6.3f") for name in self._sources},
        }
        self.print(self._row({name: cells[name] for name in self._columns}))

    def _row(self, cells: Mapping[str, str]) -> str:
        widths = self._sources | HEADINGS
        return "".join(text.rjust(widths[name]) for name, text in cells.items())

    def _fitting_columns(self) -> list[str]:
        """The columns that fit the terminal: a row that it breaks cannot be read. Elsewhere all."""
        widths, width = self._sources | HEADINGS, columns_of(self._out)
        found = [name for name in HEADINGS if name not in ("accuracy", "completed") or self._has_accuracy]
        found += [name for name in self._sources if name not in HEADINGS]
        for name in (*reversed(self._sources), *DISPENSABLE):
            if width and sum(widths[one] for one in found) > width and name in found:
                found.remove(name)
        return found


def cell(value: float | None, form: str) -> str:
    """The formatted value, or a dash of the same width when the step has none."""
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def comparison(before: Evaluation, after: Evaluation, n_problems: int = 3) -> list[str]:
    """Some held-out answers before and after training."""
    found = []
    for uid in range(min(n_problems, len(before.rows))):
        first, last = (evaluation.scored.get((uid, 0)) for evaluation in (before, after))
        if first is not None and last is not None:
            question = " ".join(first.prompt_text.split())[-60:]
            found.append((f"  {question!r}", f"before: {_short(first)}", f"after: {_short(last)}"))
    return columns(found) if found else []


def _short(scored: Scored) -> str:
    text = " ".join(scored.text.split())
    mark = "" if scored.correct is None else (" (right)" if scored.correct else " (wrong)")
    return repr(text if len(text) <= 28 else text[:25] + "...") + mark
