"""`areal-bus verify CERT RUN`: derives what a certificate says from the run again, and names what differs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT
from areal_bus.storage.versioned_dirs import sha256
from tools import terminal
from tools.run import Run
from tools.trust.certify import SCHEMA, Facts, broken_chains, chain_of, facts, files

CONFIG = "config.json"
SHOWN = 20  # differences
EPILOG = "exit code: 0 unchanged, 1 a difference, 2 no certificate or no run"


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.tool_parser(f"{SCRIPT} verify", __doc__, EPILOG)
    p.add_argument("certificate", metavar="CERT", type=Path, help="the run's certificate.json, or a copy of it")
    p.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    args = p.parse_args(argv)
    if not args.run.is_dir():
        raise ConfigError(f"missing run: {args.run} is no folder")
    differing = changes(read_certificate(args.certificate), Run(args.run))
    print("\n".join(differing[:SHOWN]) if differing else f"unchanged: {args.run} is as certified")
    if len(differing) > SHOWN:
        print(f"and {len(differing) - SHOWN} more")
    return int(bool(differing))


def read_certificate(path: Path) -> Facts:
    """Raises ConfigError for a file that is no certificate of this schema."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"unreadable certificate {path}: {error}") from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA or not isinstance(told.get("files"), dict):
        raise ConfigError(f"unknown certificate {path}: this version reads schema {SCHEMA}")
    return told


def changes(told: Facts, where: Run) -> list[str]:
    """What differs between a certificate and the run. Files first: what follows from them follows from the same."""
    then, config = told["files"], where.folder / CONFIG
    if CONFIG in then and (not config.is_file() or sha256(config) != then[CONFIG]):  # it names the journal's folder
        return [f"{'changed' if config.is_file() else 'missing'} file: {CONFIG}"]
    now = files(where)
    found = [f"{word} file: {name}" for name in sorted(now.keys() | then.keys()) if (word := _word(then, now, name))]
    found += broken_chains({path.stem: chain_of(path) for path in where.journals()})
    if not found:
        fresh = facts(where)
        found = [f"the certificate says another {key}" for key in (fresh | told) if not _same(key, fresh, told)]
    return found


def _same(key: str, one: Facts, other: Facts) -> bool:
    return key in one and key in other and json.dumps(one[key]) == json.dumps(other[key])


def _word(told: Mapping[str, str], now: Mapping[str, str], name: str) -> str:
    if name not in now:
        return "missing"
    if name not in told:
        return "new"
    return "" if told[name] == now[name] else "changed"


if __name__ == "__main__":
    terminal.end(main)
