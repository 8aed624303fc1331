"""The states of prompts and members as a table, from the tables in the core."""

from areal_bus.core.parts.state_table import StateTable


def rows(table: StateTable) -> str:
    lines = ["| from | to | when |", "|---|---|---|"]
    lines += [f"| | {state} | {why} |" for state, why in table.begins.items()]
    sources: dict[tuple[str, str], list[str]] = {}  # (next state, when) -> states before it
    for (before, after), why in table.moves.items():
        sources.setdefault((after, why), []).append(before)
    lines += [f"| {', '.join(before)} | {after} | {why} |" for (after, why), before in sources.items()]
    return "\n".join(lines)
