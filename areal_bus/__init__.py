"""The bus: records, staleness rule, ledger and membership (pure), and the thin world around them."""

__version__ = "0.1.0"
