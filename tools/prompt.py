"""Shows the life of one prompt: leases, samples and their versions, verdicts, and its batch or why it was refunded."""

import argparse
from collections.abc import Callable, Iterator, Sequence

from areal_bus.core.parts.split import count
from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.run import Line, Run
from tools.surviving_history import span_pairs
from tools.terminal import run_parser

EPILOG = """\
examples:
  python -m tools.prompt 12                        prompt 12 of the latest run
  python -m tools.prompt runs/demo 12              prompt 12 of this run
  python -m tools.prompt runs/demo 3 --evaluation after    problem 3 of the evaluation "after"

Times are seconds since its first line, by the clocks of the hosts. The head's lines decide; generators and rewards
write theirs on their own. A uid is given again when a term of the learner goes back to before it was admitted."""

OF_PROMPTS = (
    "admit", "lease", "request", "completion", "sampled", "score", "scored", "refused", "unsampled", "compare",
    "group_score", "compared", "ready", "trajectory", "refund",
)  # fmt: skip
MAX_WIDTH = 400
OF_THE_RING = ("term", "update", "publish", "member")


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.prompt", __doc__, EPILOG)
    p.add_argument("uid", type=number, metavar="UID", help="its number: tools.samples shows those of samples")
    p.add_argument("--evaluation", default="", metavar="NAME", help="a problem of this evaluation instead")
    p.add_argument("--json", action="store_true", help="the journal's lines, as they were written")
    return p


