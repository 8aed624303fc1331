"""Typed settings: one frozen class per section. Imports without torch.

Precedence, lowest first: the TOML file (with one level of `extends`), AREAL_BUS_SECTION__KEY in the environment,
--set section.key=value. `loader.py` reads and merges them; `validation.py` checks rules across keys.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from areal_bus.config.data import DataConfig
from areal_bus.config.learner import LoraConfig, SimulatedUpdateConfig
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.section import Section
from areal_bus.config.stages import StageConfig
from areal_bus.config.trackers import Tracker
from areal_bus.config.virtual_time import VirtualTimeConfig
from areal_bus.config.watch import ProfileConfig, WatchConfig
from areal_bus.config.workflows import BUILT_IN, environment_of


class RunConfig(Section):
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the run folder; empty: the name of the config file. A number is appended when the folder exists."""
    folder: Path = Path("runs")
    """Folder that holds the run folders, relative to the working directory."""
    seed: int = Field(1, ge=0)
    """Seed of the data order, sampling, initial weights and all other random draws."""
    total_train_steps: int = Field(10, ge=1)
    """Training steps of the whole run: one batch and one new version each."""
    stage: tuple[StageConfig, ...] = ()
    """Settings that change at a step, each a table [[run.stage]] with from_step and any of gconfig.max_new_tokens,
    gconfig.n_samples and learner.max_tokens_per_mb; a key that is not set keeps its value. See docs/stages.md."""
    resume: str = ""
    """Run folder to resume, or "auto": the newest unfinished run of this name, or a new run if there is none."""


class LaunchConfig(Section):
    bootstrap: Literal["mpi", "env"] = "mpi"
    """How ranks find each other: "mpi" (one exchange at start) or "env" (rank and size from the environment)."""
    start: Literal["spawn", "fork"] = "spawn"
    """How actors start: "spawn" (each imports by itself) or "fork" (from one process of each host that has imported
    everything: less memory and time with many ranks on a host; on CPU, with launch.bootstrap = "env")."""
    rendezvous: str = ""
    """For "env": address where rank 0 listens, "tcp://HOST:PORT" or "ipc://PATH"; empty: an ipc path of this job."""
    timeout_s: float = Field(300.0, gt=0)
    """Time limit for MPI_Init, for each exchange between ranks, and for all actors to join."""
    grace_s: float = Field(5.0, gt=0, le=60)
    """Time for actors to exit before they are killed."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of one actor after consecutive crashes without progress; 0: the first crash ends the job."""
    drain_s: float = Field(600.0, gt=0)
    """Time limit of a drain (SIGUSR1): write a checkpoint and exit. After it the job exits at once."""


class TopologyConfig(Section):
    ranks: int | None = Field(None, ge=1)
    """Number of ranks: --dry-run uses it, and a start with another number is refused. Empty: any number."""
    learners: int = Field(1, ge=1)
    """Learner ranks; more than one use FSDP2. The head runs beside learner 0 in its own process."""
    replicas: int = Field(1, ge=1)
    """Copies of the model among the learners, each sharded over learners / replicas ranks (HSDP). 1: one, over all."""
    rewards: int = Field(1, ge=1)
    """Reward actors."""
    generators: int | None = Field(None, ge=1)
    """Generator actors; empty: all remaining ranks."""
    reward: Literal["rank", "beside"] = "rank"
    """"rank": each reward actor has its own rank; "beside": it is a second child process of a generator rank."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks (GPUs) per generator, on one host. The first runs the generator; the others reserve their GPUs for it."""
    ranks_per_host: int = Field(8, ge=1)
    """For --dry-run: ranks per host; hosts are filled in order."""
    gpus_per_host: int = Field(0, ge=0)
    """GPUs per host; 0: everything runs on CPU."""
    gpu_memory_gib: float | str = ""
    """Memory of one GPU for --dry-run: GiB or a card name ("H100", "A100-80G"). Empty: detect the GPUs of this host."""
    host_memory_gib: float | None = Field(None, gt=0)
    """Memory of one host in GiB for --dry-run. Empty: that of this machine, for plans of one host without GPUs."""
    ranks_per_gpu: int = Field(1, ge=1)
    """Ranks per GPU, assigned round-robin. Two learners, or two ranks of one generator, cannot share a GPU."""


