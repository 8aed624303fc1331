"""The program in the sandbox that runs a row's checker: a published Python program that compares two outputs.

It gets three files as arguments (input, expected output, printed output) and prints 1 for a right output, else 0. The
printed output reaches it as text of a file only.
"""

import json
import sys


def main(checker: str) -> None:
    """The files come as JSON on standard input: input.txt, correct_output.txt, output.txt."""
    for name, text in json.load(sys.stdin).items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    sys.argv = ["checker.py", "input.txt", "correct_output.txt", "output.txt"]
    exec(compile(checker, "checker.py", "exec"), {"__name__": "__main__"})
