"""What limits a run: the largest part of a step, and what the generators do meanwhile (docs/profiling.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from tools.breakdown.steps import Step
from tools.report.facts.run_facts import Breakdown, RunFacts
from tools.report.verdict.remarks import Grade, Remark, percent, seconds

BUSY = 0.85  # generators that stand less than the rest of their time are used well
LARGE = 0.25  # share of a step
AVOIDABLE = ("wait_push_s", "wait_reward_s")
PARTS = ("wait_sampling_s", "wait_reward_s", "wait_push_s", "update_s")


@dataclass(frozen=True, slots=True)
class StepShares:
    """The parts of all steps that have both an update before them and one of their own."""

    n: int
    step_s: float  # mean
    of: dict[str, float]  # part -> share of the steps' time

    @property
    def limiting(self) -> str:
        """The largest part. A wait for pushes or rewards comes first: it needs no other split of the GPUs."""
        avoidable = max(AVOIDABLE, key=lambda part: self.of[part])
        return avoidable if self.of[avoidable] >= LARGE else max(PARTS, key=lambda part: self.of[part])


def step_shares(steps: list[Step]) -> StepShares | None:
    """The shares; None without a whole step. The first step waits for everything to load and is left out."""
    whole = [step for step in steps if step.step_s is not None]
    total = fsum(step.step_s or 0.0 for step in whole)
    if total <= 0:
        return None
    of = {part: fsum(getattr(step, part) or 0.0 for step in whole) / total for part in PARTS}
    return StepShares(len(whole), total / len(whole), of)


def what_limits(facts: RunFacts) -> Remark:
    found = facts.breakdown
    if found is None:
        return Remark(Grade.NOTE, "What limits the run is not known.", facts.gap)
    shares = step_shares(found.steps)
    if shares is None:
        return Remark(Grade.NOTE, "What limits the run is not known yet: it has fewer than two updates.")
    return JUDGES[shares.limiting](found, shares)


def _by_sampling(found: Breakdown, shares: StepShares) -> Remark:
    decoding, episodes = _label(found, "generator", "generate"), _cause(found, "episode")
    prompts = _cause(found, "prompt")
    generators = f"Generators decode for {percent(decoding)} and wait for prompts for {percent(prompts)} of their time."
    evidence = f"{_share(shares, 'wait_sampling_s')} the learner waits for samples. {generators}"
    if episodes > decoding:
        look = "Look at the time of the tools or the agent: episodes wait for them, not for the model."
        return Remark(Grade.NOTE, "Tools or agents limit the run: generators wait for episodes.", evidence, (look,))
    advice = (
        "Give more GPUs or ranks to generators and fewer to learners: python -m areal_lab.simulate predicts the split.",
        "Use a faster engine, or more slots (rollout.max_concurrent_rollouts).",
        "Allow shorter answers (gconfig.max_new_tokens), if few of the cut ones earn a reward.",
    )
    if prompts > decoding:
        more = "Raise rollout.max_head_offpolicyness, if training bears it: the gate leaves generators without prompts."
        return Remark(Grade.NOTE, "Sampling limits the run.", evidence, (more, *advice))
    return Remark(Grade.NOTE, "Sampling limits the run.", evidence, advice)


def _by_reward(found: Breakdown, shares: StepShares) -> Remark:
    evidence = f"{_share(shares, 'wait_reward_s')} the learner waits for the verdicts of sampled groups."
    advice = ("Add reward workers (reward.workers), or make the reward function faster.",)
    return Remark(Grade.NOTE, "Rewards limit the run.", evidence, advice)


def _by_push(found: Breakdown, shares: StepShares) -> Remark:
    cost = found.pushes
    takes = f"A push takes {seconds(cost.published_s / max(cost.n, 1))}"
    shut = f"{_share(shares, 'wait_push_s')} the gate is shut until a version is published"
    evidence = f"{shut}. {takes}; generators stand in a swap for {percent(cost.stall_share)}."
    advice = (
        "Raise rollout.max_head_offpolicyness to 1 or more, if training bears it: a push then runs beside the update.",
        'Set weights.route = "auto": members on the learner\'s host copy from its memory.',
        'Use a faster network (bus.interface), or model.dtype = "bfloat16".',
    )
    return Remark(Grade.NOTE, "The weight push limits the run.", evidence, advice)


def _by_update(found: Breakdown, shares: StepShares) -> Remark:
    idle, swap = _label(found, "generator", "idle"), _label(found, "generator", "swap")
    generators = f"Generators are idle for {percent(idle)} and swap weights for {percent(swap)} of their time."
    evidence = f"{_share(shares, 'update_s')} the learner trains. {generators}"
    if idle + swap < 1 - BUSY:
        return Remark(Grade.GOOD, "The run is balanced: learner and generators both work.", evidence)
    advice = (
        "Give more GPUs or ranks to learners and fewer to generators: python -m areal_lab.simulate predicts the split.",
        "Compute larger micro-batches (learner.max_tokens_per_mb), if the model FLOP utilisation is low.",
    )
    return Remark(Grade.NOTE, "The learner limits the run.", evidence, advice)


JUDGES: dict[str, Callable[[Breakdown, StepShares], Remark]] = {
    "wait_sampling_s": _by_sampling,
    "wait_reward_s": _by_reward,
    "wait_push_s": _by_push,
    "update_s": _by_update,
}


def _share(shares: StepShares, part: str) -> str:
    return f"For {percent(shares.of[part])} of a step ({seconds(shares.step_s)} on average over {shares.n})"


def _label(found: Breakdown, role: str, label: str) -> float:
    """Share of a label in a role's time after loading."""
    found_s = fsum(one.seconds for one in found.shares if (one.role, one.label) == (role, label))
    return _of_role(found, role, found_s)


def _cause(found: Breakdown, cause: str) -> float:
    """Share of a cause of waiting in the time of the generators after loading."""
    waited_s = fsum(wait.seconds for wait in found.waits if (wait.role, wait.cause) == ("generator", cause))
    return _of_role(found, "generator", waited_s)


def _of_role(found: Breakdown, role: str, part_s: float) -> float:
    total_s = fsum(one.seconds for one in found.shares if one.role == role and one.label not in ("start", "load"))
    return part_s / total_s if total_s else 0.0
