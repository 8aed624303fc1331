"""Where every sampled token went, and the length bias of what is trained: one table each."""

from collections.abc import Sequence

from tools.report.facts import token_account as fates
from tools.report.facts.length_bias import LengthBias, RatioEstimate, length_biases
from tools.report.facts.run_facts import RunFacts
from tools.report.facts.source_figures import SourceFigures, source_figures
from tools.report.facts.token_account import FateRow
from tools.report.page.parts import PageTable, Section

REFUNDS = {
    "reward_timeout": "the reward function took too long",
    "reward_error": "the reward function raised an error",
    "sampling_error": "the workflow or the engine failed",
    "prompt_too_long": "the prompt leaves no room for an answer",
    "too_old": "older than eta when its batch was taken",
    "no_signal": "all rewards of the group are equal; another prompt took its place",
    "poison": "three generators died with it",
    "end_of_data": "the data ended",
    "end_of_run": "live when the run ended",
}
MEANING = {
    fates.TRAINED: "entered the loss",
    fates.MASKED: "older than eta when their batch was taken: context only",
    fates.NO_GRADIENT: "in a batch, without a gradient: equal rewards in the group, or a truncated answer left out",
    fates.UNDONE: "trained or scored before a learner or head restarted from an earlier version",
    fates.LOST: "finished, then lost with a process or its lease; the prompt was sampled again",
    fates.ANEW: "an agent dropped them and began anew",
    fates.IN_FLIGHT: "finished, and waiting at the last line for a verdict, a batch or an update",
    fates.EVALUATION: "finished samples of evaluations",
    fates.UNFINISHED: "cancelled, cut off by a death, or running at the last line; the journal has no tokens of them",
}


def token_section(facts: RunFacts) -> Section:
    section = Section("tokens", "Where every token went")
    rows = fates.fate_rows(facts.samples)
    if not any(row.n_tokens for row in rows):
        section.note = "No sample was finished."
        return section
    section.intro = (
        "Each token counts once; a sample too, as trained if any of its tokens is. Generator seconds: those that a "
        "generator labels generate, divided among its samples by time in flight, and within a sample by tokens."
    )
    section.tables.append(fate_table(rows))
    if sources := source_figures(facts):
        section.tables.append(source_table(sources))
    biases = length_biases(facts.samples)
    if biases:
        policy, eta = (facts.setting(f"rollout.{key}") for key in ("staleness_policy", "max_head_offpolicyness"))
        title = f"Length bias under the policy {policy}, eta {eta}" if facts.config else "Length bias"
        section.tables.append(length_table(biases, title))
        section.note = (
            "Sampled: every finished sample, dropped ones too, except those of prompts that were open at the end; "
            "samples cancelled midway have no length. Trained: tokens in the loss, per sample that has any. Longest "
            "tenth: samples from that length on, by their share of the tokens. 95 % intervals: delta method, by group."
        )
    return section


def fate_table(found: Sequence[FateRow]) -> PageTable:
    """Rows that add up to the last one, in rounded seconds too."""
    n_samples, n_tokens, total_s = (sum(column) for column in list(zip(*found, strict=True))[1:])
    rows, so_far = list[list[str]](), 0.0
    for fate, n, tokens, s in found:
        shown, so_far = round(so_far + s, 1) - round(so_far, 1), so_far + s
        if n or tokens or shown >= 0.1:
            cells = ["unknown", ""] if fate == fates.UNFINISHED else [f"{tokens:,}", f"{tokens / n_tokens:.1%}"]
            rows.append([fate, f"{n:,}", *cells, f"{shown:,.1f}", MEANING.get(fate) or REFUNDS.get(fate, "")])
    rows.append(["all", f"{n_samples:,}", f"{n_tokens:,}", "100.0%", f"{total_s:,.1f}", ""])
    columns = ["went to", "samples", "tokens", "of all", "generator seconds", "meaning"]
    return PageTable(columns, rows, right=frozenset({1, 2, 3, 4}))


def source_table(found: Sequence[SourceFigures]) -> PageTable:
    columns = ["source", "groups", "samples", "tokens, mean", "reward", "accuracy", "entropy", "cut off"]
    rows = [
        [one.source, f"{one.n_groups:,}", f"{one.n_samples:,}", f"{one.mean_tokens:.1f}",
         *("" if value is None else f"{value:.3f}" for value in (one.reward, one.accuracy, one.entropy)),
         "" if one.truncated_share is None else f"{one.truncated_share:.1%}"] for one in found
    ]  # fmt: skip
    return PageTable(columns, rows, "By source, from reward on in the last fifth", right=frozenset(range(1, 8)))


def length_table(found: Sequence[LengthBias], title: str) -> PageTable:
    columns = ["source", "groups", "sampled, mean", "trained, mean", "trained / sampled", "longest tenth", "of sampled",
               "of trained", "trained / sampled"]  # fmt: skip
    rows = [
        [one.source or "all", f"{one.n_groups:,}", f"{one.mean_sampled:.1f}", f"{one.mean_trained:.1f}",
         interval(one.ratio), f"from {one.long_from:,}", f"{one.long_sampled:.1%}", f"{one.long_trained:.1%}",
         interval(one.long_ratio)] for one in found
    ]  # fmt: skip
    return PageTable(columns, rows, title, right=frozenset(range(1, 9)))


def interval(ratio: RatioEstimate) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
