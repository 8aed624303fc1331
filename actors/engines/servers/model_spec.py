"""The model that a server serves: names, shapes and types of its weights, and limits of requests."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping

from actors.engines.builtin import limits
from actors.engines.protocol import Request
from areal_bus.config.algorithms import rounding_rules
from areal_bus.config.names.engines import NumberFormats
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError, EngineLost

ROUNDING = 1e-2  # by which a log-prob may be over 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model whose weights another process holds."""

    parameters: Mapping[str, Any]  # name -> tensor on the meta device: shapes and types
    vocabulary: int
    most_tokens: int  # positions that it holds
    tied: Mapping[str, str] = field(default_factory=dict)  # name of a weight that is another one -> of that one

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters.values())

    def check_request(self, request: Request, tokenizer: Any) -> None:
        """Raises EngineError for a request that cannot be served; some would crash the server."""
        total, most, vocabulary = len(request.ids) + request.max_new_tokens, self.most_tokens, self.vocabulary
        rules = [
            (not request.ids, "a prompt has at least one token"),
            (request.max_new_tokens < 1, f"at least one new token is asked for, not {request.max_new_tokens}"),
            (total > most, f"the model holds {most} tokens; prompt and budget are {len(request.ids)} + "
             f"{request.max_new_tokens}"),
            (not limits.are_words(request.ids, vocabulary), f"token ids are below {vocabulary}"),
            *limits.rules_of_done(request, vocabulary),
        ]  # fmt: skip
        for broken, sentence in rules:
            if broken:
                raise EngineError(sentence)
        limits.check_settings(request, vocabulary, tokenizer)

    def check_sampled(self, ids: Sequence[int], logps: Sequence[float]) -> None:
        """Raises EngineLost for an invalid token id or log-prob."""
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise EngineLost(f"a server samples token ids below {self.vocabulary}: it has sampled {token}")
        for logp in logps:
            if not (math.isfinite(logp) and logp <= ROUNDING):
                raise EngineLost(f"a log-prob is a number, and at most 0: a server gave {logp}")

    def check_weights(self, tensors: Mapping[str, Any]) -> None:
        """Raises EngineError unless these are exactly the weights of the model."""
        odd = sorted(tensors.keys() ^ self.parameters.keys())
        odd = odd or [name for name, form in self.parameters.items() if tensors[name].shape != form.shape]
        if odd:
            raise EngineError(
                f"mismatch of {len(odd)} weights in an update (first {odd[0]}): it must hold the weights of the model"
            )


def shape_of(model: Any) -> ModelSpec:
    """The spec of a model. Raises ConfigError if its parameters have other names than its files."""
    if get_model_conversion_mapping(model, add_legacy=False):
        raise ConfigError(
            "a server is sent weights under the names that the model's files have: transformers joins or renames those "
            f'of {model.config.model_type}; set rollout.engine = "builtin"'
        )
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    return ModelSpec(
        parameters=parameters,
        tied={name: names[id(parameter)] for name, parameter in every if name not in parameters},
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        most_tokens=limits.most_tokens(model.config),
    )


def check_names(url: str, served: Iterable[str], names: Iterable[str]) -> None:
    """Compare the server's weight names with the model's: weights that are not sent would keep their values."""
    theirs, ours = parts(name.rpartition(":")[2] for name in served), parts(names)
    if odd := sorted(theirs ^ ours):
        raise ConfigError(
            f"the server must serve the model of this run: {url} and model.path differ in {odd[0]!r}; start it with "
            "the folder of model.path"
        )


def check_formats(url: str, served: NumberFormats, config: Config, *, is_own: bool) -> None:
    """Compare a server's formats with the run's. `is_own`: the run sets its dtype. Raises ConfigError with the flag."""
    dtype = config.model.dtype
    if not is_own and served.dtype not in ("", dtype):
        raise ConfigError(
            f"dtype mismatch: {url} computes in {served.dtype}, and model.dtype is {dtype}: start it with --dtype "
            f"{dtype}"
        )
    for sentence in rounding_rules(config, served, url):
        raise ConfigError(sentence)


def refuse(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises ConfigError with the sentence of the first rule that is broken."""
    for broken, sentence in rules:
        if broken:
            raise ConfigError(sentence)


def parts(names: Iterable[str]) -> set[str]:
    """Indices of layers and experts, and whether there are biases; ignores quantisation scales of the server."""
    found = set()
    for name in names:
        found.update({name.rpartition(".")[2]} & {"bias"})
        found.update(re.findall(r"\w+\.\d+(?=\.)", name))
    return found
