"""Typed settings: one frozen class per section. Imports without torch. `Config` is the root.

`loader.py` reads and merges their sources, by precedence; `validation.py` checks rules across keys.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_bus.config.adapt import AdaptSettings
from areal_bus.config.data import DataConfig, OwnGeneration
from areal_bus.config.learner import ActorConfig, CriticConfig, LearnerConfig, ReferenceConfig, TeacherConfig
from areal_bus.config.names.workflows import BUILT_IN, environment_of
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.rollout import EngineConfig, GenerationConfig, RolloutConfig
from areal_bus.config.section import Section
from areal_bus.config.stages import StageConfig

MAX_HEARTBEAT_S = 5.0  # a longer interval would delay what heartbeats repeat: progress, published versions

AlarmName = Literal[
    "held_out_falls",
    "reward_falls",
    "length_drift",
    "repetition",
    "one_template",
    "unended_answers",
    "entropy_cliff",
    "mismatch_rises",
    "collapse_ahead",
    "masked_tokens",
    "no_signal",
    "starved_learner",
    "starved_generators",
]


class WatchConfig(Section):
    console: bool = False
    """Print alarms on the console of the job (docs/alarms.md)."""
    off: tuple[AlarmName, ...] = ()
    """Names of alarms that are not raised (docs/alarms.md)."""
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """At a forecast of a collapse; "rollback" goes back once, with a smaller actor.lr (docs/alarms.md)."""


class ProfileConfig(Section):
    actor: str = Field(
        "",
        pattern=r"^((learner|generator)-\d+(\.\d+)?)?$",
        json_schema_extra={"form": 'such as "learner-0" or "generator-1.0"'},
    )
    """Actor that torch.profiler records at `steps`, as "learner-0.0" (docs/profiling.md)."""
    steps: tuple[int, int] | None = None
    """First and last step; a generator takes part in step N while it holds version N."""


class ServeConfig(Section):
    save_every: int = Field(20, ge=1)
    """Optimizer steps between two snapshots of a model in `areal-bus serve` (docs/tinker.md)."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest lag of a client's tokens, in optimizer steps; unset: any."""


class RunConfig(Section):
    name: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", json_schema_extra={"form": 'of letters, digits, ".", "_" and "-"'}
    )
    """Name of the run folder, numbered if it exists; empty: the config's."""
    folder: Path = Path("runs")
    """Folder of the run folders."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of all random draws."""
    total_train_steps: int = Field(10, ge=1)
    """Training steps, one version each."""
    stage: tuple[StageConfig, ...] = ()
    """Tables [[run.stage]] of settings that change at a step (docs/stages.md)."""
    resume: str = ""
    """Run folder to resume, or "auto": the newest unfinished run of this name, else a new one."""


class LaunchConfig(Section):
    bootstrap: Literal["mpi", "env"] = "mpi"
    """How ranks meet: "mpi", or "env" (rank and size from the environment)."""
    start: Literal["spawn", "fork"] = "spawn"
    """"spawn"; or "fork" all actors of a host from one process (many ranks on CPU; needs bootstrap = "env")."""
    rendezvous: str = ""
    """For "env": address of rank 0, "tcp://HOST:PORT" or "ipc://PATH"; empty: an ipc path."""
    timeout_s: float = Field(300.0, gt=0)
    """Time limit of MPI_Init, an exchange between ranks, and the joining of all actors."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of one actor without progress between them."""
    drain_s: float = Field(600.0, gt=0)
    """Time limit of a drain (SIGUSR1)."""


