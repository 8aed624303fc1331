"""What a sample of this run may hold, from the settings and the model's config.json. Imports no torch."""

from actors.models.model_config import published_number
from areal_bus.config.rollout import changes_logits
from areal_bus.config.sections import Config, WorkflowConfig
from areal_bus.core.parts.sample_limits import SampleLimits


def sample_limits(config: Config, model_folder: str) -> SampleLimits:
    """Limits for samples of the model in this folder, or of this Hugging Face id."""
    is_built_in = config.workflow.function == WorkflowConfig().function
    return SampleLimits(
        vocabulary=published_number(model_folder, "vocab_size"),
        positions=published_number(model_folder, "max_position_embeddings"),
        prompt=config.data.max_prompt_tokens if is_built_in else None,
        bounds_logps=is_built_in and not changes_logits(config.gconfig),
        bounds_guests=not changes_logits(config.gconfig),
    )
