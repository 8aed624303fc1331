"""Settings of the learner: its loop, the algorithm, the models beside the policy, adapters. Imports without torch."""

from typing import Annotated, Literal

from pydantic import Field

from areal_bus.config.section import Section


class SimulatedUpdateConfig(Section):
    update_s: float = Field(0.5, ge=0)
    """Time of an update, beside that of its tokens."""
    tokens_per_s: float = Field(100_000.0, gt=0)
    """Trained tokens of one learner rank in a second."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """R: a layer of F outputs and E inputs has R (F + E) trained numbers."""
    alpha: float = Field(32.0, gt=0)
    """The product of the two matrices is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers with adapters, by the last part of their names, as ["q_proj", "v_proj"]. Empty: all linear layers
    of the decoder layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters, in passes with a gradient only."""

    offload: bool = False
    """Keep the weights of the adapted layers in host memory and copy each to the learner's GPU when it is used. For one
    learner, with learner.gradient_checkpointing."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank


class ParameterGroup(Section):
    match: str
    """Regular expression that is searched in a parameter's name, as in "norm|bias"."""
    lr_scale: float = Field(1.0, ge=0)
    """Factor of the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Unset: actor.weight_decay."""


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
    algorithm: str = ""
    """Sets the keys of configs/algorithms/NAME.toml ("dapo", "gspo"), but for those that your own files, variables or
    options set. Empty: none."""
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
    episode_weights: Literal["token", "trajectory"] = "token"
    """Shares of the trajectories of one episode in its loss, by their trained tokens or all alike: docs/agents.md."""
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
    correction_action: Literal["clamp", "mask"] | None = None
    """What happens outside the bounds: "clamp" the weight, or "mask" the tokens; unset: as the correction defines. The
    same for the next four keys. "tis_sequence" corrects by sequence, the others by token."""
    correction_metric: Literal["ratio", "k1", "k2", "k3", "binary_kl"] | None = None
    """What the bounds apply to: the "ratio" prox/behav or an estimate of the KL divergence."""
    correction_aggregate: Literal["mean", "sum", "max"] | None = None
    """Aggregation of the metric over the trained tokens of a sequence, for "tis_sequence"."""
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
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of this divergence from the sampled tokens (Schulman 2020). Unset: "k3" in the loss, "k1" in the
    reward, where the others have the wrong gradient. See docs/algorithms.md."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Add the divergence to the "loss" of each trained token, or subtract it from the "reward" before the baseline."""
    distill_coef: float = Field(0.0, ge=0)
    """On-policy distillation beside the reward: weight of log(teacher/pi) in each token's advantage. See [teacher]."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, subtracted from each token's loss."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass over the batch, over equal parts of it."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes of an update over its batch, each with its groups in another order and with the proximal log-probs from
    before the first. More passes make no version older: an update is one version. See docs/algorithms.md."""
    optimizer: str = "adamw"
    """"adamw", "muon" (matrices by Muon, embeddings, head and vectors by AdamW), "adamw8bit" (AdamW with states of 8
    bits, package torchao), "sgd" (without momentum: no state) or "module:make". See docs/optimizers.md."""
    group: tuple[ParameterGroup, ...] = ()
    """Parameters with settings of their own, each a table [[actor.group]] with match, and lr_scale or weight_decay. No
    decay of norms and biases: match = "norm|bias", weight_decay = 0. The first table that matches applies."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What learners on GPUs keep in host memory: the states of the "optimizer", which come to the GPU for a step, or
    "all": states, parameters and gradients, and the optimizer computes on the host. See docs/optimizers.md."""
    lr: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    adamw_lr: float | None = Field(None, gt=0)
    """For "muon": peak learning rate of the parameters that AdamW trains. Unset: lr."""
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
    """Decoupled weight decay."""
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
    """Learning rate of the critic's AdamW. Warm-up, weight decay and gradient clipping are those of [actor]."""
    eps_clip: float | None = Field(None, gt=0)
    """Value clipping: range around the value before the update. Unset: none."""


class WarmupConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before version 0, on the field `demonstration` of the rows: a right answer; 0: none."""
    lr: float = Field(3e-3, gt=0)
    """Learning rate of the supervised steps."""


class LearnerConfig(Section):
    loop: str = "ppo"
    """Training loop: "ppo" or "module:function" from the folder of the config."""
    max_tokens_per_mb: int = Field(4096, ge=1)
    """Token budget of a packed micro-batch. On a CPU with AVX-512 a micro-batch may exceed it by 1/32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up."""
    simulated: SimulatedUpdateConfig | None = None
    """Updates take a configured time and compute nothing; every rank holds the whole model. With the simulated engine:
    to look at the ring, at many ranks on few cores (docs/cluster.md). What it trains means nothing."""
