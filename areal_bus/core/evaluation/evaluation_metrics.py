"""Metrics of an evaluation: avg@k with its standard error, maj@k and pass@k. Pure functions.

A *row* is one problem: its answers that the task judged right or wrong. Answers without a verdict are left out before
(I10). All metrics are means over rows; a row without a judged answer does not count. Sums are exact, so that the order
of rows makes no difference.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

Row = Sequence[bool]  # the judged answers of one problem
Voters = Sequence[tuple[str, bool]]  # (final answer, whether it is right) of one problem

READ = 50_000  # characters at the end of a completion that are searched for its final answer
BOX = "\\boxed"
BRACES = re.compile(r"\\boxed\s*\{|[{}]")
MARK = re.compile(r"####[ \t]*([^\n]+)|<answer>")
CLOSING = "</answer>"
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def average(rows: Sequence[Row]) -> float | None:
    """avg@k, which is also the estimate of pass@1: the mean over rows of the share of right answers."""
    shares = _shares(rows)
    return math.fsum(shares) / len(shares) if shares else None


def standard_error(rows: Sequence[Row]) -> float | None:
    """Standard error of `average` over rows: the sample deviation of the rows' shares, divided by sqrt(rows).

    None for fewer than two rows.
    """
    shares = _shares(rows)
    if len(shares) < 2:
        return None
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    return math.sqrt(variance / len(shares))


def pass_at(k: int, rows: Sequence[Row]) -> float | None:
    """pass@k: the probability that k answers, drawn without replacement from a row's n, hold a right one.

    Unbiased: 1 - C(n - c, k) / C(n, k) with c right answers (Chen et al. 2021, arXiv 2107.03374). Rows with fewer than
    k answers are left out; None when no row has k. Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k of at least 1; got {k}")
    found = [1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in rows if len(row) >= k]
    return math.fsum(found) / len(found) if found else None


def majority(rows: Sequence[Voters]) -> float | None:
    """maj@k: the share of rows whose most frequent final answer is right.

    Of n answers that are equally frequent, each counts 1/n. When the task judged equal answers differently, the share
    of right ones counts.
    """
    found = [_majority(row) for row in rows if row]
    return math.fsum(found) / len(found) if found else None


def final_answer(text: str) -> str:
    """The final answer in a completion, by which answers are equal for the vote.

    The last box, else the last "####" line or <answer>, else the last number, else the whole text. Spaces, case,
    thousands separators, dollars and a last full stop are removed. Only the last READ characters count, and the time is
    linear in them: the head calls this.
    """
    text = text[-READ:]
    answer = _last_box(text)
    if answer is None:
        answer = _last_marked(text)
    if answer is None:
        numbers = NUMBER.findall(text)
        answer = numbers[-1] if numbers else text
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    return re.sub(r"[\s$]+", "", plain).rstrip(".").casefold()


def _shares(rows: Sequence[Row]) -> list[float]:
    return [sum(row) / len(row) for row in rows if row]


def _majority(row: Voters) -> float:
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for answer, is_right in row:
        verdicts[answer].append(is_right)
    most = max(map(len, verdicts.values()))
    tied = [sum(group) / len(group) for group in verdicts.values() if len(group) == most]
    return sum(tied) / len(tied)


def _last_box(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are balanced."""
    first = text.find(BOX)
    last, end = -1, -1
    opened: list[int] = []  # begin of the content of each open box; -1 for another brace
    for brace in BRACES.finditer(text, first, text.rfind("}") + 1) if first >= 0 else ():
        token = brace[0]
        if token == "{":
            opened.append(-1)
        elif token != "}":
            opened.append(brace.end())
        elif opened and (begin := opened.pop()) > last:
            last, end = begin, brace.start()
    return text[last:end] if last >= 0 else None


def _last_marked(text: str) -> str | None:
    """The rest of the last "####" line, or the content of the last <answer>, whichever comes later."""
    found, at, last_closing = None, 0, text.rfind(CLOSING)
    while mark := MARK.search(text, at):
        found, at = mark[1] or found, mark.end()
        if not mark[1] and at <= last_closing:
            end = text.index(CLOSING, at)
            found, at = text[at:end], end + len(CLOSING)
    return found
