"""The console script `areal-bus COMMAND ...`: the same as `python -m` of the module behind the command."""

import runpy
import sys

COMMANDS = {
    "launch": ("areal_bus.launch", "train, as a rank of mpirun; --dry-run and --explain without it"),
    "samples": ("tools.samples", "what the model wrote"),
    "breakdown": ("tools.breakdown", "where each actor's time went"),
    "audit": ("tools.audit", "the run checked against its invariants, by its journal alone"),
    "why": ("tools.why", "alive, stalled, dead or over, and who waits for whom"),
    "simulate": ("tools.simulate", "which split, which eta: a ring in virtual time"),
    "evaluate": ("tools.evaluate", "score a model or a run on a file of problems"),
    "bench": ("tools.bench", "measure; one JSON object on the last line"),
}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print("usage: areal-bus COMMAND ...\n")
        print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
        return 0
    if command not in COMMANDS:
        print(f"error: areal-bus has the commands {', '.join(COMMANDS)}: {command!r} is none", file=sys.stderr)
        return 2
    module, _ = COMMANDS[command]
    sys.argv = [f"areal-bus {command}", *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    return 0
