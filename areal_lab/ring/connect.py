"""From settings to a simulated engine: the forms of the model's weights, and the laws of the config."""

import time
from collections.abc import Callable
from typing import Any

from loguru import logger

from actors.engines.builtin import limits
from actors.engines.servers.model_spec import ModelSpec
from actors.models.loading import empty_model, stop_ids
from actors.runtime.context import Context
from areal_bus.config.rollout import SimulatedConfig
from areal_bus.config.sections import Config
from areal_lab.ring.engine import SimulatedEngine, SimulatedRules
from areal_lab.ring.workload import LengthLaw, SpeedLaw


def open_simulated(
    context: Context,
    config: Config,
    tokenizer: Any,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> SimulatedEngine:
    """The engine of this generator. Raises ConfigError for a model in whose vocabulary no text can end."""
    if not context.index and not context.incarnation:
        logger.warning(
            'rollout.engine = "simulated": ALL TOKENS OF THIS RUN ARE MADE UP, with their log-probs, rewards and '
            "whatever its model learns from them. It shows how the ring runs, and nothing of a model."
        )
    model = empty_model(context.model_folder, config.model.dtype, "meta")
    settings = config.engine.simulated
    return SimulatedEngine(
        ModelSpec(
            parameters=dict(model.named_parameters()),
            vocabulary=int(model.get_input_embeddings().num_embeddings),
            most_tokens=limits.most_tokens(model.config),
        ),
        SimulatedRules(
            n_slots=config.rollout.max_concurrent_rollouts,
            lengths=LengthLaw(settings.median_tokens, settings.sigma),
            speeds=speeds(settings),
            on_update=config.rollout.on_update,
        ),
        stop_ids=stop_ids(model, tokenizer),
        tokenizer=tokenizer,
        clock=clock,
        wait=wait,
    )


def speeds(settings: SimulatedConfig) -> SpeedLaw:
    return SpeedLaw(
        decode_tokens_per_s=settings.decode_tokens_per_s,
        half_slots=settings.half_slots,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
        update_s=settings.update_s,
    )