class BusConfig(Section):
    transport: Literal["auto", "ipc", "tcp"] = "auto"
    """"ipc" works on one host, "tcp" between hosts; "auto" chooses by the number of hosts."""
    interface: str = ""
    """Network interface (name or address) for tcp and collectives. Empty on one host: loopback. "*" is refused."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port of the head; 0: a free port."""
    curve: Literal["auto", "on", "off"] = "auto"
    """CURVE encryption and authentication, one key per rank. "auto": on for tcp, off on loopback and ipc."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Interval of heartbeats, in both directions."""
    silent_s: float = Field(3.0, gt=0)
    """Silence after which a generator or reward counts as dead; up to ten times longer on a busy machine."""
    inbox_mib: int = Field(256, ge=1)
    """Limit of received but unprocessed messages per process; above it the process stops reading its sockets."""
    resend_s: float = Field(120.0, gt=0)
    """A trajectory without acknowledgement for this long is sent again, to another reward actor if there is one."""


class ScratchConfig(Section):
    family: Literal["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"] = "llama"
    """Architecture, as transformers has it. gemma2 has soft caps; gemma2 and gemma3 alternate sliding windows."""
    characters: str = Field("abcdefghijklmnopqrstuvwxyz >", min_length=2)
    """Vocabulary: one token per character. Padding and end-of-text tokens are added."""
    hidden_size: int = Field(128, ge=8)
    """Hidden size."""
    layers: int = Field(3, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    max_positions: int = Field(64, ge=8)
    """Maximum sequence length."""


class ModelConfig(Section):
    path: str = ""
    """Folder (config.json, tokenizer, safetensors) or Hugging Face id; empty with [model.scratch]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of compute, sampling and export; learners keep float32 master weights. Float32 is faster on CPU."""
    scratch: ScratchConfig | None = None
    """A small Llama-style character model with random weights, instead of a folder."""


class AgentConfig(Section):
    function: str = ""
    """The agent, "module:function": `(row, base_url, api_key)`, called in a worker process. See docs/agents.md."""
    workers: int = Field(8, ge=1)
    """Processes of the agent or environment per generator: the number of concurrent conversations."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of the agent's own code per conversation; time spent waiting for the model does not count."""
    max_calls: int = Field(64, ge=1)
    """Maximum calls per conversation, rejected calls included; further calls are rejected unparsed."""
    max_tokens: int | None = Field(None, ge=2)
    """Maximum tokens per conversation, context and sampled tokens together. Unset: the limit of the engine."""
    rewritten: Literal["refuse", "anew"] = "refuse"
    """If a call does not continue the previous messages: "refuse" it, or start "anew" and forget the earlier calls."""
    chat_template: str = ""
    """Jinja chat template of the conversations; empty: the tokenizer's template."""
    tool_calls: Literal["none", "hermes"] = "none"
    """Format of tool calls: "hermes" is JSON within <tool_call> marks (Qwen); "none" rejects tools."""


class WorkflowConfig(Section):
    function: str = "single_turn"
    """Turns a row into an episode: "single_turn", "multi_turn" (tries again after a wrong answer), "tools" (calls
    functions), "agent", "verifiers:NAME" (an environment of the package verifiers), or "module:Class" from the folder
    of the config, which may be a workflow of AReaL. See docs/environments.md, docs/agents.md and docs/from-areal.md."""
    arguments: dict[str, bool | int | float | str] = Field({})
    """Arguments by name of "multi_turn" or "tools", of an environment, or of the class of an AReaL workflow; reward_fn
    is a reward function by name or "module:function". A class of ours finds them in its config."""
    agent: AgentConfig = AgentConfig()
    """An agent or an environment that calls the model through an OpenAI-compatible endpoint."""

    @property
    def environment(self) -> str:
        """NAME of "verifiers:NAME"; "" for another workflow."""
        return environment_of(self.function)

    @property
    def uses_endpoint(self) -> bool:
        """Whether worker processes call the model: an agent, built-in or not, or an environment."""
        return self.function in ("agent", *BUILT_IN) or bool(self.environment)


class RolloutConfig(Section):
    engine: Literal["builtin", "sglang", "vllm", "simulated"] = "builtin"
    """Inference engine: "builtin" runs in the generator process, on CPU or one GPU; "sglang" and "vllm" are servers;
    "simulated" generates artificial tokens without a model."""
    max_head_offpolicyness: int = Field(1, ge=0, le=1024)
    """eta: maximum staleness of a trained token, in versions. 0 is synchronous training."""
    staleness_policy: Literal["mask", "hold", "drop", "paper"] = "mask"
    """Tokens beyond eta: "mask" excludes them from the loss, "hold" waits, "drop" samples again, "paper" trains all."""
    exact_lag: int | tuple[int, ...] | None = None
    """Only for the loop in one process (`python -m actors.offline.exact_lag`, `tools.sweep`): the batch of version c is
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
    """Length and speed laws of the simulated engine; `tools.simulate` uses them for every engine."""

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
    """Time limit for a server to become ready after its start; launch.timeout_s must be longer."""
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


class ActorConfig(Section):
    reward_scaling: float = Field(1.0, gt=0)
    """Advantages use (reward + reward_bias) * reward_scaling; metrics and journal keep the raw reward."""
    reward_bias: float = 0.0
    """Added to each reward before scaling: -0.5, scaled by 10, maps 0 and 1 to -5 and +5 as in the paper."""
    reward_clip: float | None = Field(None, gt=0)
    """Bound of the absolute reward after bias and scaling. Unset: no bound."""
    overlong_tokens: int = Field(0, ge=0)
    """DAPO's soft penalty: the reward falls over this many tokens before gconfig.max_new_tokens. 0: off."""
    overlong_penalty_factor: float = Field(1.0, gt=0)
    """Largest overlong penalty, reached at gconfig.max_new_tokens."""
    length_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward in proportion to length / gconfig.max_new_tokens."""
    truncated_samples: Literal["train", "mask", "zero"] = "train"
    """Samples cut off by the length limit: "train" them, "mask" their tokens (their reward stays in the group's
    baseline), or train them with reward "zero"."""
    advantage: str = "grpo"
    """Estimator: "grpo", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "gae" (with [critic]), "none" (the reward), "distill" (the teacher instead of the
    reward) or "module:function". See docs/algorithms.md."""
    discount: float = Field(1.0, gt=0, le=1)
    """For "gae": discount of rewards by token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """For "gae": 1 gives returns minus values, less relies more on the values."""
    normalize_batch: bool = False
    """Normalise advantages over the whole batch as well (as in the paper)."""
    normalize_batch_over: Literal["signal", "all"] = "signal"
    """Groups that normalize_batch uses: "signal" (groups whose rewards differ; the others get 0) or "all"."""
    std_unbiased: bool = True
    """Divide variances ("grpo", normalize_batch) by n - 1, as verl, TRL and AReaL do; false: by n."""
    std_eps: float = Field(1e-6, gt=0)
    """Epsilon added to these standard deviations."""
    loss_denominator: Literal["all", "signal"] | Annotated[float, Field(gt=0)] = "all"
    """The loss is a sum over trained tokens, divided by: "all" fresh tokens of the minibatch, also of groups without
    signal; the tokens of groups with "signal"; or a fixed number. See docs/loss.md."""
    aggregation: str = "token-mean"
    """Weight of each token's loss: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum" (the paper's formula),
    "seq-mean-token-sum-norm" (Dr. GRPO) or "module:function"."""
    aggregation_length: int | None = Field(None, ge=1)
    """For "seq-mean-token-sum-norm": the constant that replaces the length, for example gconfig.max_new_tokens."""
    loss: str = "ppo"
    """Loss of a token: "ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce" or "module:function"."""
    correction: str = ""
    """Weight for the gap between proximal policy and sampler: "decoupled", "tis", "tis_sequence", "icepop", "kpop",
    "none" or "module:function". Empty: "decoupled" or "none", by use_decoupled_loss."""
    use_decoupled_loss: bool = True
    """Decoupled PPO (paper, eq. 5): clip around the proximal policy; weight by prox/behav. `correction` replaces it."""
    recompute_logprobs: bool = True
    """Compute the proximal log-probs with the parameters just before the update."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """Proximal log-probs: "recompute" them, or "loglinear": interpolate between sampler and current policy (A-3PO)."""
    behav_imp_weight_cap: float | None = Field(None, gt=0)
    """Upper bound of the weight prox/behav of the decoupled loss. Unset: no bound."""
    behav_imp_weight_mode: Literal["clamp", "mask"] = "clamp"
    """Weights above behav_imp_weight_cap: "clamp" them, or "mask" (exclude) their tokens."""
    correction_level: Literal["token", "sequence"] | None = None
    """Correct by token or by sequence; unset: as the correction defines. The same for the next five keys."""
    correction_action: Literal["clamp", "mask"] | None = None
    """What happens outside the bounds: "clamp" the weight, or "mask" the tokens."""
    correction_metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] | None = None
    """What the bounds apply to: the "ratio" prox/behav or an estimate of the KL divergence."""
    correction_aggregate: Literal["mean", "sum", "max"] | None = None
    """Aggregation of the metric over the trained tokens of a sequence, for level "sequence"."""
    correction_lower: float | None = Field(None, ge=0)
    """Lower bound."""
    correction_upper: float | None = Field(None, gt=0)
    """Upper bound."""
    m2_threshold: float | None = Field(None, gt=0)
    """M2PO: mask the tokens with the largest log(prox/behav)^2 until its mean is at most this (paper: 0.04)."""
    eps_clip: float = Field(0.2, gt=0)
    """PPO clipping range of the ratio."""
    eps_clip_higher: float | None = Field(None, gt=0)
    """Upper clipping range (DAPO's clip-higher: 0.28). Unset: eps_clip."""
    c_clip: float | None = Field(None, gt=1)
    """Dual clip: bound of the loss of tokens with negative advantage, times the advantage. Unset: none."""
    sapo_tau_pos: float = Field(1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    sapo_tau_neg: float = Field(1.05, gt=0)
    """SAPO's temperature for negative advantages."""
    kl_ctl: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence from a reference model, see [reference]. 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of this divergence from the sampled tokens (Schulman 2020). See docs/algorithms.md."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Add the divergence to the "loss" of each trained token, or subtract it from the "reward" before the baseline."""
    distill_coef: float = Field(0.0, ge=0)
    """On-policy distillation beside the reward: weight of log(teacher/pi) in each token's advantage. See [teacher]."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, subtracted from each token's loss."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of a supervised term, -log pi of the tokens of good samples, added to the loss."""
    sft_min_reward: float = 1.0
    """Reward from which a sample counts as good for sft_coef."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Optimizer steps per training step, over equal parts of the batch."""
    lr: float = Field(2e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in training steps."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up; "linear" and "cosine" reach min_lr_ratio at total_train_steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Lowest learning rate of the schedule, as a share of lr."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta 1."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta 2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: maximum norm."""
    context_parallel: int = Field(1, ge=1)
    """Learner ranks, next to each other, that share the tokens of each micro-batch, so that a sequence fits that one
    rank cannot hold. It divides topology.learners. 1: off. See docs/models.md."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the model's own weights (docs/lora.md)."""


class ReferenceConfig(Section):
    path: str = ""
    """Model that actor.kl_ctl keeps the policy close to (folder or Hugging Face id). Empty: the run's own version 0,
    with actor.lora the model without its adapters."""
    update_every: int = Field(0, ge=0)
    """Versions between two replacements of the reference by a copy of the policy; 0: it stays fixed."""


class TeacherConfig(Section):
    path: str = ""
    """Model that teaches the policy (folder or Hugging Face id), for actor.advantage = "distill" or distill_coef."""


class CriticConfig(Section):
    path: str = ""
    """For actor.advantage = "gae": model of the critic. Empty: the model of the run, with a value head of zeros."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate of the critic's AdamW."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in training steps."""
    eps_clip: float | None = Field(None, gt=0)
    """Value clipping: range around the value before the update. Unset: none."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: maximum norm."""


class WarmupConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before version 0, on the field `demonstration` of the rows: a right answer; 0: none."""
    batch_size: int = Field(64, ge=1)
    """Demonstrations per supervised step."""
    lr: float = Field(3e-3, gt=0)
    """Learning rate of the supervised steps."""


class LearnerConfig(Section):
    loop: str = "ppo"
    """Training loop: "ppo" or "module:function" from the folder of the config."""
    max_tokens_per_mb: int = Field(4096, ge=1)
    """Token budget of a packed micro-batch. On a CPU with AVX-512 a micro-batch may exceed it by 1/32."""
    max_logits_mib: int = Field(512, ge=1)
    """Largest logits matrix of a micro-batch. A larger one is computed in chunks of an eighth of this, again in the
    backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up."""
    simulated: SimulatedUpdateConfig | None = None
    """Updates take a configured time and compute nothing; every rank holds the whole model. With the simulated engine:
    to look at the ring, at many ranks on few cores (docs/cluster.md). What it trains means nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, given: Any) -> Any:
        """The saved settings of an older run may hold `helpers`. The loader refuses it in new ones."""
        return {key: value for key, value in given.items() if key != "helpers"} if isinstance(given, dict) else given


class WeightsConfig(Section):
    bucket_mib: int = Field(64, ge=1)
    """Size of one broadcast."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of a whole push; a member that misses it is fenced and receives a catch-up push later."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Memory where a generator receives weights; "auto": on the device of its engine, otherwise in host memory."""
    route: Literal["auto", "gloo", "shared"] = "auto"
    """"gloo": broadcast; "shared": copy from memory of learner 0; "auto": "shared" on one host (CPU) or GPU."""
    delta_push: Literal["off", "auto"] = "off"
    """What a broadcast sends; "auto": only the numbers that changed, where that is at most half of all bytes and each
    member holds one of the last delta_versions versions. Without effect with actor.lora."""
    delta_versions: int = Field(8, ge=1)
    """Number of versions from which a member that missed pushes is brought up to date by a delta."""


class CheckpointConfig(Section):
    every_s: float = Field(600.0, ge=0)
    """Interval of checkpoints; the first come after 1, 2, 4 and 8 minutes. Longer if checkpoints would take over 1/20
    of the time. 0: none by time."""
    every_steps: int = Field(0, ge=0)
    """Checkpoint interval in steps, in addition (1 includes version 0); 0: none by steps."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints kept; older ones are removed once a newer one is complete."""
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints that stay, besides `keep`, because evaluate.metric is best there. Every evaluated version
    is checkpointed, and RUN/best is the model of the best one. 0: none."""
    at_end: bool = True
    """Checkpoint and export the final model."""
    async_save: bool = True
    """Write checkpoints beside training, from a copy in host memory (of each learner rank's share: 12 bytes a
    parameter, and its part of the model); false: training waits for the disk, on CPU without a copy."""


class EvaluateSet(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the set in the journal and the table."""
    path: str
    """File of problems (as data.path)."""
    limit: int | None = Field(None, ge=1)
    """Use only the first problems."""
    n_samples: int | None = Field(None, ge=1)
    """Samples per problem; unset: evaluate.n_samples."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; unset: evaluate.temperature."""


class EvaluateConfig(Section):
    before: bool = False
    """Evaluate version 0 on the held-out problems."""
    after: bool = False
    """Evaluate the final version on the held-out problems."""
    every_steps: int = Field(0, ge=0)
    """Evaluate in training, when a version that is a multiple of this is published (docs/evaluation.md); 0: never."""
    slots_share: float = Field(0.25, gt=0, le=1)
    """Part of each generator's slots that an evaluation in training may hold (eta > 0); at least one problem's."""
    sets: tuple[EvaluateSet, ...] = ()
    """Further sets, each a table [[evaluate.sets]] with name, path, and optionally limit, n_samples, temperature. They
    use the prompt and the reward of the run."""
    metric: Literal["avg_at_k", "maj_at_k", "pass_at_k", "accuracy", "reward"] = "avg_at_k"
    """Metric of early_stop_patience and checkpoint.keep_best; larger is better."""
    metric_set: str = ""
    """Name of the set of `metric`; empty: the problems of `path`."""
    early_stop_patience: int = Field(0, ge=0)
    """End the run after this many evaluations in a row, in training, without a better `metric`; 0: never."""
    path: str = ""
    """File of problems (as data.path); empty: the held-out problems of the generated task."""
    limit: int | None = Field(None, ge=1)
    """Use only the first problems."""
    n_samples: int = Field(8, ge=1)
    """Samples per problem."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of the evaluation; 0: greedy."""

    @property
    def is_on(self) -> bool:
        return self.before or self.after or self.every_steps > 0

    def temperature_of(self, evaluation: str) -> float:
        """The sampling temperature of an evaluation by its name ("step-8:SET")."""
        name = evaluation.partition(":")[2]
        own = next((problems.temperature for problems in self.sets if problems.name == name), None)
        return self.temperature if own is None else own


class WatchdogConfig(Section):
    stall_s: float = Field(300.0, gt=0)
    """Time without any progress until the wait-for graph is logged; logged again after 2x, 4x, ... the time."""
    progress_s: float = Field(120.0, gt=0)
    """Time without progress until an actor with pending work is named in a warning, even if others make progress."""
    action: Literal["warn", "requeue", "abort"] = "warn"
    """After act_s: "warn" logs, "requeue" gives the work of the blocking actors to others, "abort" ends the job
    (also if the head itself is stuck)."""
    absent_action: Literal["abort", "warn"] = "abort"
    """After act_s without progress and without any reward actor or any generator: "abort" ends the job, whatever
    `action` is; "warn" waits, for jobs whose machines may be away for that long."""
    act_s: float = Field(1800.0, gt=0)
    """Time without progress (for "requeue": of the blocking actor) until the action."""


class JournalConfig(Section):
    dir: str = ""
    """Node-local folder for the journal; empty: in the run folder."""
    samples: bool = True
    """Keep every trained and evaluated sample (text, reward, spans) beside the journal."""
    tokens: bool = False
    """Keep the token ids and log-probs of these samples as well; `tools.audit --recompute` checks them."""
    tracker: tuple[Tracker, ...] = ()
    """Trackers that a process beside the job feeds from the journal (docs/trackers.md). Each needs its package."""


class Config(Section):
    run: RunConfig = RunConfig()
    launch: LaunchConfig = LaunchConfig()
    topology: TopologyConfig = TopologyConfig()
    bus: BusConfig = BusConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    rollout: RolloutConfig = RolloutConfig()
    virtual_time: VirtualTimeConfig = VirtualTimeConfig()
    engine: EngineConfig = EngineConfig()
    gconfig: GenerationConfig = GenerationConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    critic: CriticConfig = CriticConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    journal: JournalConfig = JournalConfig()
    watch: WatchConfig = WatchConfig()
    profile: ProfileConfig = ProfileConfig()
