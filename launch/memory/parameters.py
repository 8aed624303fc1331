"""Parameters of the policy by how a learner keeps them, and what a push sends of them."""

from dataclasses import dataclass

from areal_bus.config.sections import Config
from launch.memory.shape import DecoderShape
from launch.memory.units import BYTES

MAX_DELTA_SHARE = 0.5  # areal_bus/weights/delta.py


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of the policy by how the learner keeps them, and bytes of a push."""

    trained: int  # float32, with moments and gradients
    frozen: int  # in model.dtype
    pushed_bytes: int
    adapted: int = 0  # of the frozen ones, those of layers with adapters
    largest: int = 0  # of the weight of one adapted layer

    @staticmethod
    def of(config: Config, shape: DecoderShape) -> "ParameterCounts":
        chosen = adapted_layers(config, shape)
        if config.actor.lora is None:
            return ParameterCounts(shape.n_parameters, 0, shape.n_parameters * BYTES[config.model.dtype])
        trained = shape.layers * config.actor.lora.rank * sum(n_out + n_in for n_out, n_in in chosen)
        sizes = [n_out * n_in for n_out, n_in in chosen]
        return ParameterCounts(
            trained, shape.n_parameters, trained * BYTES["float32"], shape.layers * sum(sizes), max(sizes, default=0)
        )


def adapted_layers(config: Config, shape: DecoderShape) -> list[tuple[int, int]]:
    """(outputs, inputs) of the layers of one decoder layer that have adapters."""
    if config.actor.lora is None:
        return []
    wanted = config.actor.lora.target_modules or tuple(shape.linear_layers)
    return [form for name, form in shape.linear_layers.items() if name in wanted]


def loaded_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of the policy as every learner rank loads it: float32, with adapters model.dtype."""
    return shape.n_parameters * BYTES["float32" if config.actor.lora is None else config.model.dtype]


def payload_bytes(config: Config, counts: ParameterCounts) -> int:
    """The largest payload of a delta; 0 where every push is a full one."""
    sends_deltas = (
        config.weights.delta_push == "auto" and config.weights.route != "shared" and config.actor.lora is None
    )
    return int(MAX_DELTA_SHARE * counts.pushed_bytes) if sends_deltas else 0
