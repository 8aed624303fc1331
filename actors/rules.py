"""What of the config, the ring and the data the pure head decides by."""

from typing import Any

from actors.context import Context, dump
from areal_bus.config import Config
from areal_bus.rules import HeadRules
from areal_bus.staleness import StalenessPolicy


def rules_of(context: Context, config: Config, problems: list[dict[str, Any]]) -> HeadRules:
    return HeadRules(
        batch_size=config.data.batch_size,
        eta=config.rollout.max_head_offpolicyness,
        policy=StalenessPolicy(config.rollout.staleness_policy),
        n_samples=config.gconfig.n_samples,
        total_steps=config.run.total_train_steps,
        n_generators=context.n_generators,
        n_rewards=context.n_rewards,
        n_learners=context.n_learners,
        silent_s=config.bus.silent_s,
        assemble_s=config.launch.timeout_s,
        push_timeout_s=config.weights.timeout_s,
        drop_last=config.data.drop_last,
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_keep=config.checkpoint.keep,
        evaluate_before=config.evaluate.before,
        evaluate_after=config.evaluate.after,
        evaluate_samples=config.evaluate.n_samples,
        partial_bytes=config.rollout.report_mib << 20,
        lease_secret=context.lease_secret.encode(),
        problems=tuple(dump(row) for row in problems),
        on_timeout=declared(config.reward.on_timeout),
        on_error=declared(config.reward.on_error),
        partial_groups=config.reward.partial_groups,
    )


def declared(policy: float | str) -> float | None:
    """The reward of a score that failed; None for "refund"."""
    return None if isinstance(policy, str) else policy
