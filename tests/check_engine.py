"""`areal-bus check-engine module:function`: the conformance suite on an engine of your own."""

import argparse
import os
import sys
from pathlib import Path

import pytest

from areal_bus.config.names.engines import ENGINES, is_known, why_unknown
from areal_bus.errors import ConfigError
from tools import terminal

SUITE = Path(__file__).parent / "actors" / "engines" / "test_conformance.py"


def main() -> int:
    p = argparse.ArgumentParser(
        "areal-bus check-engine",
        description="Hold an engine to the rules of all, with a small model on CPU. Exit code 0: it keeps them.",
    )
    p.add_argument("engine", metavar="MODULE:FUNCTION", help="its opener; the module is found from this folder")
    p.add_argument("-k", metavar="EXPRESSION", help="only rules with these words in their names, as pytest's -k")
    args = p.parse_args()
    if args.engine in ENGINES:
        raise ConfigError(
            f"{args.engine!r} is an engine of this project, which its own tests check; name MODULE:FUNCTION"
        )
    if not is_known(args.engine):
        raise ConfigError(why_unknown(args.engine))
    os.environ["AREAL_BUS_ENGINE"] = args.engine
    sys.path.append(os.getcwd())
    chosen = f"user and ({args.k})" if args.k else "user"
    return int(
        pytest.main([str(SUITE), "-k", chosen, "-q", "-p", "no:cacheprovider", "--rootdir", str(SUITE.parents[3])])
    )


if __name__ == "__main__":
    terminal.end(main)
