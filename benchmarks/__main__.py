"""Command line of the benchmarks: `python -m benchmarks NAME` runs one bench and prints its figures."""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence

from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from benchmarks.agreement import bench as agreement
from benchmarks.code import bench as code
from benchmarks.delta import bench as delta
from benchmarks.e2e import bench as e2e
from benchmarks.eta0 import bench as eta0
from benchmarks.faults import bench as faults
from benchmarks.gate import bench as gate
from benchmarks.generate import bench as generate
from benchmarks.gpu import bench as gpu
from benchmarks.harness import pace
from benchmarks.harness.protocol import Bench
from benchmarks.jobs import async_speedup, demo, interrupt, throughput_bound
from benchmarks.loss import bench as loss
from benchmarks.observability import bench as observability
from benchmarks.pack import bench as pack
from benchmarks.parity import bench as parity
from benchmarks.push import bench as push
from benchmarks.reward import bench as reward
from benchmarks.simulate import bench as simulate
from benchmarks.smollm2 import bench as smollm2
from benchmarks.versions import bench as versions
from benchmarks.wire import bench as wire
from tools import terminal

BENCHES: Mapping[str, Bench] = {
    "agreement": agreement.Agreement(),
    "async": async_speedup.Asynchrony(),
    "bound": throughput_bound.Bound(),
    "code": code.CodeBench(),
    "delta": delta.DeltaBench(),
    "demo": demo.Demo(),
    "e2e": e2e.WALL,
    "e2e-core": e2e.CORE,
    "eta0": eta0.Eta0(),
    "faults": faults.Faults(),
    "gate": gate.GateBench(),
    "generate": generate.GenerateBench(),
    "gpu": gpu.GpuBench(),
    "interrupt": interrupt.Interrupt(),
    "loss": loss.LossBench(),
    "observability": observability.Observability(),
    "pack": pack.PackBench(),
    "parity": parity.Parity(),
    "push": push.PushBench(),
    "reward": reward.RewardBench(),
    "simulate": simulate.SimulateBench(),
    "smollm2": smollm2.SmolLM2Bench(),
    "versions": versions.VersionsBench(),
    "wire": wire.WireBench(),
}


def catalogue() -> str:
    rows = [(f"  {name}", bench.about) for name, bench in BENCHES.items()]
    return "\n".join(["benches:", *terminal.columns(rows)])


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m benchmarks"),
        description="Run one bench. Its last line of output is one JSON object; a missing peer is exit code 2.",
        epilog=catalogue(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("name", nargs="?", metavar="NAME", help="which bench")
    p.add_argument("--list", action="store_true", help="list the benches and end")
    p.add_argument("--quick", action="store_true", help="measure less, within about 3 minutes: intervals are wider")
    p.add_argument("--json", action="store_true", help="nothing but the JSON object on standard output")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.list:
        print(catalogue())
        return 0
    if args.name not in BENCHES:
        asked = "no bench is named" if args.name is None else f"no bench is called {args.name!r}"
        raise ConfigError(f"{asked}; there are: {', '.join(BENCHES)}")
    before = signal.signal(
        signal.SIGTERM, lambda number, _frame: sys.exit(128 + number)
    )  # as Ctrl-C: open contexts are closed
    pace.begin(quick=args.quick)
    try:
        figures = BENCHES[args.name].measure(quiet=args.json) | ({"quick": True} if args.quick else {})
    finally:
        signal.signal(signal.SIGTERM, before)
    if not args.json:
        width = max(len(key) for key in figures)
        print("\n".join(f"{key.ljust(width)}  {value}" for key, value in figures.items()))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    terminal.end(main)
