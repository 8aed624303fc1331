"""Settings of generators: rollouts, the inference engine, sampling. Imports without torch."""

from typing import Any, Literal

from pydantic import Field

from areal_bus.config.section import Section


class RolloutConfig(Section):
    engine: Literal["builtin", "sglang", "vllm", "simulated"] = "builtin"
    """Inference engine: "builtin" runs in the generator process, on CPU or one GPU; "sglang" and "vllm" are servers;
    "simulated" generates artificial tokens without a model."""
    max_head_offpolicyness: int = Field(1, ge=0, le=1024)
    """eta: maximum staleness of a trained token, in versions. 0 is synchronous training."""
    staleness_policy: Literal["mask", "hold", "drop", "paper"] = "mask"
    """Tokens beyond eta: "mask" excludes them from the loss, "hold" waits, "drop" samples again, "paper" trains all."""
    exact_lag: int | tuple[int, ...] | None = None
    """Only for the loop in one process (`python -m areal_lab.loops.exact_lag`, `areal_lab.sweep`): the batch of version c is
    sampled by version c - exact_lag. With several values each prompt draws one, so repeated values weigh more. Unset or
    []: a ring, whose lag follows from timing. See docs/sweep.md."""
    max_concurrent_rollouts: int = Field(32, ge=1)
    """Samples that one generator decodes concurrently (its slots)."""
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """In-flight samples on a weight update: "recompute" their KV cache, "keep" it, or "drain" (finish them first)."""
    report_tokens: int = Field(64, ge=0)
    """On a weight update, report samples with at least this many new tokens, for others to continue. 0: off."""
    report_mib: int = Field(256, ge=1)
    """MiB of reported samples that the head stores; beyond it the oldest reports are removed."""

    @property
    def lags(self) -> tuple[int, ...]:
        """The values of exact_lag; () when it is unset."""
        if self.exact_lag is None:
            return ()
        return (self.exact_lag,) if isinstance(self.exact_lag, int) else self.exact_lag


class SimulatedConfig(Section):
    """Length and speed laws of the simulated engine; `areal_lab.simulate` uses them for every engine."""

    median_tokens: float = Field(64.0, ge=1)
    """Median completion length; gconfig.max_new_tokens truncates it."""
    sigma: float = Field(0.5, ge=0, le=4)
    """Standard deviation of the log length; 0: every completion has the median length."""
    decode_tokens_per_s: float = Field(2000.0, gt=0)
    """Maximum decode throughput of one generator, over all its live samples."""
    half_slots: float = Field(8.0, ge=0)
    """Number of live samples that reach half of that throughput; 0: one sample reaches all of it."""
    prefill_tokens_per_s: float = Field(20000.0, gt=0)
    """Prefill throughput of prompts and, after an update ("recompute"), of live samples; decoding pauses meanwhile."""
    update_s: float = Field(0.05, ge=0)
    """Pause of a generator on each weight update."""


class EngineConfig(Section):
    urls: tuple[str, ...] = ()
    """Running servers to use, "http://HOST:PORT", one per generator in order; empty: each generator starts its own."""
    python: str = ""
    """Python interpreter of the server's environment, because its dependencies conflict with ours; empty: this one."""
    arguments: tuple[str, ...] = ()
    """Extra command-line arguments of the server, appended to ours."""
    start_timeout_s: float = Field(240.0, gt=0)
    """Time limit for a server to become ready, started here or attached; launch.timeout_s must be longer."""
    call_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one server call; weight updates use weights.timeout_s."""
    silent_s: float = Field(120.0, gt=0)
    """A server with running samples that sends nothing for this long counts as dead."""
    simulated: SimulatedConfig = SimulatedConfig()
    """Lengths and speeds of the simulated engine."""


class GenerationConfig(Section):
    n_samples: int = Field(8, ge=1)
    """Samples per prompt: the group size."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum sampled tokens per completion."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; the learner's log-probs use the same. 0: greedy, with log-probs at temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling threshold; log-probs are those of the full distribution, whatever the keys below say."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens of at least this share of the likeliest token's probability."""
    min_new_tokens: int = Field(0, ge=0)
    """No stop token and no stop string before this many sampled tokens."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides positive and multiplies negative logits of tokens in prompt and completion; 1: off."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens in the completion; 0: off."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens in the completion, once for each occurrence; 0: off."""
    logit_bias: dict[int, float] = Field({})
    """Added to the logits of token ids before sampling: { 50256 = -100 } (never sampled, as good as)."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The token that completes one is the last, and the text stays in the completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, beside the model's own."""
    ignore_eos: bool = False
    """The model's own stop tokens end nothing."""

    def controls(self) -> dict[str, Any]:
        """Arguments of `actors.engines.protocol.SamplingControls`."""
        apart = {"n_samples", "max_new_tokens", "temperature", "top_p"}
        found = {name: getattr(self, name) for name in type(self).model_fields if name not in apart}
        return found | {"logit_bias": tuple(sorted(self.logit_bias.items()))}
