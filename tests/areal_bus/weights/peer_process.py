"""A process at the other end of a weight push: takes JSON orders on its standard input, answers with JSON lines."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_bus.messages import PushBegin


class Peer:
    """`python -m MODULE ARGUMENTS` in the checkout, with one thread for torch."""

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        )

    def order(self, begin: PushBegin, **more: Any) -> None:
        """Take part in this push."""
        self.say({"begin": asdict(begin), "prints": True, **more})

    def say(self, what: object) -> None:
        if self.process.stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line. Raises with its standard error when it has ended instead."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.end()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Exit code and standard error of an orderly end, or of the death that it died.

        What a machine lacks to compile C is no news here.
        """
        _, errors = self.process.communicate(timeout=timeout_s)
        lines = errors.splitlines(keepends=True)
        return self.process.returncode, "".join(line for line in lines if "areal_bus.native" not in line)
