"""Dynamic sampling (DAPO, arXiv 2503.14476): refunds complete groups without signal; new prompts take their place.

A group has no signal when all its rewards are equal. At most `max_refill` groups are replaced for a batch.
"""

from areal_bus.core.parts.ledger import LedgerEntry
from areal_bus.core.state import HeadState


class Refill:
    """Decides which complete group is replaced next. Its count begins anew with each batch and each term."""

    def __init__(self, state: HeadState) -> None:
        self._rules, self._ledger, self._rows = state.rules, state.ledger, state.rows
        self._n_replaced = 0

    def restart(self) -> None:
        """A batch was taken, or a term begins."""
        self._n_replaced = 0

    def next(self) -> LedgerEntry | None:
        """The oldest complete group without signal, if one may be replaced now; the caller refunds it.

        At eta = 0 only when every live group is complete, so that the order of verdicts decides nothing. When the data
        has ended, nothing could take the place.
        """
        if self._n_replaced >= self._rules.max_refill or not len(self._ledger.flat) or self._rows.is_exhausted:
            return None
        if self._rules.eta == 0 and self._ledger.n_live != len(self._ledger.ready):
            return None
        self._n_replaced += 1
        return self._ledger.flat.first()
