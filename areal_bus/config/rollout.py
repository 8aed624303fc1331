"""Settings of generators: rollouts, the inference engine, sampling. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from areal_bus.config.names.engines import kind_of
from areal_bus.config.section import Section

if TYPE_CHECKING:
    from areal_bus.config.sections import Config


OnUpdate = Literal["recompute", "keep", "drain", "finish_old"]
PREFIX_SHARE = 0.5  # histories of episodes that wait for their next turn are half as long as they may become


class RolloutConfig(Section):
    engine: str = "builtin"
    """"builtin", "sglang", "vllm", "simulated" (no model), "module:function" (docs/engines.md)."""
    max_head_offpolicyness: int = Field(1, ge=0, le=1024)
    """eta: maximum staleness of a trained token, in versions; 0: synchronous."""
    staleness_policy: Literal["mask", "hold", "drop", "paper"] = "mask"
    """Tokens beyond eta: "mask" them, "hold" waits, "drop" samples again, "paper" trains all (docs/staleness.md)."""
    max_concurrent_rollouts: int = Field(32, ge=1)
    """Slots: samples that one generator decodes at once."""
    on_update: OnUpdate = "recompute"
    """In-flight samples on an update: "recompute" or "keep" their KV cache, "drain" first, or "finish_old" version."""
    report_tokens: int = Field(64, ge=0)
    """On a weight update, samples with this many new tokens are reported, for others to continue; 0: off."""


def prefix_share(c: Config) -> float:
    """Size of the builtin engine's prefix cache, as a share of the KV cache of all slots at full length.

    None at eta = 0: a key that a decode step computed differs from one of a prefill by rounding, and which of them is
    used would depend on the clock (docs/prove.md). None for single turns on a GPU: they gain little, and its memory is
    planned for slots.
    """
    is_useful = c.rollout.max_head_offpolicyness > 0 and not (c.has_plain_prompts and c.topology.gpus_per_host)
    return PREFIX_SHARE if c.rollout.engine == "builtin" and is_useful else 0.0


class SimulatedConfig(Section):
    """Length and speed laws of the simulated engine; `areal_lab.simulate` uses them for every engine."""

    median_tokens: float = Field(64.0, ge=1)
    """Median completion length."""
    sigma: float = Field(0.5, ge=0, le=4)
    """Standard deviation of the log length."""
    decode_tokens_per_s: float = Field(2000.0, gt=0)
    """Maximum decode throughput of one generator."""
    half_slots: float = Field(8.0, ge=0)
    """Live samples that reach half of decode_tokens_per_s."""
    prefill_tokens_per_s: float = Field(20000.0, gt=0)
    """Prefill throughput of prompts and, after an update, of live samples."""
    update_s: float = Field(0.05, ge=0)
    """Pause of a generator on each weight update."""


class EngineConfig(Section):
    urls: tuple[str, ...] = ()
    """Running servers, "http://HOST:PORT", one per generator; empty: started."""
    python: str = ""
    """Python of the server's environment; empty: this one."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server."""
    start_timeout_s: float = Field(240.0, gt=0)
    """Time limit of a server's start; below launch.timeout_s."""
    call_timeout_s: float = Field(60.0, gt=0)
    """Time limit of a server call, except weight updates."""
    silent_s: float = Field(120.0, gt=0)
    """Silence after which a server with running samples is dead."""
    simulated: SimulatedConfig = SimulatedConfig()
    """Lengths and speeds of the simulated engine."""


MOST_BIAS = 100  # of a logit; as vLLM, which cuts larger ones
MOST_PENALTY = 2  # of presence and frequency, as servers allow
MOST_TOP_K = 2**31 - 1  # servers keep it in 32 bits
MOST_RATE = 1000  # of a repetition penalty, or its inverse: a logit stays a number


