"""Tasks of the package reasoning-gym by name, and those that are refused. Imports nothing of it."""

PREFIX = "reasoning-gym:"
HELD_OUT = 100  # problems of an evaluation
REFUSED = {
    "coin_flip": "its scorer calls 0 right in nearly every problem",
    "codeio": "a seed does not give the same problems again",
    "composite": "it is a mix of others: name one of them",
    "game_of_life_halting": "its scorer calls any answer right",
}


def task_of(name: str) -> str:
    """NAME of "reasoning-gym:NAME"; "" for another task."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
