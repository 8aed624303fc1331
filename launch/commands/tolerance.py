"""What docs/tolerance.md measured, as a warning at the start: a learning rate and eta at which the score fell."""

from areal_bus.config.learner import ActorConfig
from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config

NAIVE_BORDER = 2.7e-4  # eta * lr at which naive PPO had lost a tenth of its score: share 0.9 of the fitted curve
DECOUPLED_LR = 4e-4  # the lowest of the learning rates at which a lag cost decoupled PPO: lag 2; lag 1 at 8e-4
PAGE = "docs/tolerance.md (measured on a small model)"


def staleness_warning(config: Config) -> str:
    """One sentence when eta and actor.lr lie beyond the measured border; empty otherwise."""
    eta, actor = config.rollout.max_head_offpolicyness, config.actor
    if not eta or kind_of(config.rollout.engine).makes_up_tokens:
        return ""
    product = eta * actor.lr
    if is_naive(actor) and product > NAIVE_BORDER:
        return (
            f"naive PPO lost a tenth of its score at eta * actor.lr = {NAIVE_BORDER:g} and half at 1.6e-3; this "
            f"run has {product:.2g}: set actor.use_decoupled_loss = true, or lower either; see {PAGE}"
        )
    if not is_naive(actor) and actor.lr >= DECOUPLED_LR and product >= 2 * DECOUPLED_LR:
        return (
            f"at actor.lr = {DECOUPLED_LR:g} a lag of 2, and at 8e-4 a lag of 1, also cost decoupled PPO; "
            f"this run has actor.lr = {actor.lr:g} with eta = {eta}: lower either; see {PAGE}"
        )
    return ""


def is_naive(actor: ActorConfig) -> bool:
    """Whether nothing corrects for the gap between proximal policy and sampler."""
    corrects = actor.correction not in ("", "none") or (actor.correction == "" and actor.use_decoupled_loss)
    return not corrects and actor.m2_threshold is None and actor.loss == "ppo"
