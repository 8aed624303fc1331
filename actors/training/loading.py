"""From a beginning to the policy that a learner's life begins with; knows no optimizer and no other rank."""

from collections.abc import Callable
from typing import Any

from actors.context import Context, Pulse
from actors.data.loading import load_rows
from actors.models.loading import load_model
from actors.training.beginning import Beginning
from actors.training.policy import Policy
from actors.training.ranks import Ranks
from actors.training.warmup import demonstrate, warm_up
from areal_bus.config import Config
from areal_bus.journal import Journal


def load_policy(config: Config, context: Context, beginning: Beginning, ranks: Ranks) -> Policy:
    """The weights of the checkpoint, or those of the model; sharded over the ranks. Raises ConfigError."""
    scratch_seed = config.run.seed if config.model.scratch is not None else None
    return Policy(
        load_model(
            f"{beginning.folder}/model" if beginning.folder else context.model_folder,
            "float32",
            context.device if ranks.size == 1 else "cpu",  # sharding moves it, a layer at a time
            random_seed=None if beginning.folder else scratch_seed,
        ),
        ranks=ranks,
        device=context.device,
        temperature=config.gconfig.temperature,
        dtype=config.model.dtype,
        gradient_checkpointing=config.learner.gradient_checkpointing,
    )


def warm(
    policy: Policy,
    config: Config,
    context: Context,
    *,
    tokenizer: Any,
    journal: Journal,
    pulse: Pulse,
    tick: Callable[[], None],
) -> None:
    """The supervised steps that the config asks for before version 0."""
    rows = load_rows(config, context.config_folder)
    warm_up(
        policy,
        demonstrate(rows, tokenizer, config.data),
        config.learner.warmup,
        seed=config.run.seed,
        capacity=config.learner.max_tokens_per_mb,
        journal=journal,
        pulse=pulse,
        tick=tick,
    )
