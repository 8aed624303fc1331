"""Settings of the learner: its loop, the algorithm, the models beside the policy, adapters. Imports without torch."""

import math
from typing import Annotated, Literal

from pydantic import Field

from areal_bus.config.section import Section


class SimulatedUpdateConfig(Section):
    update_s: float = Field(0.5, ge=0)
    """Seconds of an update, besides its tokens."""
    tokens_per_s: float = Field(100_000.0, gt=0)
    """Trained tokens a second of one learner rank."""


Rank = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(gt=0)]


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """Rank."""
    alpha: float = Field(32.0, gt=0)
    """The adapters are multiplied by alpha / rank."""
    variant: tuple[Literal["rslora", "dora", "nf4"], ...] = ()
    """"rslora": alpha / sqrt(rank); "dora": trained norms of the weights' rows; "nf4": 4-bit weights under the adapters
    (docs/lora.md)."""
    target_modules: tuple[str, ...] | dict[str, Rank | tuple[Rank, Alpha]] = ()
    """Layers with adapters, as ["q_proj"], or with ranks, or [rank, alpha]: { q_proj = 32, o_proj = [8, 16] }; empty:
    all linear ones of decoder layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters."""

    def form(self, layer: str) -> tuple[int, float]:
        """Rank and alpha of a layer, by the last part of its name."""
        own = self.target_modules.get(layer.rpartition(".")[2]) if isinstance(self.target_modules, dict) else None
        if own is None:
            return self.rank, self.alpha
        return (own, self.alpha) if isinstance(own, int) else own

    @property
    def forms(self) -> set[tuple[int, float]]:
        """Rank and alpha of all layers."""
        return {self.form(name) for name in self.target_modules or ("",)}

    def scale(self, layer: str) -> float:
        """Factor of the product of a layer's two matrices."""
        rank, alpha = self.form(layer)
        return alpha / (math.sqrt(rank) if "rslora" in self.variant else rank)


class ParameterGroup(Section):
    match: str
    """Regular expression that is searched in a parameter's name, as in "norm|bias"."""
    lr_scale: float = Field(1.0, ge=0)
    """Factor of the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Unset: actor.weight_decay."""