def number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number, and come after RUN: it is {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    found = list(life(where, args.uid, args.evaluation))
    if not found:
        raise ConfigError(f"unknown prompt {args.uid}: {where.folder} has {prompts_of(where, args.evaluation)}")
    if args.json:
        for line in found:
            print(terminal.json_line(line))
        return 0
    print(f"{where.folder} ({where.name}): prompt {args.uid}{f' of {args.evaluation}' if args.evaluation else ''}\n")
    rows = [["seconds", "from", "what"], *rows_of(found, args.uid)]
    print("\n".join(terminal.columns(rows, right=frozenset({0}))))
    return 0


def rows_of(found: Sequence[Line], uid: int) -> list[list[str]]:
    """Seconds since the first line, writer and sentence of each line of a prompt's life."""
    walls = [float(line.get("wall", 0)) for line in found]
    first = next(filter(None, walls), 0.0)
    seconds = [f"{wall - first:.3f}" if wall else "?" for wall in walls]
    return [[s, writer(line), flat(sentence(line, uid))] for s, line in zip(seconds, found, strict=True)]


def life(where: Run, uid: int, evaluation: str = "") -> Iterator[Line]:
    """The lines about the prompt, in order, with its batch's version, terms that undo it, its holder's deaths."""
    holder, step, is_known = "", None, False
    for line in where.events(*OF_PROMPTS, *OF_THE_RING):
        event = line["event"]
        if event in OF_PROMPTS:
            if line.get("uid") != uid or line.get("evaluation", "") != evaluation:
                continue
            holder = line.get("holder", holder)
            step = line.get("step") if event == "trajectory" else step
            is_known = True
            yield line
        elif is_known and not evaluation and concerns(line, uid, holder, step):
            yield line
            if event == "term" and not is_trained(step, line.get("version", 0)):
                holder, step = "", None
                is_known = uid in line.get("open", ())  # else it is erased, and its uid is given again


def concerns(line: Line, uid: int, holder: str, step: int | None) -> bool:
    match line["event"]:
        case "term":
            return True
        case "update" | "publish":
            return step is not None and line.get("version") == step + 1
        case _:
            return line.get("name") == holder and line.get("state") in ("dead", "left", "evicted") and step is None


def is_trained(step: int | None, version: int) -> bool:
    """Whether version `version` contains batch `step`."""
    return step is not None and step < version


def prompts_of(where: Run, evaluation: str) -> str:
    lines = (line for line in where.events("admit", "request") if line.get("evaluation", "") == evaluation)
    uids = [line["uid"] for line in lines if "uid" in line]
    what = f"problems of the evaluation {evaluation!r}" if evaluation else "prompts"
    return f"{what} {min(uids)} to {max(uids)}" if uids else f"no {what}"


def flat(text: str) -> str:
    """In one line and printable: names and words of a journal may be anyone's."""
    return terminal.one_line(text, width=MAX_WIDTH)


def writer(line: Line) -> str:
    role, rank, inc = (line.get(key, "?") for key in ("role", "rank", "inc"))
    return str(role) if role == "head" else f"{role}-{rank}.{inc}"


def sentence(line: Line, uid: int) -> str:
    """What the line says, or what it lacks: a killed process leaves half a line, and a file may be edited."""
    try:
        return term(line, uid) if line["event"] == "term" else SENTENCES[line["event"]](line)
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        return f"incomplete line {line['event']!r}: {what}"


def admitted(line: Line) -> str:
    source = f" of {line['source']}" if line.get("source") else ""
    again = f", issued {line['issue']} times before" if line.get("issue") else ""
    credits = f"{line['live']} live and {line['in_training']} in training with it"
    return f"admitted at version {line['born']}: row {line['row']}{source}, pass {line['epoch']}{again}; {credits}"


def leased(line: Line) -> str:
    goes_on = f", from {line['n_done']} tokens of earlier holders" if line.get("n_done") else ""
    return f"attempt {line['attempt']} leased to {line['holder']}: {count(line['n'], 'sample')}{goes_on}"


def begun(line: Line) -> str:
    goes_on = f", from token {line['n_done']}" if line.get("n_done") else ""
    return f"sample {line['sample']} begins (attempt {line['attempt']}){goes_on}"


def completed(line: Line) -> str:
    return f"sample {line['sample']} ends: {line['n_tokens']} tokens {versions(line)}, {line['finish']}"


def versions(line: Line) -> str:
    spans = span_pairs(line.get("versions", []))
    if len(spans) == 1:
        return f"of version {spans[0][0]}"
    return "of versions " + ", ".join(f"{version} ({n})" for version, n in spans)


def verdict(line: Line) -> str:
    if line["status"] == "value":
        return f"value {line['reward']:g}"
    return f"{line['status']}{f': {error}' if (error := words(line, 'error')) else ''}"


def words(line: Line, key: str) -> str:
    return terminal.one_line(str(line.get(key, "")))


def group_verdict(line: Line) -> str:
    if line["status"] == "value":
        return f"rewards {', '.join(f'{reward:g}' for reward in line['rewards'])}"
    return f"{line['status']}: {words(line, 'error')}"


def recorded(line: Line) -> str:
    return f"sample {line['sample']} (attempt {line['attempt']}) has its verdict: {verdict(line)}"


def refused(line: Line) -> str:
    return f"refused: {line['what']} of {line.get('sender', '?')}: {words(line, 'why')}"


def unsampled(line: Line) -> str:
    return f"{line['holder']} failed (attempt {line['attempt']}): {line['reason']}: {words(line, 'error')}"


def ready(line: Line) -> str:
    missing = f", without samples {', '.join(map(str, line['missing']))}" if line.get("missing") else ""
    return f"group complete{missing}: waits for a batch"


def trained(line: Line) -> str:
    lag = line["clock"] - min((version for version, _ in span_pairs(line["versions"])), default=line["clock"])
    masked = f", {line['n_masked']} of them masked" if line["n_masked"] else ""
    what = f"reward {line['reward']:g}, {line['n_tokens']} tokens{masked}, largest lag {lag}"
    return f"sample {line['sample']} is in batch {line['step']}: {what}"


def refunded(line: Line) -> str:
    error = f": {words(line, 'error')}" if line.get("error") else ""
    again = "; its row is issued again" if line.get("again") else ""
    lost = f"{count(line.get('n_scored', 0), 'scored sample')} and {line.get('n_tokens_dropped', 0)} tokens not trained"
    return f"refunded, {line['reason']}{error}: age {line.get('age', 0)}, {lost}{again}"


def term(line: Line, uid: int) -> str:
    begins = f"term {line['term']} begins at version {line['version']}"
    if uid in line["open"]:
        kept = line["kept"][line["open"].index(uid)] if line.get("kept") else []
        return f"{begins}: stays open, verdicts kept of samples {', '.join(map(str, kept)) or 'none'}"
    return f"{begins}: {'erased' if uid >= line['next_uid'] else 'trained or refunded before'}"


SENTENCES: dict[str, Callable[[Line], str]] = {
    "admit": admitted,
    "lease": leased,
    "request": begun,
    "completion": completed,
    "sampled": lambda line: f"sample {line['sample']} is on its way to a reward: {line['n_tokens']} tokens",
    "score": lambda line: f"sample {line['sample']} scored in {line['score_s']:.3g} s: {verdict(line)}",
    "scored": recorded,
    "refused": refused,
    "unsampled": unsampled,
    "compare": lambda line: f"all samples have a verdict: {line['reward_actor']} compares them (reward.group)",
    "group_score": lambda line: f"the group scored in {line['score_s']:.3g} s: {group_verdict(line)}",
    "compared": lambda line: f"the group has its verdict: {group_verdict(line)}",
    "ready": ready,
    "trajectory": trained,
    "refund": refunded,
    "update": lambda line: f"version {line['version']} made of its batch",
    "publish": lambda line: f"version {line['version']} published: its credit is free",
    "member": lambda line: f"its holder {line['name']} is {line['state']}: {words(line, 'why')}",
}

if __name__ == "__main__":
    terminal.end(main)
