"""`python -m tools.audit [RUN]`: command line and output of the audit."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from tools import run, terminal
from tools.audit import report
from tools.audit.audit import audit, figures, judge
from tools.audit.findings import InvariantVerdict
from tools.audit.recompute import recompute
from tools.terminal import run_parser

MORE = """\
Reads the journal and config.json, nothing else (with --recompute kept tokens and weights, too). Each invariant of
docs/invariants.md holds, is broken (with the first lines and ids that show it), or is not seen, with why: a running
job cannot show its end. Exit code 0: none is broken; 1: one is; 2: the folder is no run."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.audit", description="Check a run against its invariants, by its journal alone.", epilog=MORE)
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
    print(report.about(told, str(where.folder)), end="\n\n")
    print("\n".join([*report.verdicts(judged), "", *report.tables(told)]), end="\n\n")
    print(f"broken: {', '.join(broken)}" if broken else "no invariant is broken")
    return 1 if broken else 0


if __name__ == "__main__":
    terminal.end(main)