class GenerationConfig(Section):
    n_samples: int = Field(8, ge=1)
    """Samples per prompt: the group size."""
    max_new_tokens: int = Field(256, ge=1)
    """Most sampled tokens per completion."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of sampling and log-probs; 0: greedy, log-probs at 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(0, ge=0, le=MOST_TOP_K)
    """Sample from this many likeliest tokens; 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Least share of the largest probability; 0: off."""
    min_new_tokens: int = Field(0, ge=0)
    """No stop before this many sampled tokens."""
    repetition_penalty: float = Field(1.0, ge=1 / MOST_RATE, le=MOST_RATE)
    """For tokens of prompt and completion; 1: off."""
    presence_penalty: float = Field(0.0, ge=-MOST_PENALTY, le=MOST_PENALTY)
    """For tokens in the completion; 0: off."""
    frequency_penalty: float = Field(0.0, ge=-MOST_PENALTY, le=MOST_PENALTY)
    """For each occurrence in the completion; 0: off."""
    logit_bias: dict[int, float] = Field({})
    """Added to logits of token ids: { 50256 = -100 }."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, and stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end a completion."""
    ignore_eos: bool = False
    """Do not stop at the model's own stop tokens."""

    def controls(self) -> dict[str, Any]:
        """Arguments of `actors.engines.protocol.SamplingControls`."""
        apart = {"n_samples", "max_new_tokens", "temperature", "top_p"}
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in apart}
        return found | {"logit_bias": tuple(sorted(self.logit_bias.items()))}


OURS = (  # parameters of transformers' apply_chat_template that are no arguments of a template
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
)


def sampling_rules(g: GenerationConfig) -> Iterator[str]:
    """Rules for how one source, or one set of an evaluation, is sampled."""
    odd = [token for token in [*g.stop_token_ids, *g.logit_bias] if token < 0]
    large = [token for token, bias in g.logit_bias.items() if abs(bias) > MOST_BIAS]
    if g.min_new_tokens > g.max_new_tokens:
        yield f"gconfig.min_new_tokens ({g.min_new_tokens}) must not exceed gconfig.max_new_tokens ({g.max_new_tokens})"
    if "" in g.stop:
        yield "a text of gconfig.stop has at least one character: one is empty"
    if odd:
        yield f"token ids of gconfig are 0 or more: {odd[:1]} is in stop_token_ids or logit_bias"
    if large:
        yield f"gconfig.logit_bias must be from -{MOST_BIAS} to {MOST_BIAS}: that of token {large[:1]} is larger"


def n_versions(rollout: RolloutConfig) -> int:
    """Sets of weights that an engine of a generator holds at most."""
    return rollout.max_head_offpolicyness + 1 if rollout.on_update == "finish_old" else 1


def generation_rules(c: Config, others: Sequence[GenerationConfig]) -> Iterator[str]:
    """Rules for [gconfig], also beside `others`, which sources and evaluations sample with, and chat templates."""
    g, own = c.gconfig, sorted(c.data.chat_template_kwargs.keys() & set(OURS))
    ways = (g, *others)
    if g.temperature == 0 and g.n_samples > 1:
        remedy = f"set gconfig.temperature above 0, or gconfig.n_samples to 1 (it is {g.n_samples})"
        yield f"greedy samples of one prompt are all the same, and a group of them trains nothing: {remedy}"
    yield from sampling_rules(g)
    if not kind_of(c.rollout.engine).takes_logit_controls and changes_logits(g):
        remedy = 'remove these keys of gconfig, or set rollout.engine = "builtin" or "vllm"'
        rule = "SGLang's log-probs are of logits after penalties, logit_bias and min_new_tokens"
        yield f"{rule}, and training needs those of the model: {remedy}"
    is_raw = not kind_of(c.rollout.engine).takes_temperatures and any(map(changes_sampling, ways))
    if is_raw and any(one.temperature not in (0.0, 1.0) for one in ways):
        heat = "set gconfig.temperature and those of [evaluate] and sources to 1 (or 0)"
        cuts = "top_p, top_k, min_p, min_new_tokens, logit_bias and penalties"
        yield f"vLLM has log-probs of the whole distribution at temperature 1 only: {heat}, or remove {cuts}"
    if own:
        yield f"data.chat_template_kwargs may not set {own[:1]}: that is set for each prompt"
    if c.data.chat_template_kwargs and c.has_plain_prompts and not c.data.chat_template:
        yield "data.chat_template_kwargs needs a chat template: set data.chat_template = true"


def changes_logits(g: GenerationConfig) -> bool:
    """Whether the likeliest token may be another one than the model's."""
    penalties = g.repetition_penalty != 1 or g.presence_penalty or g.frequency_penalty
    return bool(penalties or g.logit_bias or g.min_new_tokens)


def changes_sampling(g: GenerationConfig) -> bool:
    """Whether tokens are drawn from another distribution than the model's at the temperature."""
    return changes_logits(g) or bool(g.top_k or g.min_p or g.top_p < 1)
