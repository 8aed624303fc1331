"""Finds and loads tokenizer and weights. Imports torch and transformers by use only: the launcher has neither."""

import contextlib
import json
import shlex
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from actors.models.model_config import (
    HUB_ID,
    WEIGHTS_FILE,
    base_of,
    is_adapter_folder,
    merge_folder,
    number_of,
    read_json,
)
from actors.models.scratch import is_scratch_folder
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import python

REPLY = "reply"  # of the conversation that shows how a template ends a turn
CLOCK = "strftime_now"  # the function by which a chat template asks for the date
DIRECTIVES = "aAbBcCdDeFGgHhIjklMmnPpRrSTUuVWwXxYyZz"  # of strftime
DOWNLOADS = ("smollm2-135m-instruct", "gemma-3-270m")  # what actors.models.download brings
LINE = 64  # bytes of a cache line
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # transformers' names for one class


def check_model_path(path: str, search: Path, *, key: str = "model.path") -> str:
    """The model as an absolute folder (relative to here or `search`), or the Hugging Face id. Raises ConfigError."""
    given = Path(path).expanduser()
    places = [given] if given.is_absolute() else [Path.cwd() / given, search / given]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        if HUB_ID.match(path) and given.parts[0] not in {"models", "..", "."}:
            return path
        tried = " and ".join(str(place) for place in places)
        raise ConfigError(
            f"{key} must be a model folder or a Hugging Face id (owner/name): nothing is at {tried}{_hint(path)}"
        )
    if is_adapter_folder(folder):
        _check_file(folder / WEIGHTS_FILE, path)
        check_model_path(base_of(str(folder)), search, key=f"the base model of {folder}")
        return str(folder.resolve())
    if not (folder / "config.json").is_file():
        raise ConfigError(f"missing config.json in the model folder {folder}{_hint(path)}")
    if not is_scratch_folder(folder):
        _check_weights(folder, path)
    return str(folder.resolve())


def _check_weights(folder: Path, path: str) -> None:
    """Raises ConfigError when a weight file is missing or one that the index names is."""
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"missing weights: no *.safetensors in the model folder {folder}; download or convert them first"
            f"{_hint(path)}"
        )
    for part in _parts(folder):
        _check_file(folder / part, path)


def _check_file(file: Path, path: str) -> None:
    try:
        with safe_open(file, framework="np"):  # reads the header, and that the file is as long as it says
            pass
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read the weights in {file}: {_first(error)}; it must be a whole safetensors file: download or "
            f"convert it again{_hint(path)}"
        ) from None


def _parts(folder: Path) -> list[str]:
    """Names of the files that hold the weights. Raises ConfigError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"invalid index of the weights: {index}: {error!r}; it must be JSON with a weight_map"
        ) from None
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise ConfigError(f"missing part of the weights in {folder}: {missing[0]}, one of {len(parts)}")
    return parts


def _hint(path: str) -> str:
    name = Path(path).name.lower()
    return (
        f"; to bring it: {python()} -m actors.models.download {name} {shlex.quote(path)}" if name in DOWNLOADS else ""
    )


def load_tokenizer(path: str, *, date: str = "") -> Any:
    """The model's tokenizer. Raises ConfigError without one. `date`, YYYY-MM-DD: today in chat templates; "": today."""
    if not (Path(path) / "tokenizer_config.json").is_file():  # adapters without one have that of their base
        path = base_of(path)
    try:
        tokenizer = _tokenizer_class(path).from_pretrained(path, **_where(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {path}: {_first(error)}") from error
    if date:
        tokenizer.apply_chat_template = partial(_apply_dated, tokenizer, tokenizer.apply_chat_template, date)
    return tokenizer


def _apply_dated(
    tokenizer: Any, apply: Any, date: str, messages: Any, tools: Any = None, *, chat_template: Any = None, **others: Any
) -> Any:
    """`tokenizer.apply_chat_template` with this date as today's, whichever template it takes."""
    template = tokenizer.get_chat_template(chat_template, tools)
    dated = _clock(date) + template if CLOCK in template else template
    return apply(messages, tools=tools, chat_template=dated, **others)


@lru_cache
def _clock(date: str) -> str:
    """strftime_now as a macro: transformers takes no functions from its callers."""
    day = datetime.fromisoformat(date)
    codes = [(f"%{dash}{code}", day.strftime(f"%{dash}{code}")) for code in DIRECTIVES for dash in ("-", "")]
    replaced = "".join(f"|replace({json.dumps(code)}, {json.dumps(text)})" for code, text in codes)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro -%}}"


def _tokenizer_class(path: str) -> Any:
    """AutoTokenizer, which brings torch; for a plain Llama folder the class that it would find, which does not."""
    import transformers

    if (Path(path) / "tokenizer.json").is_file() and read_json(path, "config.json").get("model_type") == "llama":
        settings = read_json(path, "tokenizer_config.json")
        if settings.get("tokenizer_class") in PLAIN_TOKENIZERS and "auto_map" not in settings:
            return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def max_positions(path: str) -> int | None:
    """Longest sequence that the model's config.json allows; None where it does not say. No torch."""
    path = base_of(path)
    if Path(path).is_dir():
        config = read_json(path, "config.json")
    else:
        from transformers.utils.hub import cached_file

        try:
            file = cached_file(path, "config.json")
        except OSError as error:
            raise ConfigError(f"model.path must be a model of the hub: {path}: {_first(error)}") from error
        config = read_json(str(Path(str(file)).parent), "config.json")
    return number_of(config, "max_position_embeddings")


