"""`areal-bus certify RUN`: states what a finished run holds, so that `areal-bus verify` finds any later change.

A certificate is not signed. It names the SHA-256 of each file of the run, the end of each journal's hash chain, and
what follows from the files: invariants, bounds, tokens, evaluations.
"""

import fcntl
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT
from areal_bus.storage import journal_chain
from areal_bus.storage.journal_segments import raw_lines
from areal_bus.storage.versioned_dirs import sha256
from tools import run, terminal
from tools.audit.audit import audit, figures, judge
from tools.audit.findings import NAMES
from tools.report.page.parts import Page, PageTable, Section, render
from tools.report.verdict.remarks import Grade, Remark
from tools.run import Run
from tools.terminal import run_parser

SCHEMA = 1
FILES = ("config*.json", "config.toml", "origin.json", "summary.json", "term.json", "split.json")
ENDED = ("config.json", "origin.json", "summary.json")  # of a run that has finished; a killed job leaves no summary
FOLDERS = ("samples", "evaluation", "batches", "frontiers", "checkpoints")  # and the journal's
Facts = dict[str, Any]
EPILOG = """\
Writes certificate.json and certificate.html into the folder of the run: hashes of its files, the ends of its journals'
hash chains, invariants, bounds, tokens and evaluations. It is not signed: keep it, or its SHA-256, in a
place that the users of the run cannot write. docs/certificate.md explains the page.

exit code: 0 whole, 1 a missing file (of a killed job: summary.json), a broken chain or invariant, 2 the run cannot be
certified"""


def facts(where: Run) -> Facts:
    """All that a certificate says of a run, from its files alone."""
    found, of_files = audit(where), files(where)
    told, origin = figures(found), where.origin()
    data = {"data_sha256": origin.get("rows_sha256", ""), "n_rows": origin.get("rows", 0)}
    chains = {path.stem: chain_of(path) for path in where.journals()}
    starts = [line for path in where.journals() for line in run.lines(path, "start")]
    evaluations = [
        {key: line[key] for key in ("name", "version", "accuracy", "reward", "n_problems") if key in line}
        for line in where.events("evaluation", role="head")
    ]
    return {
        "schema": SCHEMA,
        "job": where.summary().get("job", ""),
        "code": sorted({str(line.get("code", "not recorded")) for line in starts}),
        "config_sha256": of_files.get("config.json", ""),
        **data,
        "invariants": {name: {"verdict": str(j.verdict), "why": j.why} for name, j in judge(found).items()},
        "bounds": {key: told["about"].get(key) for key in ("policy", "eta", "batch_size", "n_samples")},
        **{key: told.get(key, {}) for key in ("prompts", "tokens", "lag")},
        "evaluations": evaluations,
        "chains": chains,
        "files": of_files,
    }


def files(where: Run) -> dict[str, str]:
    """SHA-256 of each file that counts, by its path below the run's folder."""
    journal = run.journal_folder(where.folder)
    found = [path for pattern in FILES for path in where.folder.glob(pattern)]
    found += [path for name in FOLDERS for path in (where.folder / name).rglob("*")]
    named = {path.relative_to(where.folder).as_posix(): path for path in found}
    named |= {f"journal/{path.name}": path for path in journal.glob("*.jsonl*")}
    return {name: sha256(named[name]) for name in sorted(named) if named[name].is_file()}


def chain_of(path: Path) -> Facts:
    """Lines and end of a journal's chain, and its first break; "not chained" for a run of an older version."""
    n_lines, end, fault = 0, "", ""
    try:
        for number, raw in enumerate(raw_lines(path), start=1):
            found = journal_chain.split(raw)
            if found is None:  # torn by a kill, or of an older version before the first chained line
                fault = fault or (f"line {number} has no hash" if end and first_of(raw) else "")
                continue
            body, hash_ = found
            before = end or str(first_of(body + b"}").get("follows", "")).partition("=")[2]
            if journal_chain.link(before, body) != hash_:
                fault = fault or f"line {number} does not follow from the line before it"
            n_lines, end = n_lines + 1, hash_
    except (OSError, EOFError, zlib.error) as error:
        fault = f"unreadable: {error}"
    return {"state": fault or ("chained" if n_lines else "not chained"), "lines": n_lines, "end": end}


