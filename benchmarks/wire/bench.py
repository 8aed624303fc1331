"""Bench `wire`: encodes and decodes a trajectory beside AReaL's serialization, and sends many around a ring.

The ring is generator, reward and head in three processes over encrypted tcp on loopback, with the real buses, gate and
ledger; tokens and verdicts are made up.
"""

from contextlib import ExitStack
from functools import partial
from statistics import median

from benchmarks.harness import pace, worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import Side

PROMPT, SAMPLED = 1, 2047  # tokens: those of a prompt have no log-prob and cost half
AREAL = "areal"
TRAJECTORIES = 4000
BYTES = 16 << 10  # bytes of tokens a trajectory
WINDOW = 256  # trajectories in flight
BATCH = 64
PLACES = {"generator": "generator-0.0", "reward": "reward-0.0", "head": "head"}


class WireBench:
    about = (
        "encoding beside AReaL's, ns and bytes a token; trajectories a second generator -> reward -> head, encrypted"
    )

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the peers."""
        n_bytes: dict[str, float] = {}
        with ExitStack() as stack:
            sides = {
                AREAL: stack.enter_context(worker_process.peer("wire.areal")),
                OURS: stack.enter_context(worker_process.ours("wire.ours")),
            }
            control = stack.enter_context(worker_process.ours("harness.sgemm"))

            def measure(name: str) -> float:
                answer = sides[name].ask("roundtrip", n_prompt=PROMPT, n_sampled=SAMPLED, seed=1)
                n_bytes[name] = answer["bytes"]
                return float(answer["seconds"])

            coded = interleave({name: partial(measure, name) for name in sides}, lambda: float(control.ask("sgemm")))
            runs: list[Figures] = []
            ringed = interleave(
                {OURS: partial(ring, runs, pace.of(TRAJECTORIES, 1000))}, stack.enter_context(on_both_cores())
            )
        return coded_figures(coded, n_bytes) | ring_figures(ringed, runs) | coded.figures()


def ring(runs: list[Figures], n: int = TRAJECTORIES) -> float:
    """One run of the ring: wall seconds a trajectory. Its figures are added to `runs`."""
    with ExitStack() as stack:
        actors = {place: stack.enter_context(worker_process.ours("wire.ring")) for place in PLACES}
        keys = {name.partition(".")[0]: actors[place].ask("key") for place, name in PLACES.items()}
        keys["head-0"] = keys.pop("head")
        head = actors["head"].ask("open", name="head", keys=keys, heads="")
        at = {
            place: actors[place].ask("open", name=PLACES[place], keys=keys, heads=head)
            for place in ("reward", "generator")
        }
        actors["head"].ask("hear_all", n=len(at))
        actors["head"].begin("collect", n=n, batch_size=BATCH)
        actors["reward"].begin("score", n=n)
        actors["generator"].begin("generate", n=n, n_bytes=BYTES, window=WINDOW, reward=at["reward"])
        found: Figures = actors["head"].answer()
        for place in ("reward", "generator"):
            actors[place].answer()
        close(actors)
    runs.append(found)
    return float(found["seconds"] or 0.0) / int(found["n"] or 1)


def close(actors: dict[str, Side]) -> None:
    for actor in actors.values():
        actor.ask("close")


def coded_figures(rounds: Rounds, n_bytes: dict[str, float]) -> Figures:
    n = PROMPT + SAMPLED
    return {
        "bench": "wire",
        "tokens": n,
        "ns_per_token": round(1e9 * rounds.cost(OURS) / n, 2),
        "bytes_per_token": round(n_bytes[OURS] / n, 3),
        **rounds.against(AREAL),
        "areal_ns_per_token": round(1e9 * rounds.cost(AREAL) / n, 2),
        "areal_bytes_per_token": round(n_bytes[AREAL] / n, 3),
    }


def ring_figures(rounds: Rounds, runs: list[Figures]) -> Figures:
    return {
        "trajectories_per_s": round(1 / rounds.cost(OURS)),
        "trajectories_per_s_worst": round(1 / max(costs[OURS] for costs in rounds.costs)),
        "trajectories_per_s_best": round(1 / min(costs[OURS] for costs in rounds.costs)),
        "head_cpu_us_per_trajectory": round(1e6 * median(float(r["cpu_s"] or 0) / int(r["n"] or 1) for r in runs), 1),
        "trajectory_bytes": BYTES,
        "curve": True,
        "ring_refused": rounds.refused,
    }