def load_model(path: str, dtype: str, device: str, *, random_seed: int | None = None) -> Any:
    """The causal LM in eval mode, adapters merged; a tied weight is one parameter. `dtype`: "float32", "bfloat16", ...

    `random_seed`: random weights instead, the same for the same seed. Raises ConfigError when it does not load.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _quiet()
    model: Any
    try:
        if random_seed is None:
            base = base_of(path)
            whole: dict[str, Any] = {"config": _config(base), "dtype": getattr(torch, dtype)}
            if generation := _several_paddings(base):
                whole["generation_config"] = generation
            model = _soft_capped(AutoModelForCausalLM.from_pretrained(base, **whole, **_where(base)))
            if base != path:
                merge_folder(model, Path(path))
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random_seed)
                model = _structure(path, dtype)
    except (OSError, ValueError, TypeError, AssertionError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"cannot load model.path as a causal language model: {path}: {_first(error)}") from error
    return aligned(model.to(device).eval())


def load_base(config: Config, path: str, device: str) -> Any:
    """The model of a run, with actor.lora its base, in model.dtype; [model.scratch]: random weights by its seed."""
    seed = config.run.seed if config.model.scratch is not None else None
    return load_model(
        path if config.actor.lora is None else base_of(path), config.model.dtype, device, random_seed=seed
    )


def aligned(model: Any) -> Any:
    """The model, each CPU weight from a cache line on: as read from a file, each vector would span two lines."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % LINE:
            parameter.data = parameter.data.clone()
    return model


def empty_model(path: str, dtype: str, device: str) -> Any:
    """The structure with empty memory for pushed weights, made on the CPU as a learner's is (for equal RoPE tables)."""
    import torch
    from transformers.initialization import no_init_weights

    _quiet()
    try:
        with torch.device("cpu" if device.startswith("cuda") else device), no_init_weights():
            model = _structure(path, dtype)
    except (OSError, ValueError, TypeError, AssertionError, StrictDataclassError) as error:
        raise ConfigError(f"cannot load model.path as a causal language model: {path}: {_first(error)}") from error
    model.tie_weights()
    return model.to(device).eval()


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion: of generation config, model, tokenizer and chat template."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    end = turn_end(tokenizer)
    return frozenset(found if end is None else found | {end})


def absent_ids(tokenizer: Any, vocabulary: int) -> frozenset[int]:
    """Ids of the model that its tokenizer does not have: rows that fill up the embedding. None without a tokenizer."""
    known = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else range(vocabulary)
    return frozenset(range(vocabulary)).difference(known)


def turn_end(tokenizer: Any) -> int | None:
    """The special token with which the chat template ends a turn (<|im_end|>, ...); None if there is no such token."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": REPLY}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001  templates raise any error; some need arguments of the data
        return None
    _, reply, rest = text.rpartition(REPLY)
    ids = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if reply else []
    added = tokenizer.added_tokens_decoder
    return int(ids[0]) if ids and ids[0] in added and added[ids[0]].special else None


def _config(path: str) -> Any:
    """The configuration of a model. Of several padding tokens the first counts: transformers takes one."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = read_json(path, "config.json") if Path(path).is_dir() else {}
    padding, kind = settings.get("pad_token_id"), settings.get("model_type")
    if isinstance(padding, list) and isinstance(kind, str) and kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind].from_dict(settings | {"pad_token_id": padding[0] if padding else None})
    return AutoConfig.from_pretrained(path, **_where(path))


def _structure(path: str, dtype: str) -> Any:
    """The model of a configuration, its weights as the caller's contexts make them."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    path = base_of(path)
    config = _config(path)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    with contextlib.suppress(OSError):  # a model without generation_config.json keeps that of its configuration
        model.generation_config = _several_paddings(path) or GenerationConfig.from_pretrained(
            path, local_files_only=Path(path).is_dir()
        )
    return _soft_capped(model)


def _several_paddings(path: str) -> Any:
    """The generation_config.json of a folder if it lists padding tokens (transformers takes one), else None."""
    from transformers import GenerationConfig

    settings = read_json(path, "generation_config.json") if Path(path).is_dir() else {}
    padding = settings.get("pad_token_id")
    if not isinstance(padding, list):
        return None
    return GenerationConfig.from_dict(settings | {"pad_token_id": padding[0] if padding else None})


def _soft_capped(model: Any) -> Any:
    """Eager attention for a model with a soft cap on attention scores (Gemma 2), which sdpa ignores."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def _where(path: str) -> dict[str, bool]:
    """A folder is never looked up on the hub."""
    return {"local_files_only": True} if Path(path).is_dir() else {}


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