def broken_chains(chains: Facts) -> list[str]:
    states = {name: chain["state"] for name, chain in chains.items()}
    return [f"journal {name}: {state}" for name, state in states.items() if state not in ("chained", "not chained")]


def first_of(raw: bytes) -> Facts:
    """The object of a line; an empty one for a torn line."""
    try:
        value = run.parse(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def named_ends(where: Run) -> Iterator[tuple[str, str, str]]:
    """(journal that names it, NAME, HASH) of each end that a start line names."""
    for path in where.journals():
        for line in run.lines(path, "start"):
            for named in [line.get("follows", ""), *line.get("seals", ())]:
                name, _, end = str(named).partition("=")
                if end:
                    yield path.name, name, end


def lost_ends(where: Run) -> list[str]:
    """Ends that a later start names, and that no line of that journal has."""
    wanted = list(named_ends(where))
    paths = where.journals() if wanted else []
    held = {path.stem: {found[1] for raw in raw_lines(path) if (found := journal_chain.split(raw))} for path in paths}
    lost = [one for one in wanted if one[2] not in held.get(one[1], ())]
    return [f"missing end of {name}, which {by} names: {end}" for by, name, end in lost]


def check_ended(where: Run) -> None:
    """Raises ConfigError while a job holds the run."""
    lock = where.folder / "lock"
    if lock.is_file():
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"unfinished run: a job writes {where.folder} now; wait for its end") from None


# certify


def main(argv: Sequence[str] | None = None) -> int:
    p = run_parser("tools.certify", __doc__, EPILOG)
    args = p.parse_args(argv)
    where = run.find(args.run)
    check_ended(where)
    told = facts(where)
    path = where.folder / "certificate.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_bytes(render(page_of(told, where)))
    faults = faults_of(told, where)
    print("\n".join([*faults, f"{path}: {len(told['files'])} files, {verdict(told)}"]))
    return int(bool(faults))


def faults_of(told: Facts, where: Run) -> list[str]:
    """Missing files, broken chains, missing ends and broken invariants of the run itself."""
    chains = broken_chains(told["chains"])
    judged = told["invariants"].items()
    broken = [f"{name} is broken: {one['why']}" for name, one in judged if one["verdict"] == "broken"]
    absent = [f"missing {name}" for name in ENDED if name not in told["files"]]
    return [*absent, *chains, *lost_ends(where), *broken]


def verdict(told: Facts) -> str:
    bare = [name for name, chain in told["chains"].items() if chain["state"] == "not chained"]
    n_lines = sum(chain["lines"] for chain in told["chains"].values())
    chain = f"{n_lines:,} chained lines"
    return f"{chain}; not chained (an older version wrote them): {', '.join(bare)}" if bare else chain


def page_of(told: Facts, where: Run) -> Page:
    faults = faults_of(told, where)
    answer = Remark(Grade.BAD if faults else Grade.GOOD, "; ".join(faults) or verdict(told))
    rows = [[name, NAMES.get(name, ""), one["verdict"], one["why"]] for name, one in told["invariants"].items()]
    about = [(key, json.dumps(told[key])) for key in ("code", "config_sha256", "data_sha256", "bounds", "evaluations")]
    tokens = [[key, json.dumps(value)] for key, value in (told["tokens"] | told["lag"]).items()]
    chains = [[name, one["state"], str(one["lines"]), one["end"]] for name, one in told["chains"].items()]
    tables = [
        PageTable(("invariant", "name", "verdict", "basis"), rows),
        PageTable(("tokens", "number"), tokens),
        PageTable(("journal", "chain", "lines", "end"), chains),
        PageTable(("file", "SHA-256"), list(told["files"].items()), is_folded=True),
    ]
    command = f"{SCRIPT} verify {where.folder / 'certificate.json'} {where.folder}"
    sections = [Section("facts", "Facts", tables=tables)]
    return Page(f"Certificate of {where.name}", command, [("Is the run whole?", answer)], (), about, sections)


if __name__ == "__main__":
    terminal.end(main)
