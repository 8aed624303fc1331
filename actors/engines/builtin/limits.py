"""Checks which models and requests the built-in engine supports, and how long a sequence may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one model; asked of it once, as a configuration answers slowly."""

    most: int  # positions
    sees: int | None  # positions that sliding attention sees
    is_mixed: bool  # the model names the kind of attention of each layer
    vocabulary: int

    @staticmethod
    def of(model: Any) -> "Limits":
        is_mixed = getattr(model.config.get_text_config(), "layer_types", None) is not None
        n_words = model.get_input_embeddings().num_embeddings
        return Limits(most_tokens(model.config), window(model.config), is_mixed, n_words)


def rules(request: Request, limits: Limits) -> list[tuple[bool, str]]:
    """(whether it is broken, the rule) of a request."""
    most, vocabulary = limits.most, limits.vocabulary
    total = len(request.ids) + request.max_new_tokens
    return [
        (not request.ids, "a prompt has at least one token"),
        (request.max_new_tokens < 1, f"at least one new token is asked for, not {request.max_new_tokens}"),
        (request.temperature < 0, f"a temperature is 0 or more, not {request.temperature}"),
        (not 0 < request.top_p <= 1, f"top_p is over 0 and at most 1, not {request.top_p}"),
        (total > most, f"the model holds {most} tokens; prompt and budget are {len(request.ids)} + "
         f"{request.max_new_tokens}"),
        (not are_words(request.ids, vocabulary), f"token ids are below {vocabulary}"),
        *rules_of_done(request, vocabulary),
    ]  # fmt: skip


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
        (not are_words(done.ids, vocabulary), f"token ids are below {vocabulary}"),
    ]  # fmt: skip


def are_words(ids: Sequence[int], vocabulary: int) -> bool:
    """Whether each is one of so many words."""
    return not ids or (min(ids) >= 0 and max(ids) < vocabulary)


def check_update(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raises EngineError unless an update brings every weight that is held, in its shape and type, and no other."""
    if tensors.keys() != held.keys():
        odd = sorted(tensors.keys() ^ held.keys())
        raise EngineError(f"an update brings every weight of the model and no other: {len(odd)} differ ({odd[0]})")
    for name, parameter in held.items():
        new = tensors[name]
        if new.shape != parameter.shape or new.dtype != parameter.dtype:
            raise EngineError(
                f"an update keeps shapes and types: {name} is {tuple(parameter.shape)} {parameter.dtype}, "
                f"not {tuple(new.shape)} {new.dtype}"
            )
