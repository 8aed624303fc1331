"""Rows in their order, as the head draws them; knows no actor and no credit."""

import json
from typing import Any

from actors.data.order import Order
from areal_bus.rules import Drawn


class RowSource:
    """Draws row after row; `position` is the data frontier."""

    def __init__(self, rows: list[dict[str, Any]], order: Order) -> None:
        self.rows = rows
        self.order = order
        self.position = 0

    def draw(self) -> Drawn | None:
        """The next row; None when the last pass is over."""
        if self.order.total is not None and self.position >= self.order.total:
            return None
        epoch, row = self.order.row(self.position)
        self.position += 1
        return Drawn(row, epoch, json.dumps(self.rows[row], ensure_ascii=False))