class TopologyConfig(Section):
    ranks: int | None = Field(None, ge=1)
    """Number of ranks; a start with another number is refused. Unset: any."""
    learners: int = Field(1, ge=1)
    """Learner ranks; more than one use FSDP2."""
    replicas: int = Field(1, ge=1)
    """Copies of the model among the learners (HSDP)."""
    rewards: int = Field(1, ge=1)
    """Reward actors."""
    generators: int | None = Field(None, ge=1)
    """Generator actors; unset: all remaining ranks."""
    reward: Literal["rank", "beside"] = "rank"
    """Reward actors have their own "rank", or run "beside" a generator."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks (GPUs) per generator, on one host."""
    ranks_per_host: int = Field(8, ge=1)
    """Ranks per host, for --dry-run."""
    gpus_per_host: int = Field(0, ge=0)
    """GPUs per host; 0: all on CPU."""
    gpu_memory_gib: float | str = ""
    """For --dry-run: GiB or a card's name, "H100"; empty: this host's GPUs."""
    host_memory_gib: float | None = Field(None, gt=0)
    """For --dry-run; unset: this machine's, without GPUs."""
    ranks_per_gpu: int = Field(1, ge=1)
    """Ranks per GPU; not two learners, nor two ranks of one generator."""
    adapt: AdaptSettings = AdaptSettings()
    """Ranks that change between learning and sampling while the job runs."""


class BusConfig(Section):
    transport: Literal["auto", "ipc", "tcp"] = "auto"
    """"ipc" on one host, "tcp" between hosts; "auto" chooses."""
    interface: str = ""
    """Interface for tcp and collectives; empty: loopback, or the only network that all hosts share."""
    curve: Literal["auto", "on", "off"] = "auto"
    """CURVE encryption; "auto": for tcp, not on loopback and ipc."""
    silent_s: float = Field(3.0, gt=0)
    """Silence after which a generator or reward is dead; up to tenfold on a busy machine."""

    @property
    def heartbeat_s(self) -> float:
        """Interval of heartbeats."""
        return min(self.silent_s / 3, MAX_HEARTBEAT_S)


class ScratchConfig(Section):
    family: Literal["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"] = "llama"
    """Architecture, as transformers has it."""
    characters: str = Field("abcdefghijklmnopqrstuvwxyz >", min_length=2)
    """Vocabulary: one token per character, plus padding and end of text."""
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
    """Folder or Hugging Face id; empty with [model.scratch]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of compute, sampling and export; learners keep float32 weights."""
    scratch: ScratchConfig | None = None
    """A small Llama-style character model with random weights, instead of a folder."""


class AgentConfig(Section):
    function: str = ""
    """The agent, "module:function", called with (row, base_url, api_key); "external": outside the job
    (docs/agents.md)."""
    workers: int = Field(8, ge=1)
    """Concurrent conversations, a process each, per generator."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of the agent's own code per conversation."""
    max_calls: int = Field(64, ge=1)
    """Maximum calls per conversation."""
    max_tokens: int | None = Field(None, ge=2)
    """Maximum tokens per conversation; unset: the engine's."""
    rewritten: Literal["refuse", "new_trajectory", "restart"] = "refuse"
    """A call that rewrites the history: "refuse", "new_trajectory", or "restart" (docs/agents.md)."""

    @field_validator("rewritten", mode="before")
    @classmethod
    def _former_name(cls, value: Any) -> Any:
        return "restart" if value == "anew" else value

    chat_template: str = ""
    """Jinja chat template; empty: the tokenizer's."""
    tool_calls: Literal["auto", "none", "hermes", "llama3_json", "qwen3_xml", "mistral", "pythonic"] = "auto"
    """Form of tool calls; "auto": the chat template's (docs/agents.md)."""


class WorkflowConfig(Section):
    function: str = "single_turn"
    """"single_turn", "multi_turn", "tools", "agent", "verifiers:NAME", or "module:Class" next to the config, AReaL's
    too (docs/environments.md, docs/agents.md, docs/from-areal.md)."""
    arguments: dict[str, bool | int | float | str] = Field({})
    """Its arguments; reward_fn is the name of a reward or "module:function"."""
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


class WeightsConfig(Section):
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of a push."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Where a generator receives weights; "auto": the engine's device, else host memory."""
    route: Literal["auto", "gloo", "shared"] = "auto"
    """"gloo" broadcasts, "shared" copies learner 0's memory; "auto": "shared" on one host (CPU) or GPU."""
    delta_push: Literal["off", "auto"] = "off"
    """"auto": send only changed numbers where these are few (docs/weights.md)."""


