"""The stages of a run as a table: their settings, and the memory of a learner and a generator in each. Pure."""

from areal_bus.config.sections import Config
from areal_bus.config.stages import KEYS, settings_by_stage, value_at
from areal_bus.messages import Role
from areal_bus.process import terminal
from launch.memory import DecoderShape, estimate
from launch.memory.loads import format_bytes

ROLES = (Role.LEARNER, Role.GENERATOR)
HEADINGS = ("stage from step", *KEYS, *(f"{role}: device memory" for role in ROLES))


def stage_lines(config: Config, shape: DecoderShape | None, n_prompt: int) -> list[str]:
    """One line a stage, the largest memory marked; none without [[run.stage]]. `n_prompt`: of the longest prompt."""
    if not config.run.stage:
        return []
    stages = settings_by_stage(config)
    needs = {role: [device_bytes(settings, shape, role, n_prompt) for settings in stages.values()] for role in ROLES}
    rows = [
        (
            str(start),
            *(str(value_at(settings, key)) for key in KEYS),
            *(memory_cell(needs[role], index) for role in ROLES),
        )
        for index, (start, settings) in enumerate(stages.items())
    ]
    return terminal.table([HEADINGS, *rows])


def device_bytes(settings: Config, shape: DecoderShape | None, role: Role, n_prompt: int) -> int | None:
    """Of the first actor of this role; None for a model of unknown shape."""
    return None if shape is None else estimate(settings, shape, role, 0, n_prompt=n_prompt).device


def memory_cell(needs: list[int | None], index: int) -> str:
    need = needs[index]
    if need is None:
        return "unknown"
    others = [other for other in needs if other is not None and other != need]
    is_largest = bool(others) and need > max(others)
    return f"{format_bytes(need)}{', the largest' if is_largest else ''}"