class ActorConfig(Section):
    reward_scaling: Literal["running"] | Annotated[float, Field(gt=0)] = 1.0
    """Advantages use (reward + reward_bias) * reward_scaling; "running": (reward - mean) / deviation over the run."""
    reward_bias: float = 0.0
    """Added before scaling (paper: -0.5, scaled by 10)."""
    reward_clip: float | None = Field(None, gt=0)
    """Bound of the absolute reward after these."""
    overlong_tokens: int = Field(0, ge=0)
    """DAPO's soft penalty over this many last tokens before gconfig.max_new_tokens; 0: off."""
    overlong_penalty_factor: float = Field(1.0, gt=0)
    """Largest overlong penalty."""
    length_penalty: float = Field(0.0, ge=0)
    """Subtracts this times length / gconfig.max_new_tokens."""
    truncated_samples: Literal["train", "mask", "zero", "bootstrap"] = "train"
    """Samples cut at the length limit: "train", "mask", "zero" reward, or "bootstrap" with "gae"
    (docs/algorithms.md)."""
    mask_repetition: float | None = Field(None, gt=0, lt=1)
    """Mask answers in which more than this share of 8-token sequences occurs again; unset: none (0.5)."""
    algorithm: str = ""
    """Takes unset keys from configs/algorithms/NAME.toml ("dapo", "gspo")."""
    advantage: str = "grpo"
    """"grpo", "grpo_process", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "gae", "none", "distill", "module:function" (docs/algorithms.md)."""
    discount: float = Field(1.0, gt=0, le=1)
    """For "gae": discount by token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """For "gae"."""
    normalize_batch: Literal["all"] | bool = False
    """Normalise advantages over the batch: true, of groups whose rewards differ; "all", of each (paper)."""
    std_unbiased: bool = True
    """Divide variances by n - 1; false: by n."""
    std_eps: float = Field(1e-6, gt=0)
    """Epsilon added to these standard deviations."""
    loss_denominator: Literal["all", "signal"] | Annotated[float, Field(gt=0)] = "all"
    """Divisor of the token losses: "all" fresh tokens, those with "signal", or a number (docs/loss.md)."""
    aggregation: str = "token-mean"
    """Weights of token losses: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "module:function"."""
    episode_weights: Literal["token", "trajectory"] = "token"
    """Shares of an episode's trajectories: by tokens, or alike (docs/agents.md)."""
    aggregation_length: int | None = Field(None, ge=1)
    """Constant of "seq-mean-token-sum-norm"."""
    loss: str = "ppo"
    """Loss of a token: "ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "module:function"."""
    correction: str = ""
    """Weight for the gap to the sampler: "decoupled", "tis", "tis_sequence", "icepop", "kpop", "none",
    "module:function"; empty: by use_decoupled_loss."""
    use_decoupled_loss: bool = True
    """Decoupled PPO (docs/loss.md)."""
    recompute_logprobs: bool = True
    """Compute proximal log-probs before the update."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """"recompute" proximal log-probs, or interpolate: "loglinear" (A-3PO)."""
    behav_imp_weight_cap: float | None = Field(None, gt=0)
    """For "decoupled": upper bound of the weight prox/behav."""
    correction_action: Literal["clamp", "mask"] | None = None
    """Tokens with weights outside of the bounds: "clamp" or "mask"; unset, as the next four: the correction's own."""
    correction_metric: Literal["ratio", "k1", "k2", "k3", "binary_kl", "entropy"] | None = None
    """What the bounds apply to."""
    correction_aggregate: Literal["mean", "sum", "max"] | None = None
    """For "tis_sequence"."""
    correction_lower: float | None = Field(None, ge=0)
    """Lower bound."""
    correction_upper: float | None = Field(None, gt=0)
    """Upper bound."""
    m2_threshold: float | None = Field(None, gt=0)
    """M2PO: mask the largest log(prox/behav)^2 until the mean is at most this (0.04)."""
    eps_clip: float = Field(0.2, gt=0)
    """PPO clipping range."""
    eps_clip_higher: float | None = Field(None, gt=0)
    """Upper clipping range (DAPO: 0.28); unset: eps_clip."""
    c_clip: float | None = Field(None, gt=1)
    """Dual clip of tokens with negative advantage, times the advantage."""
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """SAPO's temperatures, for positive and negative advantages."""
    kl_ctl: float = Field(0.0, ge=0)
    """Coefficient of the KL from the [reference] model; 0: none is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Unset: "k3" in the loss, "k1" in the reward."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Add the KL to the "loss", or subtract it from the "reward"."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of the teacher beside the reward."""
    distill_beta: float | None = Field(None, ge=0, le=1)
    """Loss over the vocabulary: 0 forward KL, 1 reverse KL, between: JSD; unset: log(teacher/pi) of the sampled token
    as advantage (docs/algorithms.md)."""
    distill_top_k: int | None = Field(None, ge=1)
    """For distill_beta: the teacher's likeliest words, the others as one; unset: all."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass over the batch."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch (docs/algorithms.md)."""
    optimizer: str = "adamw"
    """"adamw", "muon", "adamw8bit", "sgd", "module:make" (docs/optimizers.md)."""
    group: tuple[ParameterGroup, ...] = ()
    """Tables [[actor.group]] for parameters that match (docs/optimizers.md)."""
    offload: Literal["none", "optimizer", "base", "all"] = "none"
    """What GPU learners keep in host memory (docs/optimizers.md)."""
    lr: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    adamw_lr: float | None = Field(None, gt=0)
    """For "muon": rate of AdamW's parameters; unset: lr."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in training steps."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; "linear" and "cosine" reach min_lr_ratio at total_train_steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Lowest learning rate, as a share of lr."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta 1."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta 2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: maximum norm."""
    context_parallel: int = Field(1, ge=1)
    """Learner ranks that share a micro-batch, for long sequences (docs/models.md)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the model's own weights (docs/lora.md)."""

    @property
    def reward_factor(self) -> float:
        """reward_scaling as a number; 1 for "running", for which each batch has its own number."""
        return 1.0 if self.reward_scaling == "running" else self.reward_scaling


class ReferenceConfig(Section):
    path: str = ""
    """Folder or Hugging Face id; empty: version 0."""
    update_every: int = Field(0, ge=0)
    """The policy replaces the reference after this many versions; 0: never."""


class TeacherConfig(Section):
    path: str = ""
    """Folder, Hugging Face id, or URL of a vLLM or SGLang server (docs/algorithms.md)."""


class CriticConfig(Section):
    path: str = ""
    """For "gae": model of the critic; empty: the run's, with a value head of zeros."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate of the critic's AdamW; the rest as [actor]."""
    eps_clip: float | None = Field(None, gt=0)
    """Value clipping range."""
    warmup_updates: int = Field(0, ge=0)
    """First updates that train the critic alone (docs/algorithms.md)."""


class WarmupConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before version 0, on the field `demonstration`."""
    lr: float = Field(3e-3, gt=0)
    """Learning rate of the supervised steps."""


class LearnerConfig(Section):
    loop: str = "ppo"
    """Training loop: "ppo", or "module:function" next to the config (docs/loop.md)."""
    max_tokens_per_mb: int = Field(4096, ge=1)
    """Token budget of a packed micro-batch."""
    gradient_checkpointing: bool = False
    """Recompute activations to save memory."""
    compile: bool = False
    """torch.compile for decoder layers, on GPUs (docs/models.md)."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up."""
    simulated: SimulatedUpdateConfig | None = None
    """Updates take a configured time and compute nothing; every rank holds the whole model. With the simulated engine:
    to look at the ring, at many ranks on few cores (docs/cluster.md). What it trains means nothing."""
