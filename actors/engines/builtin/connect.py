"""From settings to the builtin engine: without weights, or with adapters on base weights that it loads itself."""

from functools import partial
from typing import Any

import torch

from actors.engines.adapter_engine import with_adapters
from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.builtin.own_forward import REMEDY
from actors.engines.builtin.versions import VersionedEngine
from actors.engines.protocol import Engine
from actors.models.loading import empty_model, load_base, stop_ids
from actors.runtime.context import Context
from areal_bus.config.rollout import n_versions, prefix_share
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError


def open_for(context: Context, config: Config, tokenizer: Any) -> Engine:
    """The engine of a generator, which handles messages and weights every AHEAD_S."""
    return open_builtin(config, context.model_folder, tokenizer, device=context.device, ahead_s=AHEAD_S)


def open_builtin(config: Config, folder: str, tokenizer: Any, *, device: str, ahead_s: float = 0.0) -> Engine:
    """The engine of this generator, ready for its first push. `folder`: of the run's first model."""
    if config.actor.lora is None:
        return _engine(config, empty_model(folder, config.model.dtype, device), tokenizer, ahead_s)
    model = load_base(config, folder, device)
    engine = _engine(config, model, tokenizer, ahead_s)
    base_on = torch.device("cpu" if config.weights.staging == "host" else device)
    return with_adapters(engine, model, config, base_on=base_on, is_live=True)


def _engine(config: Config, model: Any, tokenizer: Any, ahead_s: float) -> Engine:
    rollout, stops = config.rollout, stop_ids(model, tokenizer)
    options = EngineOptions(
        n_slots=rollout.max_concurrent_rollouts,
        on_update=rollout.on_update,
        ahead_s=ahead_s,
        prefix_share=prefix_share(config),
    )
    make = partial(BuiltinEngine, options=options, stop_ids=stops, tokenizer=tokenizer)
    try:
        if rollout.on_update != "finish_old":
            return make(model)
        return VersionedEngine(model, make, n_slots=options.n_slots, most=n_versions(rollout))
    except EngineError as error:
        raise ConfigError(f"model family refused: {error}; {REMEDY}") from error
