"""What the builtin engine can run and how long a sequence may be; knows a model's configuration only."""

from typing import Any

from actors.engines.protocol import Request
from areal_bus.errors import EngineError

ATTENTION = {"full_attention", "sliding_attention"}
BATCH_BOUND_ROPE = {"dynamic", "longrope"}  # their frequencies change with the longest sequence of the batch


def check_supported(config: Any) -> None:
    """Raises EngineError when the model keeps another state than keys and values of all positions."""
    config = config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION
    if others:
        raise EngineError(f"the builtin engine runs attention layers only; this model has {', '.join(sorted(others))}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in BATCH_BOUND_ROPE:
        raise EngineError(
            f"the builtin engine needs rotary frequencies that do not change with the batch; this model has {rope!r}"
        )


def most_tokens(config: Any) -> int:
    """Positions that the model holds."""
    return int(config.get_text_config().max_position_embeddings)


def window(config: Any) -> int | None:
    """Positions that its sliding attention sees; None when all layers see all."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    size = getattr(config, "sliding_window", None)
    return None if size is None else int(size)


def rules_of_done(request: Request, vocabulary: int) -> list[tuple[bool, str]]:
    """(whether it is broken, the rule) of a request that is done in part."""
    done = request.done
    if done is None:
        return []
    n, n_logps, n_stamped = len(done.ids), len(done.logps), sum(n for _, n in done.spans)
    return [
        (not 0 < n < request.max_new_tokens, f"what is done is a token or more, and fewer than asked for: {n} of "
         f"{request.max_new_tokens}"),
        (not n == n_logps == n_stamped, f"each token done has a log-prob and a version: {n}, {n_logps}, {n_stamped}"),
        (any(not 0 <= token < vocabulary for token in done.ids), f"token ids are below {vocabulary}"),
    ]  # fmt: skip
