"""The one typed tree of settings, a frozen class a section; imports without torch and knows no process.

Order of precedence: the TOML file (with one level of `extends`), then AREAL_BUS_SECTION__KEY in the environment, then
--set section.key=value. `areal_bus/config/loader.py` reads and merges them, `areal_bus/config/validation.py` holds keys
together.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class RunConfig(Section):
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the run's folder; empty: the config file's name. A number is added when the folder exists."""
    folder: Path = Path("runs")
    """Where run folders lie, relative to the working directory."""
    seed: int = Field(1, ge=0)
    """Seed of data order, sampling, initial weights and everything else that draws."""
    total_train_steps: int = Field(10, ge=1)
    """Training steps (batches, so versions) of the whole run."""
    resume: str = ""
    """A run's folder to go on with, or "auto": the unfinished run of this name started last, else a new one."""


class LaunchConfig(Section):
    bootstrap: Literal["mpi", "env"] = "mpi"
    """How ranks find each other: "mpi" (one exchange, then idle) or "env" (rank and size from the environment)."""
    rendezvous: str = ""
    """For "env": where rank 0 listens, "tcp://HOST:PORT" or "ipc://PATH"; empty: an ipc path of this job."""
    timeout_s: float = Field(300.0, gt=0)
    """MPI_Init, each exchange of the ranks, and then the ring's completion may each take this long."""
    grace_s: float = Field(5.0, gt=0, le=60)
    """Time that actors get to end by themselves before they are killed."""
    max_restarts: int = Field(5, ge=0)
    """Crashes in a row of one actor, with no progress between, that it comes back from; 0: the first ends the job."""
    drain_s: float = Field(600.0, gt=0)
    """Asked to drain (SIGUSR1), a job has this long to write a checkpoint and end; then it ends at once."""


class TopologyConfig(Section):
    ranks: int | None = Field(None, ge=1)
    """Ranks the file is written for: --dry-run uses it, a start with another number is refused. Empty: any."""
    learners: int = Field(1, ge=1)
    """Learner ranks (FSDP2 over them when more than one). The head is a further process beside learner 0."""
    rewards: int = Field(1, ge=1)
    """Reward actors."""
    generators: int | None = Field(None, ge=1)
    """Generator actors; empty: all ranks that are left."""
    reward: Literal["rank", "beside"] = "rank"
    """"rank": a reward actor has a rank of its own; "beside": it runs as a further child of a generator's rank."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks (GPUs) of one generator: the first runs it, the others hold their GPU for it. One host."""
    ranks_per_host: int = Field(8, ge=1)
    """For --dry-run: ranks on one host, filled in order."""
    gpus_per_host: int = Field(0, ge=0)
    """GPUs on one host; 0: everything runs on CPU."""
    gpu_memory_gib: float | str = ""
    """Memory of one GPU for --dry-run: GiB, or a card's name ("H100", "A100-80G", "RTX 4090"). Empty: of those here."""
    ranks_per_gpu: int = Field(1, ge=1)
    """Ranks that share a GPU: a host's ranks take its GPUs in turn. No two learners, nor ranks of one generator."""


class BusConfig(Section):
    transport: Literal["auto", "ipc", "tcp"] = "auto"
    """"ipc" on one host, "tcp" between hosts; "auto" chooses by the hosts found."""
    interface: str = ""
    """Network interface (name or address) for tcp and collectives. One host: loopback when empty. Never "*"."""
    port: int = Field(0, ge=0, le=65535)
    """tcp port of the head; 0: a free one."""
    curve: Literal["auto", "on", "off"] = "auto"
    """Encrypt connections; each rank's key speaks as its own actors only. "auto": over tcp, except on loopback."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Interval of heartbeats, both ways."""
    silent_s: float = Field(3.0, gt=0)
    """Silence after which a ready generator or reward is taken for dead; up to ten times as long on a busy machine."""
    inbox_mib: int = Field(256, ge=1)
    """Bytes a process holds unread before it stops reading from its sockets."""
    resend_s: float = Field(120.0, gt=0)
    """A trajectory without acknowledgement for this long is sent again, to another reward if there is one."""


