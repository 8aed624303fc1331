"""Bench `faults`: kills actors of a real job with SIGKILL and measures detection and recovery times.

Mostly generators and rewards, sometimes the learner and the head. Afterwards the job is drained, resumed and completed,
so that the audit can show that nothing is open. Detection: from the kill to the head's journal line. Recovery: to the
next lease of each prompt of the victim, or to the verdict on each sample that the victim was scoring.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path

from areal_bus.messages import Role
from areal_lab.chaos.survivors import Survivors
from benchmarks.faults import recovery
from benchmarks.faults.recovery import of_role, percentile
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from benchmarks.jobs.demo import ROOT
from benchmarks.jobs.real_job import Kill, KilledJob, Killer
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Line, Run

CONFIG = "configs/tiny.toml"
GENERATORS, REWARDS = 3, 2
KILLS = {Role.GENERATOR: 34, Role.REWARD: 14, Role.LEARNER: 3, Role.HEAD: 1}
QUICK_KILLS = {Role.GENERATOR: 6, Role.REWARD: 3, Role.LEARNER: 1, Role.HEAD: 1}
SEED = 1
LAST_STEPS = 10  # after the resume
CHANGES = (
    "run.total_train_steps=1000000",
    "launch.max_restarts=50",
    f"topology.rewards={REWARDS}",
    "model.scratch.hidden_size=64",
    "learner.warmup.steps=1",
    "data.batch_size=8",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=40",
    "rollout.max_head_offpolicyness=2",
    "rollout.max_concurrent_rollouts=128",
    "reward.function=benchmarks.faults.slow_reward:score",
    "reward.workers=4",
    "checkpoint.every_steps=5",
    "checkpoint.keep=3",
    "journal.samples=false",
)
OF_HEAD = ("joined", "member", "term", "admit", "lease", "sampled", "scored", "ready", "refund", "trajectory", "update")


class Faults:
    about = "a real job whose actors are killed at random: detection, recovery, nothing lost, nothing trained twice"

    def measure(self, *, quiet: bool) -> Figures:
        """Run it. Raises ConfigError without mpirun, or when the job does not end well."""
        began = time.monotonic()
        job = job_at(ROOT / "runs" / f"bench-faults-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", quiet=quiet)
        killer = Killer(job, SEED)
        with job.started():
            roles = order(pace.of(KILLS, QUICK_KILLS), SEED)
            for number, role in enumerate(roles, start=1):
                pace.say(number, len(roles), "kill", time.monotonic() - began)
                killer.kill(role)
            end(job)
        return figures(job, killer.kills) | {"seconds": round(time.monotonic() - began, 1), "run": str(job.run)}


def job_at(run: Path, *, quiet: bool) -> KilledJob:
    return KilledJob(run, config=CONFIG, changes=CHANGES, ranks=1 + REWARDS + GENERATORS, quiet=quiet)


def order(kills: dict[Role, int], seed: int) -> list[Role]:
    """Order of the victims' roles: a seeded shuffle."""
    roles = [role for role, n in kills.items() for _ in range(n)]
    random.Random(seed).shuffle(roles)
    return roles


def end(job: KilledJob) -> None:
    """Some updates more, then drained, resumed, and brought to an end at which nothing is open."""
    n_updates = job.tail.n_updates
    job.wait_until(lambda: job.tail.n_updates > n_updates + 2, "updates after the last kill")
    job.drain()
    job.tail.look()
    steps = ("--resume", str(job.run), "--set", f"run.total_train_steps={job.tail.version + LAST_STEPS}")
    with job.started(*steps):
        job.finish()


def figures(job: KilledJob, kills: list[Kill]) -> Figures:
    """Figures from the journal and the audit of the run."""
    run = Run(job.run)
    lines = sorted(run.events(*OF_HEAD, role="head"), key=lambda line: float(line["t"]))
    scores = list(run.events("score", role="reward"))
    generators, rewards = of_role(kills, Role.GENERATOR), of_role(kills, Role.REWARD)
    detected = list(recovery.detections(lines, generators + rewards))
    leased = list(recovery.lease_recoveries(lines, generators))
    scored = list(recovery.score_recoveries(lines, scores, rewards, n_rewards=REWARDS))
    survivors = Survivors.of(lines)
    broken = [name for name, j in judge(audit(run)).items() if j.verdict is InvariantVerdict.BROKEN]
    return {
        "bench": "faults",
        "kills": len(kills),
        **{f"kills_{role}": n for role, n in sorted(Counter(str(kill.role) for kill in kills).items())},
        "lost": len(survivors.lost),
        "trained_twice": len(survivors.twice),
        "audit_broken": ",".join(broken),
        "undetected": len(generators) + len(rewards) - len(detected),
        "detect_p50_s": percentile(detected, 0.5),
        "detect_p99_s": percentile(detected, 0.99),
        "recovered_leases": len(leased),
        "recovered_scores": len(scored),
        "recovery_p50_s": percentile(leased + scored, 0.5),
        "recovery_p99_s": percentile(leased + scored, 0.99),
        "recovery_max_s": percentile(leased + scored, 1.0),
        **{f"{role}_back_p50_s": percentile(back(lines, kills, role), 0.5) for role in (Role.LEARNER, Role.HEAD)},
        "updates": job.tail.n_updates,
        "prompts": len(survivors.admitted),
    }


def back(lines: list[Line], kills: list[Kill], role: Role) -> list[float]:
    return list(recovery.returns(lines, of_role(kills, role)))
