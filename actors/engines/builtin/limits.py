"""Checks which models and requests the built-in engine supports, and how long a sequence may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from actors.engines.protocol import PLAIN, Request
from actors.engines.stop_strings import cannot_stop
from areal_bus.config.rollout import MOST_BIAS, MOST_PENALTY, MOST_RATE, MOST_TOP_K
from areal_bus.errors import EngineError, SettingRefused

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
    """Positions that the model holds. Raises EngineError where its configuration does not say."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None:
        raise EngineError(
            "max_position_embeddings missing: the builtin engine needs the number of positions, and config.json of "
            f"{config.model_type} does not say it"
        )
    return int(most)


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
        (total > most, f"the model holds {most} tokens; prompt and budget are {len(request.ids)} + "
         f"{request.max_new_tokens}"),
        (not are_words(request.ids, vocabulary), f"token ids are below {vocabulary}"),
        *rules_of_done(request, vocabulary),
    ]  # fmt: skip


def check_settings(request: Request, vocabulary: int, tokenizer: Any) -> None:
    """Raises SettingRefused for a sampling setting that has no meaning, or that this tokenizer does not allow."""
    why = cannot_stop(tokenizer) if request.controls.stop else ""
    for broken, sentence in [*rules_of_settings(request, vocabulary), (bool(why), why)]:
        if broken:
            raise SettingRefused(sentence)


def rules_of_settings(request: Request, vocabulary: int) -> list[tuple[bool, str]]:
    """(whether it is broken, the rule) of temperature, top_p and sampling controls."""
    c, most = request.controls, request.max_new_tokens
    plain = [
        (request.temperature < 0, f"a temperature is 0 or more, not {request.temperature}"),
        (not 0 < request.top_p <= 1, f"top_p is over 0 and at most 1, not {request.top_p}"),
    ]
    if c == PLAIN:
        return plain
    numbers = {"repetition_penalty": c.repetition_penalty, "presence_penalty": c.presence_penalty,
               "frequency_penalty": c.frequency_penalty, "min_p": c.min_p}  # fmt: skip
    odd = [f"{name} is a number, not {number}" for name, number in numbers.items() if not isfinite(number)]
    biased = [token for token, _ in c.logit_bias]
    return [
        *plain,
        (bool(odd), odd[0] if odd else ""),
        (not 0 <= c.top_k <= MOST_TOP_K, f"top_k is from 0 (all tokens) to {MOST_TOP_K}, not {c.top_k}"),
        (not 0 <= c.min_p <= 1, f"min_p is from 0 to 1, not {c.min_p}"),
        (c.min_new_tokens < 0, f"min_new_tokens is 0 or more, not {c.min_new_tokens}"),
        (c.min_new_tokens > most, f"min_new_tokens ({c.min_new_tokens}) is at most the budget of new tokens ({most})"),
        (not 1 / MOST_RATE <= c.repetition_penalty <= MOST_RATE,
         f"repetition_penalty is from {1 / MOST_RATE:g} to {MOST_RATE}, not {c.repetition_penalty}"),
        (not abs(c.presence_penalty) <= MOST_PENALTY or not abs(c.frequency_penalty) <= MOST_PENALTY,
         f"presence_penalty and frequency_penalty are from -{MOST_PENALTY} to {MOST_PENALTY}"),
        (any(not stop for stop in c.stop), "a stop string has at least one character"),
        (not are_words(c.stop_token_ids, vocabulary), f"stop token ids are below {vocabulary}"),
        (not are_words(biased, vocabulary), f"token ids of logit_bias are below {vocabulary}"),
        (any(not abs(bias) <= MOST_BIAS for _, bias in c.logit_bias), f"a logit_bias is from -{MOST_BIAS} to "
         f"{MOST_BIAS}"),
    ]  # fmt: skip


def rules_of_done(request: Request, vocabulary: int) -> list[tuple[bool, str]]:
    """(whether it is broken, the rule) for a request that continues earlier tokens."""
    done = request.done
    if done is None:
        return []
    n, n_logps, n_stamped = len(done.ids), len(done.logps), sum(n for _, n in done.spans)
    return [
        (not 0 < n < request.max_new_tokens, f"a continued request has at least one token, and fewer than its "
         f"budget: {n} of {request.max_new_tokens}"),
        (not n == n_logps == n_stamped, f"each token done has a log-prob and a version: {n}, {n_logps}, {n_stamped}"),
        (not are_words(done.ids, vocabulary), f"token ids are below {vocabulary}"),
    ]  # fmt: skip


def are_words(ids: Sequence[int], vocabulary: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocabulary)


def check_update(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raises EngineError unless an update brings every weight that is held, in its shape and type, and no other."""
    if tensors.keys() != held.keys():
        odd = sorted(tensors.keys() ^ held.keys())
        raise EngineError(
            f"weights mismatch: {len(odd)} names differ, first {odd[0]}; an update brings every weight of the model"
        )
    for name, parameter in held.items():
        new = tensors[name]
        if new.shape != parameter.shape or new.dtype != parameter.dtype:
            raise EngineError(
                f"an update keeps shapes and types: {name} is {tuple(parameter.shape)} {parameter.dtype}, "
                f"not {tuple(new.shape)} {new.dtype}"
            )
