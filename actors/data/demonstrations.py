"""Checks the rows for `learner.warmup`: supervised steps on the field `demonstration`, a right answer in full.

The generated tasks have one in every row; rows of files may have one.
"""

from collections.abc import Sequence

from actors.data.loading import RowWithOrigin
from areal_bus.errors import ConfigError


def check_demonstrations(rows: Sequence[RowWithOrigin]) -> None:
    """Raises ConfigError when no row has a demonstration, or for the first that is not a text."""
    given = [placed for placed in rows if placed.row.get("demonstration")]
    if not given:
        raise ConfigError(
            f"learner.warmup needs rows with a text in the field demonstration: none of the {len(rows)} rows has one; "
            "add it, or set learner.warmup.steps = 0"
        )
    for placed in given:
        if not isinstance(placed.row["demonstration"], str):
            kind = type(placed.row["demonstration"]).__name__
            raise ConfigError(f"the field demonstration must be a text: in {placed.where} it is of type {kind}")
