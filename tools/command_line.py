"""Command line of the tools that read one run."""

import argparse

from areal_bus.process.commands import as_here


def run_parser(module: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE [RUN]`. The caller adds the options."""
    p = argparse.ArgumentParser(
        as_here(f"python -m {module}"),
        description=description,
        epilog=as_here(epilog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    return p