class ScratchConfig(Section):
    characters: str = Field("abcdefghijklmnopqrstuvwxyz >", min_length=2)
    """The vocabulary: one token a character (padding and end of text are added)."""
    hidden_size: int = Field(128, ge=8)
    """Width."""
    layers: int = Field(3, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    max_positions: int = Field(64, ge=8)
    """Longest sequence."""


class ModelConfig(Section):
    path: str = ""
    """Folder (config.json, tokenizer, safetensors) or Hugging Face id; empty with [model.scratch]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of compute and of the weights sampled with and exported; learners keep float32. Float32 is faster on CPU."""
    scratch: ScratchConfig | None = None
    """A small Llama-type character model with random weights instead of a folder."""


class DataConfig(Section):
    task: Literal["", "sums", "reverse"] = ""
    """A generated task instead of a file: "sums" (a + b) or "reverse" (letters backwards)."""
    path: str = ""
    """JSON-lines file (relative to the config's folder or the working directory) or a Hugging Face data set id."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    question_key: str = "question"
    """Field of a row that holds the question: text, or chat messages. A nested one: "extra_info.question"."""
    answer_key: str = "answer"
    """Field of a row that holds the answer. A nested one: "reward_model.ground_truth"."""
    prompt: str = "{question}"
    """What the model is asked, with {question} and other fields of the row filled in."""
    chat_template: bool = True
    """Wrap the prompt as a user message by the tokenizer's chat template."""
    system: str | None = None
    """System message; empty string: none at all; unset: whatever the template does by default."""
    batch_size: int = Field(8, ge=1)
    """B: prompts (groups) in a batch."""
    total_train_epochs: int | None = Field(None, ge=1)
    """Passes through the data after which the run ends, if its steps have not ended it before. Unset: no limit."""
    drop_last: bool = False
    """At the end of the last pass: refund a remainder below B instead of training a short batch."""
    shuffle: bool = True
    """A new seeded order in each pass."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is refused at the start, never cut; your own workflow's is refunded as prompt_too_long."""
    largest: int = Field(9, ge=1)
    """Task "sums": the largest summand (from 0). Task "reverse": the most letters (from 3)."""
    held_out: int = Field(20, ge=0)
    """Generated tasks: problems held out for the evaluation (both orders of a sum together)."""


class AgentConfig(Section):
    function: str = ""
    """The agent, "module:function": `(row, base_url, api_key)`, a process calls it. See docs/agents.md."""
    workers: int = Field(8, ge=1)
    """Processes of one generator that run agents: so many conversations go on at once."""
    timeout_s: float = Field(60.0, gt=0)
    """An agent's own time in one conversation; while it waits for the model its clock stands."""
    max_calls: int = Field(64, ge=1)
    """Calls of one conversation that are looked at, refused ones included; a further one is refused unseen."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of a whole conversation, given and sampled. Unset: what the engine takes."""
    rewritten: Literal["refuse", "anew"] = "refuse"
    """A call whose messages do not go on from the last one's: "refuse" it, or forget those before and begin "anew"."""
    chat_template: str = ""
    """Jinja template of the conversations; empty: the tokenizer's own."""
    tool_calls: Literal["none", "hermes"] = "none"
    """How the model writes tool calls: "hermes" is JSON within <tool_call> marks (Qwen); "none" refuses tools."""


class WorkflowConfig(Section):
    function: str = "single_turn"
    """How a row becomes an episode: "single_turn", "agent", or "module:Class" found from the config's folder."""
    agent: AgentConfig = AgentConfig()
    """An agent that talks to the model as to an OpenAI endpoint."""


class RolloutConfig(Section):
    engine: Literal["builtin", "sglang", "vllm", "simulated"] = "builtin"
    """Who samples: "builtin" runs in the generator, on CPU or one GPU; "sglang" and "vllm" are servers; "simulated"
    makes its tokens up."""
    max_head_offpolicyness: int = Field(1, ge=0, le=1024)
    """eta: how many versions a trained token may be behind. 0 is the synchronous algorithm."""
    staleness_policy: Literal["mask", "hold", "drop", "paper"] = "mask"
    """Beyond eta: "mask" trains no older token, "hold" waits, "drop" samples again, "paper" trains all ages."""
    max_concurrent_rollouts: int = Field(32, ge=1)
    """Samples one generator decodes at once (its slots)."""
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """Running samples at new weights: prefill again, keep the old keys and values, or end first, beginning none."""
    report_tokens: int = Field(64, ge=0)
    """At new weights a generator reports samples with so many new tokens, for others to continue. 0: none."""
    report_mib: int = Field(256, ge=1)
    """MiB of reported samples that the head keeps: beyond it those reported longest ago go."""


class SimulatedConfig(Section):
    """Laws of the simulated engine, and of `tools.simulate` for any."""

    median_tokens: float = Field(64.0, ge=1)
    """Half of the answers are no longer; gconfig.max_new_tokens cuts them."""
    sigma: float = Field(0.5, ge=0, le=4)
    """Deviation of the logarithm of their length; 0: all have the median."""
    decode_tokens_per_s: float = Field(2000.0, gt=0)
    """All live samples of one generator together, at the limit of many."""
    half_slots: float = Field(8.0, ge=0)
    """Live samples that decode at half of that limit; 0: one reaches it."""
    prefill_tokens_per_s: float = Field(20000.0, gt=0)
    """Prompts, and after an update ("recompute") all that is live; decoding stops meanwhile."""
    update_s: float = Field(0.05, ge=0)
    """A generator stands still so long when it swaps in weights."""


class EngineConfig(Section):
    urls: tuple[str, ...] = ()
    """Servers to attach to, "http://HOST:PORT", one for each generator in order; empty: each starts its own."""
    python: str = ""
    """Interpreter of the server's environment, whose pins conflict with ours; empty: this one."""
    arguments: tuple[str, ...] = ()
    """Further words of the server's command line, after ours."""
    start_timeout_s: float = Field(240.0, gt=0)
    """A server must be ready within this time after its start; launch.timeout_s is longer."""
    call_timeout_s: float = Field(60.0, gt=0)
    """A server must answer a call within this time (weights: weights.timeout_s)."""
    silent_s: float = Field(120.0, gt=0)
    """A server that has samples under way and says nothing for so long is taken for dead."""
    simulated: SimulatedConfig = SimulatedConfig()
    """Lengths and speeds of the simulated engine."""


class GenerationConfig(Section):
    n_samples: int = Field(8, ge=1)
    """Samples of one prompt: its group."""
    max_new_tokens: int = Field(256, ge=1)
    """Tokens sampled at most in one completion."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner's log-probs use the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampling; log-probs stay those of the whole distribution."""


class RewardConfig(Section):
    function: str = "exact"
    """"exact", "sums", "reverse", "math", "agent" (what it returned) or your "module:function", by the config."""
    timeout_s: float = Field(10.0, gt=0)
    """One score must be there by then, or it is a timeout (never a 0)."""
    workers: int = Field(1, ge=1)
    """Worker processes of one reward actor."""
    on_timeout: Literal["refund"] | float = "refund"
    """Training, after a timeout: "refund" (no reward: see partial_groups) or a number, the sample's reward."""
    on_error: Literal["refund"] | float = "refund"
    """The same for a function that raised or returned no finite number. An evaluation counts both as failed."""
    partial_groups: bool = False
    """With "refund": false gives the whole prompt back; true trains the others, if two or more have a reward."""


class ActorConfig(Section):
    reward_scaling: float = Field(1.0, gt=0)
    """Advantages are made of (reward + reward_bias) * reward_scaling; figures and journal keep the reward."""
    reward_bias: float = 0.0
    """Added to each reward before it is scaled: -0.5, scaled by 10, makes 0 and 1 the paper's -5 and +5."""
    advantage: Literal["grpo", "rloo", "none"] = "grpo"
    """Baseline: "grpo", the group's mean over its deviation; "rloo", the mean of the others; "none", the reward itself
    (the paper: with normalize_batch over "all")."""
    normalize_batch: bool = False
    """Normalise advantages once more over the whole batch (the paper's set-up)."""
    normalize_batch_over: Literal["signal", "all"] = "signal"
    """Groups that normalize_batch counts: those whose rewards differ ("signal"; others get 0), or "all" (all train)."""
    std_unbiased: bool = True
    """Deviations (of "grpo" and normalize_batch) by n - 1, as verl, TRL and AReaL have them; false: by n."""
    std_eps: float = Field(1e-6, gt=0)
    """Added to those deviations."""
    loss_denominator: Literal["all", "signal"] | Annotated[float, Field(gt=0)] = "all"
    """The loss is the sum over trained tokens over this: "all" young enough tokens of the minibatch, groups without a
    signal included; only those with a "signal"; or a number. See docs/loss.md."""
    use_decoupled_loss: bool = True
    """Decoupled PPO (paper, eq. 5): clip around the proximal policy, weigh by prox/behav, always."""
    recompute_logprobs: bool = True
    """Compute the proximal log-probs with the parameters just before the update."""
    behav_imp_weight_cap: float | None = Field(None, gt=0)
    """Clamp the weight prox/behav to at most this. Unset: not clamped."""
    eps_clip: float = Field(0.2, gt=0)
    """Clipping range of the ratio."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Optimizer steps in one training step, over equal parts of the batch."""
    lr: float = Field(2e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in training steps."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to 0 at total_train_steps."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first decay."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's second decay."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled to this norm when they are larger."""


class WarmupConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps on the data's own demonstrations before version 0; 0: none."""
    batch_size: int = Field(64, ge=1)
    """Demonstrations in one of them."""
    lr: float = Field(3e-3, gt=0)
    """Their learning rate."""


class LearnerConfig(Section):
    loop: str = "ppo"
    """The training loop: "ppo" or "module:function", found from the config's folder."""
    max_tokens_per_mb: int = Field(4096, ge=1)
    """Token budget of a packed micro-batch. On a CPU with AVX-512 up to a thirty-second is filled up beyond it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    helpers: int = Field(0, ge=0, le=15)
    """Threads that take a part of an update while their cores are idle; one learner on a CPU. Rounding varies."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up."""


class WeightsConfig(Section):
    bucket_mib: int = Field(64, ge=1)
    """Size of one broadcast."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of a whole push; a member that misses it is fenced and caught up later."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Where a generator receives; "auto": on its device when it computes on one, else in host memory."""
    route: Literal["auto", "gloo", "shared"] = "auto"
    """"gloo" sends; "shared": all copy out of learner 0's memory; "auto": so where all are on one GPU or one CPU."""


class CheckpointConfig(Section):
    every_s: float = Field(600.0, ge=0)
    """Checkpoint the first version after so many seconds without one; less often where that would take over a
    twentieth of the time. 0: never by time."""
    every_steps: int = Field(0, ge=0)
    """Checkpoint after every so many steps, too (1: version 0 included); 0: none by steps."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; older ones are removed after a newer one is whole."""
    at_end: bool = True
    """Checkpoint and export the final model."""


class EvaluateConfig(Section):
    before: bool = False
    """Score version 0 on the held-out problems."""
    after: bool = False
    """Score the final version on them."""
    path: str = ""
    """File of problems (as data.path); empty: the generated task's held-out ones."""
    limit: int | None = Field(None, ge=1)
    """Use only the first problems."""
    n_samples: int = Field(8, ge=1)
    """Answers a problem."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of those answers; 0: greedy."""


class WatchdogConfig(Section):
    stall_s: float = Field(300.0, gt=0)
    """Nothing has moved for this long: who waits for whom is said, and again after twice as long, and so on."""
    progress_s: float = Field(120.0, gt=0)
    """An actor that has work and made no progress for this long is named, whether or not the others move."""
    action: Literal["warn", "requeue", "abort"] = "warn"
    """After act_s: "warn" only says it, "requeue" gives the work of those to blame to others, "abort" ends the job
    (of a head that stands still, too)."""
    absent_action: Literal["abort", "warn"] = "abort"
    """After act_s in which nothing moved and no reward, or no generator, was there: "abort" ends the job, whatever
    `action` is; "warn" waits for ever, for jobs whose machines may be away for that long."""
    act_s: float = Field(1800.0, gt=0)
    """How long nothing (for "requeue": or the actor to blame) must have moved before the action."""


class JournalConfig(Section):
    dir: str = ""
    """Node-local folder for the journal; empty: in the run's folder."""
    samples: bool = True
    """Keep every trained and evaluated sample (text, reward, spans) beside the journal."""
    tokens: bool = False
    """Keep the token ids and log-probs of those samples, too: `tools.audit --recompute` checks them."""


class Config(Section):
    run: RunConfig = RunConfig()
    launch: LaunchConfig = LaunchConfig()
    topology: TopologyConfig = TopologyConfig()
    bus: BusConfig = BusConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    gconfig: GenerationConfig = GenerationConfig()
    reward: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    journal: JournalConfig = JournalConfig()
