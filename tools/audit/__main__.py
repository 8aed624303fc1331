"""Checks a run against its invariants, by its journal alone: verdicts, then prompts and tokens by outcome."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tools import run, terminal
from tools.audit.audit import audit, figures, judge
from tools.audit.findings import NAMES, InvariantVerdict, Judgement
from tools.audit.recompute import recompute
from tools.terminal import run_parser

MORE = """\
Reads the journal and config.json, nothing else (with --recompute kept tokens and weights, too). Each invariant of
docs/invariants.md holds, is broken (with the first lines and ids that show it), or is not seen, with why: a running
job cannot show its end. Exit code 0: none is broken; 1: one is; 2: the folder is no run."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.audit", __doc__, MORE)
    p.add_argument(
        "--recompute",
        action="store_true",
        help="compute every kept log-prob afresh by the version stamped on it (journal.tokens and every version's "
        "weights kept: checkpoint.every_steps = 1, a large checkpoint.keep)",
    )
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    found = audit(where)
    fresh = recompute(where, found.findings, found.evidence.surviving()) if args.recompute else None
    judged, told = judge(found), figures(found)
    if fresh is not None:
        judged["I5"] = replace(judged["I5"], why=f"{judged['I5'].why}; {fresh.sentence()}")
        told["recomputed"] = fresh.told
    broken = [name for name, judgement in judged.items() if judgement.verdict is InvariantVerdict.BROKEN]
    if args.json:
        verdicts = {name: asdict(judgement) for name, judgement in judged.items()}
        print(json.dumps({"run": str(where.folder), "clean": not broken, "verdicts": verdicts, **told}))
        return 1 if broken else 0
    print(summary(told, str(where.folder)), end="\n\n")
    print("\n".join([*verdict_rows(judged), "", *outcome_rows(told)]), end="\n\n")
    print(f"broken: {', '.join(broken)}" if broken else "no invariant is broken")
    return 1 if broken else 0


SHOWN_LAGS = 10


def verdict_rows(judged: dict[str, Judgement]) -> list[str]:
    """One row an invariant; below a broken one, its first findings."""
    words = {verdict: str(verdict) for verdict in InvariantVerdict} | {InvariantVerdict.BROKEN: "BROKEN"}
    rows = terminal.columns([(name, NAMES[name], words[j.verdict], j.why) for name, j in judged.items()])
    out = []
    for row, judgement in zip(rows, judged.values(), strict=True):
        out.append(row)
        for finding in judgement.findings:
            ids = " ".join(f"{name} {value}" for name, value in finding.ids.items())
            text = f"{finding.where}  {finding.text}" + (f"  ({ids})" if ids else "")
            out.append(terminal.quote(text, indent="     ", width=10_000))
        if judgement.n_findings > len(judgement.findings):
            out.append(f"     and {judgement.n_findings - len(judgement.findings)} more")
    return out


def summary(figures: dict[str, Any], name: str) -> str:
    setup = figures["about"]
    gate = f"policy {setup['policy']}, eta {setup['eta']}, B {setup['batch_size']}"
    lines = f"{setup['lines']:,} lines of {setup['files']} processes"
    return f"{name}: {gate}, {setup['n_samples']} samples a prompt; {lines}"


def outcome_rows(figures: dict[str, Any]) -> list[str]:
    """Prompts, tokens and lags."""
    if "prompts" not in figures:
        return []
    prompts, tokens, lag = figures["prompts"], figures["tokens"], figures["lag"]
    reasons = _counts(prompts["refunded_by_reason"])
    dropped = _counts(tokens["dropped_by_reason"])
    lines = [
        f"prompts   {prompts['admitted']} admitted: {prompts['trained']} trained, {prompts['in_training']} in "
        f"training, {prompts['live']} live, {prompts['refunded']} refunded{reasons}",
        f"tokens    {tokens['received']} received: {tokens['trained']} trained, {tokens['masked']} masked, "
        f"{tokens['skipped']} skipped (no signal), {tokens['dropped']} dropped{dropped}, {tokens['waiting']} waiting",
    ]
    if tokens["without_figures"]:
        lines.append(f"          {tokens['without_figures']} in batches whose update is not there or has no figures")
    if tokens["completed_but_never_received"]:
        n = tokens["completed_but_never_received"]
        lines.append(f"          {n} more were sampled and never received (cancelled, or died with their generator)")
    if len(figures["terms"]) > 1:
        undone, n_terms = figures["undone"], len(figures["terms"]) - 1
        ordered = f" ({undone['on_purpose']} by a rollback)" if undone["on_purpose"] else ""
        work = f"{undone['updates']} updates{ordered}, {undone['trajectories']:,} trajectories"
        by = f"by {n_terms} later term{'s' * (n_terms > 1)}; {undone['prompts']} prompts were admitted again"
        lines.append(f"undone    {work}, {undone['tokens']:,} tokens, {by}")
    if prompts["refused_messages"]:
        lines.append(f"refused   {_counts(prompts['refused_messages'])[2:-1]}")
    for key in ("trained_tokens", "masked_tokens", "trajectories_by_born", "trajectories_by_oldest_token"):
        if lag[key]:
            lines.append(f"lag       {key.replace('_', ' ')}: {shares(lag[key])}")
    return lines


def shares(histogram: dict[str, int]) -> str:
    """Each lag with its share; of many lags the first few and the rest."""
    total = sum(histogram.values())
    parts = [f"{lag}: {n / total:.1%}" for lag, n in histogram.items()]
    if len(parts) > SHOWN_LAGS:
        rest = sum(list(histogram.values())[SHOWN_LAGS:])
        parts = [*parts[:SHOWN_LAGS], f"more: {rest / total:.1%}"]
    return f"{'  '.join(parts)}  (max {list(histogram)[-1]})"


def _counts(by_name: dict[str, int]) -> str:
    return f" ({', '.join(f'{n} {name}' for name, n in sorted(by_name.items()))})" if by_name else ""


if __name__ == "__main__":
    terminal.end(main)
