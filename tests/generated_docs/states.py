"""The states of prompts (a picture, too) and members as a table, from the tables in the core."""

from areal_bus.core.parts.state_table import StateTable


def page_of(table: StateTable) -> str:
    return f"{picture(table)}\n\n{rows(table)}"


def picture(table: StateTable) -> str:
    """A state diagram in Mermaid; [*] is the beginning, and the end of what has no next state."""
    sources = {before for before, _ in table.moves}
    ends = sorted({after for _, after in table.moves} - sources)
    lines = [f"    [*] --> {state}" for state in table.begins]
    lines += [f"    {before} --> {after}" for before, after in table.moves]
    lines += [f"    {state} --> [*]" for state in ends]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def rows(table: StateTable) -> str:
    lines = ["| from | to | when |", "|---|---|---|"]
    lines += [f"| | {state} | {why} |" for state, why in table.begins.items()]
    sources: dict[tuple[str, str], list[str]] = {}  # (next state, when) -> states before it
    for (before, after), why in table.moves.items():
        sources.setdefault((after, why), []).append(before)
    lines += [f"| {', '.join(before)} | {after} | {why} |" for (after, why), before in sources.items()]
    return "\n".join(lines)
