"""Typed settings: one frozen class per section. Imports without torch. `Config` is the root.

Precedence, lowest first: the TOML file (with one level of `extends`), AREAL_BUS_SECTION__KEY in the environment,
--set section.key=value. `loader.py` reads and merges them; `validation.py` checks rules across keys.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_bus.config.adapt import AdaptSettings
from areal_bus.config.data import DataConfig
from areal_bus.config.learner import ActorConfig, CriticConfig, LearnerConfig, ReferenceConfig, TeacherConfig
from areal_bus.config.names.workflows import BUILT_IN, environment_of
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.rollout import EngineConfig, GenerationConfig, RolloutConfig
from areal_bus.config.section import Section
from areal_bus.config.stages import StageConfig

AlarmName = Literal[
    "held_out_falls",
    "reward_falls",
    "length_drift",
    "repetition",
    "one_template",
    "unended_answers",
    "entropy_cliff",
    "mismatch_rises",
    "masked_tokens",
    "no_signal",
    "starved_learner",
    "starved_generators",
]


class WatchConfig(Section):
    console: bool = False
    """Print alarms on the console of the job: a process beside it reads the journal (docs/alarms.md)."""
    off: tuple[AlarmName, ...] = ()
    """Alarms that are not raised."""


class ProfileConfig(Section):
    actor: str = Field("", pattern=r"^((learner|generator)-\d+(\.\d+)?)?$")
    """Actor that is recorded at `steps`: "learner-0.0"; without an incarnation each of them (docs/profiling.md)."""
    steps: tuple[int, int] | None = None
    """First and last step that are recorded. A generator takes part in step N while it holds version N."""


class ServeConfig(Section):
    save_every: int = Field(20, ge=1)
    """`areal-bus serve` writes a model's whole state every so many optimizer steps; after the end of a process, the
    calls since then are carried out again (docs/tinker.md)."""


class RunConfig(Section):
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the run folder; empty: the name of the config file. A number is appended when the folder exists."""
    folder: Path = Path("runs")
    """Folder that holds the run folders, relative to the working directory."""
    seed: int = Field(1, ge=0, lt=2**63)
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
    adapt: AdaptSettings = AdaptSettings()
    """Ranks that change between learning and sampling while the job runs."""


class BusConfig(Section):
    transport: Literal["auto", "ipc", "tcp"] = "auto"
    """"ipc" works on one host, "tcp" between hosts; "auto" chooses by the number of hosts."""
    interface: str = ""
    """Network interface (name or address) for tcp and collectives. Empty: loopback on one host, else the
    only network that all hosts share. "*" is refused."""
    curve: Literal["auto", "on", "off"] = "auto"
    """CURVE encryption and authentication, one key per rank. "auto": on for tcp, off on loopback and ipc."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Interval of heartbeats, in both directions."""
    silent_s: float = Field(3.0, gt=0)
    """Silence after which a generator or reward counts as dead; up to ten times longer on a busy machine."""
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
    rewritten: Literal["refuse", "new_trajectory", "restart"] = "refuse"
    """If a call does not continue the previous messages: "refuse" it, begin a "new_trajectory" of the episode (agents
    that drop or rewrite their history, or call sub-agents), or "restart" and forget the earlier calls."""

    @field_validator("rewritten", mode="before")
    @classmethod
    def _former_name(cls, value: Any) -> Any:
        return "restart" if value == "anew" else value

    chat_template: str = ""
    """Jinja chat template of the conversations; empty: the tokenizer's template."""
    tool_calls: Literal["auto", "none", "hermes", "llama3_json", "qwen3_xml", "mistral", "pythonic"] = "auto"
    """Form of tool calls in an answer: "auto" takes the one that the chat template teaches, "none" rejects tools.
    See docs/agents.md."""


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
    member holds one of the last 8 versions. Without effect with actor.lora."""


class CheckpointConfig(Section):
    every_s: float = Field(600.0, ge=0)
    """Longest interval of checkpoints by time. The first comes after a minute, over all learner restarts. Then they
    come as often as takes under 2 % of the time, as measured, and not below 5 s. 0: none by time."""
    every_steps: int = Field(0, ge=0)
    """Checkpoint interval in steps, in addition (1 includes version 0); 0: none by steps."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints kept; older ones are removed once a newer one is complete."""
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints that stay, besides `keep`, because evaluate.metric is best there. Every evaluated version
    is checkpointed, and RUN/best is the model of the best one. 0: none."""
    keep_every: int = Field(0, ge=0)
    """Versions that are a multiple of this are checkpointed, and those checkpoints stay for ever. 0: none."""
    at_end: bool = True
    """Checkpoint and export the final model."""
    upload: str = ""
    """Folder to which complete checkpoints are copied beside training, as an fsspec URL ("s3://bucket/run"); nothing is
    deleted there. See docs/resume.md. Empty: none."""
    push_to_hub: str = ""
    """Repository "USER/NAME" of the Hugging Face hub that gets the final model; a new one is private. Empty: none."""
    async_save: bool = True
    """Write checkpoints beside training, from a copy in host memory (of each learner rank's share: 12 bytes a
    parameter, and its part of the model); false: training waits for the disk, on CPU without a copy."""


class EvaluateSet(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the set in the journal and the table."""
    task: str = ""
    """A named task ("aime24": docs/tasks.md): the form of its rows, and its path, n_samples and temperature where they
    are not set."""
    path: str = ""
    """File of problems (as data.path); needed without a task."""
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
    sets: tuple[EvaluateSet, ...] = ()
    """Further sets, each a table [[evaluate.sets]] with name, path or task, and optionally limit, n_samples and
    temperature. They use the prompt and the reward of the run."""
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
    (also if the head itself is stuck). A job without any reward actor or any generator ends after act_s anyway."""
    act_s: float = Field(1800.0, gt=0)
    """Time without progress (for "requeue": of the blocking actor) until the action."""


class JournalConfig(Section):
    dir: str = ""
    """Node-local folder for the journal; empty: in the run folder."""
    samples: bool = True
    """Keep every trained and evaluated sample (text, reward, spans) beside the journal."""
    tokens: bool = False
    """Keep the token ids and log-probs of these samples as well; `tools.audit --recompute` checks them."""
    replay: bool = False
    """Keep every trained batch with its advantages in RUN/batches, so that `areal-bus replay` trains it again."""
    segment_mib: int = Field(8, ge=0)
    """A process's journal goes on in a new file at this size, and the full file is compressed (about 9 times smaller;
    all tools read it). 0: one file, not compressed."""
    tracker: tuple[str, ...] = ()
    """Trackers that a process beside the job feeds from the journal: "tensorboard", "wandb", "trackio", "mlflow",
    "swanlab", "csv", "parquet", or your own, "module:Writer" (docs/trackers.md)."""


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