class CheckpointConfig(Section):
    every_s: float = Field(600.0, ge=0)
    """Longest interval by time; 0: none (docs/checkpoints.md)."""
    every_steps: int = Field(0, ge=0)
    """Interval in steps, in addition; 0: none."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept."""
    keep_best: int = Field(0, ge=0)
    """Best checkpoints by evaluate.metric that stay, too."""
    keep_every: int = Field(0, ge=0)
    """Multiples of this are written and stay; 0: none."""
    at_end: bool = True
    """Checkpoint and export the final model."""
    upload: str = ""
    """fsspec URL for copies, "s3://bucket/run" (docs/checkpoints.md)."""
    push_to_hub: str = ""
    """Hugging Face repository "USER/NAME" for the final model."""
    async_save: bool = True
    """Write checkpoints in the background, from a copy."""


class EvaluateSet(OwnGeneration):
    """A set of problems with keys of [gconfig] of its own; unset: docs/evaluation.md."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", json_schema_extra={"form": 'of letters, digits, ".", "_" and "-"'})
    """Name of the set in the journal and the table."""
    task: str = ""
    """A named task ("aime24": docs/tasks.md): the form of its rows, and its path, n_samples and temperature where they
    are not set."""
    path: str = ""
    """File of problems (as data.path); needed without a task."""
    limit: int | None = Field(None, ge=1)
    """Use only the first problems."""


class EvaluateConfig(Section):
    before: bool = False
    """Evaluate version 0."""
    after: bool = False
    """Evaluate the final version."""
    every_steps: int = Field(0, ge=0)
    """Evaluate multiples of this (docs/evaluation.md); 0: never."""
    sets: tuple[EvaluateSet, ...] = ()
    """Further sets, tables [[evaluate.sets]] (docs/evaluation.md)."""
    metric: Literal["avg_at_k", "maj_at_k", "pass_at_k", "accuracy", "reward"] = "avg_at_k"
    """Metric of early_stop_patience and checkpoint.keep_best."""
    metric_set: str = ""
    """Name of the set of `metric`; empty: the problems of `path`."""
    early_stop_patience: int = Field(0, ge=0)
    """Evaluations without a better `metric` that end the run; 0: never."""
    path: str = ""
    """File of problems, as data.path; empty: those that a generated task holds out."""
    limit: int | None = Field(None, ge=1)
    """Use only the first problems."""
    n_samples: int = Field(8, ge=1)
    """Samples per problem."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: greedy."""

    @property
    def is_on(self) -> bool:
        return self.before or self.after or self.every_steps > 0


class WatchdogConfig(Section):
    stall_s: float = Field(300.0, gt=0)
    """Time without progress until the log names who waits for whom."""
    progress_s: float = Field(120.0, gt=0)
    """Time until an actor with work and no progress is named in a warning."""
    action: Literal["warn", "requeue", "abort"] = "warn"
    """After act_s: "warn", "requeue" the work of the blocking actors, or "abort" the job."""
    act_s: float = Field(1800.0, gt=0)
    """Time without progress until the action."""


class JournalConfig(Section):
    dir: str = ""
    """Node-local folder for the journal; empty: in the run folder."""
    samples: bool = True
    """Keep every trained and evaluated sample."""
    tokens: bool = False
    """Keep their token ids and log-probs, for `areal-bus audit --recompute`."""
    replay: bool = False
    """Keep every trained batch, for `areal-bus replay`."""
    tracker: tuple[str, ...] = ()
    """Trackers fed from the journal: "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "csv", "parquet",
    "module:Writer" (docs/trackers.md)."""


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
    serve: ServeConfig = ServeConfig()

    @property
    def workflows(self) -> dict[str, str]:
        """Source ("" without [[data.source]]) -> function of the workflow of its rows."""
        own = {source.label: source.workflow for source in self.data.source} or {"": ""}
        return {label: function or self.workflow.function for label, function in own.items()}

    @property
    def has_plain_prompts(self) -> bool:
        """Whether the built-in workflow makes all prompts, one for each row."""
        return set(self.workflows.values()) == {WorkflowConfig().function}
