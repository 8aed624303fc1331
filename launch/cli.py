"""The console script: `areal-bus COMMAND ...` runs the module of the command, as `python -m` does."""

import runpy
import sys

COMMANDS = {
    "launch": ("areal_bus.launch", "train, as a rank of mpirun; --dry-run and --explain run without mpirun"),
    "samples": ("tools.samples", "show sampled completions"),
    "breakdown": ("tools.breakdown", "show where the time went: by role, by step, by cause"),
    "audit": ("tools.audit", "check a run's journal against the invariants"),
    "why": ("tools.why", "show whether a run is alive, stalled, dead or over, and which actor waits for which"),
    "simulate": ("tools.simulate", "predict throughput and lag for each split and eta, in virtual time"),
    "report": ("tools.report", "write a run, several runs or a sweep as one HTML page with a verdict"),
    "timeline": ("tools.timeline", "write a run as a Chrome trace for ui.perfetto.dev"),
    "watch": ("tools.watch", "watch a run live, in the terminal or in a browser (--web)"),
    "export": ("tools.export", "write a run's scalars to TensorBoard, W&B, Trackio, CSV or Parquet"),
    "save-hf": ("tools.save_hf", "write the model of a checkpoint as a Hugging Face folder"),
    "sweep": ("tools.sweep", "run a grid of settings with several seeds and compare the cells"),
    "tasks": ("tools.tasks", "list the named tasks, or check a file of one with its own reward"),
    "evaluate": ("tools.evaluate", "score a model or a run on a file of problems"),
    "bench": ("tools.bench", "run a benchmark; the last line is one JSON object"),
}


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print("usage: areal-bus COMMAND ...\n")
        print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
        return 0
    if command not in COMMANDS:
        print(f"error: the command must be one of {', '.join(COMMANDS)}: got {command!r}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[command]
    sys.argv = [f"areal-bus {command}", *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    return 0
