"""Rules across several settings: each yields the error text of what violates it, which states what to change."""

import os
import re
from collections.abc import Iterator, Sequence

from areal_bus.config.adapt import adapt_rules, is_adaptive, settings_by_split
from areal_bus.config.algorithms import GROUP_BASELINES, refusals
from areal_bus.config.data import DataConfig, data_rules
from areal_bus.config.names.engines import SERVED, is_known, kind_of, why_unknown
from areal_bus.config.names.gpu_memory import gib_of, nearest
from areal_bus.config.names.named_tasks import is_scored_by
from areal_bus.config.names.trackers import why_unknown as why_unknown_tracker
from areal_bus.config.names.workflows import BUILT_IN, PREFIX, environment_of
from areal_bus.config.rewards import reward_rules
from areal_bus.config.rollout import GenerationConfig, generation_rules, sampling_rules
from areal_bus.config.sections import Config, WorkflowConfig
from areal_bus.config.stages import (
    FIRST,
    evaluations_of,
    names_of_sets,
    of_source,
    sampling_of,
    settings_by_stage,
    stage_rules,
)
from areal_bus.errors import ConfigError

SERVER_URL = re.compile(r"https?://[^\s/]+(:[0-9]{1,5})?/?")
NO_TEMPLATE = "missing chat template in the tokenizer of [model.scratch]"
RENDEZVOUS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}|ipc://\S.*")


RESERVED_NAMES = {".", "..", "latest"}  # "latest" is the link to the run that was started last
NAME_BYTES = 200  # of a run's name: file systems allow 255, and runs and links append to it


def reserved_name(name: str) -> str:
    """Why a run cannot have this name; "" if it can."""
    if not name.isprintable() or len(os.fsencode(name)) > NAME_BYTES:
        rule = f"at most {NAME_BYTES} bytes and no control character"
        return f'run.name, or the config file\'s, must have {rule}: {name[:60]!r}; set for example run.name = "first"'
    if name not in RESERVED_NAMES:
        return ""
    return f'run.name must be a folder\'s name of its own: {name!r} means another; set for example run.name = "first"'


def check(config: Config) -> None:
    """Check all rules that span several keys, in each stage. Raises ConfigError with the first violation's text."""
    _check(stage_rules(config))
    _check(adapt_rules(config))
    for start, settings in settings_by_stage(config).items():
        trained = [sampling_of(settings, source.label) for source in config.data.source]
        for label in [source.label for source in config.data.source] or [""]:
            try:
                _check_settings(of_source(settings, label), trained)
            except ConfigError as error:
                stage = f" (from step {start}, [[run.stage]])" if config.run.stage else ""
                own = config.data.source_named(label)
                where = f" (source {label!r} of [[data.source]])" if own and own.gconfig.own else ""
                raise ConfigError(f"{error}{where}{stage}") from None
        for name in names_of_sets(settings):
            for sentence in sampling_rules(sampling_of(settings, "", f"{FIRST}:{name}")):
                raise ConfigError(f"{sentence} (set {name!r} of an evaluation)")
    if is_adaptive(config.topology):
        for learners, settings in settings_by_split(next(iter(settings_by_stage(config).values()))).items():
            try:
                _check_settings(settings)
            except ConfigError as error:
                raise ConfigError(f"{error} (with {learners} learners, topology.adapt)") from None


def _check(faults: Iterator[str]) -> None:
    for sentence in faults:
        raise ConfigError(sentence)


def _check_settings(config: Config, trained: Sequence[GenerationConfig] = ()) -> None:
    """`trained`: how prompts of all sources are sampled."""
    _check(_sources(config))
    _check(_training(config))
    _check(reward_rules(config.reward, _other_rewards(config)))
    _check(generation_rules(config, [*trained, *evaluations_of(config)]))
    for rules in (refusals, _engine, _profile, _ring, _topology, _watching):
        _check(rules(config))


def _sources(c: Config) -> Iterator[str]:
    """Rules for model, data and prompts."""
    builds_prompts = WorkflowConfig().function in c.workflows.values() or c.learner.warmup.steps > 0
    if not c.model.path and c.model.scratch is None:
        yield "missing model: set model.path, or add [model.scratch]"
    if c.model.path and c.model.scratch is not None:
        yield f"one model only: remove model.path ({c.model.path!r}) or [model.scratch]"
    yield from data_rules(c.data, [problems.name for problems in c.evaluate.sets])
    yield from _environment(c)
    if c.data.chat_template and c.model.scratch is not None and builds_prompts:
        yield f"{NO_TEMPLATE}: data.chat_template = true needs one; set data.chat_template = false"
    if (c.workflow.function == "agent") != bool(c.workflow.agent.function):
        both = 'workflow.function = "agent" and workflow.agent.function = "module:function"'
        yield f"an agent needs both keys: set {both} (or neither)"
    if c.workflow.arguments and not any(":" in one or one in BUILT_IN for one in c.workflows.values()):
        readers = '"multi_turn", "tools", "verifiers:NAME" or "module:Class"'
        yield f"workflow.arguments are for {readers}: workflow.function is {c.workflow.function!r}; remove them"
    own = [one.workflow for one in c.data.source if one.workflow not in ("", WorkflowConfig().function)]
    if wrong := [one for one in own if ":" not in one or environment_of(one)]:
        rule = 'the workflow of a [[data.source]] is "single_turn" or "module:Class"'
        yield f"{rule}: it is {wrong[0]!r}; agents and environments serve all sources, as workflow.function"
    if c.workflow.uses_endpoint and c.model.scratch is not None and not c.workflow.agent.chat_template:
        yield f"{NO_TEMPLATE}: conversations need one; set workflow.agent.chat_template"
    if c.evaluate.is_on and not (c.evaluate.path or c.evaluate.sets or c.data.evaluated or _held_out(c.data)):
        files = "evaluate.path, [[evaluate.sets]] or evaluate_path of a [[data.source]]"
        yield f"an evaluation needs problems: set {files} (or data.task with data.held_out)"
    yield from _evaluations(c)


def _other_rewards(c: Config) -> list[str]:
    """Reward functions beside reward.function: of each [[data.source]], of a built-in conversation, and a check."""
    of_workflow = [str(c.workflow.arguments.get("reward_fn", ""))] if c.workflow.function in BUILT_IN else []
    return [*(source.reward for source in c.data.source), *of_workflow, c.reward.check.function]


def _environment(c: Config) -> Iterator[str]:
    """Rules for workflow.function = "verifiers:NAME"."""
    function, name = c.workflow.function, c.workflow.environment
    tasks = [task for _, part in c.data.parts if environment_of(task := part.task)]
    own = [key for key in ("path", "sets") if getattr(c.evaluate, key)]
    if tasks and set(tasks) != {function}:
        yield f"data.task = {tasks[0]!r} needs workflow.function = {tasks[0]!r}: it is {function!r}"
    if name and (bool(c.data.source) or c.data.task != function):
        yield f"an environment brings its own rows: remove the source of [data] (workflow.function is {function!r})"
    if name and own:
        yield f"an environment brings its own problems: remove evaluate.{own[0]} ({function!r})"


def _held_out(data: DataConfig) -> bool:
    """Whether a single generated task holds problems out."""
    return not data.source and data.is_generated and data.held_out > 0


def _evaluations(c: Config) -> Iterator[str]:
    """Rules for evaluations in training."""
    evaluate, n_slots, n_train = c.evaluate, c.rollout.max_concurrent_rollouts, c.gconfig.n_samples
    names = [problems.name for problems in evaluate.sets]
    known = [*names, *c.data.evaluated]
    most = max((one.n_samples for one in evaluations_of(c)), default=evaluate.n_samples)
    no_file = [problems.name for problems in evaluate.sets if not problems.path]
    is_set = "function" in c.reward.model_fields_set
    others = [p.name for p in evaluate.sets if p.task and not is_scored_by(p.task, c.reward.function, is_set=is_set)]
    if no_file:
        yield f"missing path in [[evaluate.sets]]: {', '.join(no_file)}"
    if others:
        rule = f"the sets of [[evaluate.sets]] are scored by reward.function = {c.reward.function!r}"
        remedy = "set that, or use evaluate_path of a [[data.source]], or tools.evaluate --task"
        yield f"{rule}: the task of {', '.join(others)} has another reward; {remedy}"
    if len(set(names)) < len(names):
        yield f"the sets of [[evaluate.sets]] need different names: {', '.join(names)}"
    if evaluate.early_stop_patience > 0 and not evaluate.every_steps:
        yield "evaluate.early_stop_patience counts evaluations in training: set evaluate.every_steps as well"
    if c.checkpoint.keep_best > 0 and not evaluate.every_steps:
        yield "checkpoint.keep_best compares evaluations in training: set evaluate.every_steps as well"
    if c.checkpoint.push_to_hub and not c.checkpoint.at_end:
        yield "checkpoint.push_to_hub uploads the final model: set checkpoint.at_end = true as well"
    if evaluate.metric_set and evaluate.metric_set not in known:
        yield f"unknown evaluate.metric_set {evaluate.metric_set!r}: the sets are {known}"
    decides = evaluate.early_stop_patience > 0 or c.checkpoint.keep_best > 0
    if decides and not (evaluate.metric_set or evaluate.path or _held_out(c.data)):
        yield "evaluate.metric needs a set: set evaluate.metric_set to a name in [[evaluate.sets]]"
    if evaluate.every_steps > 0 and c.rollout.max_head_offpolicyness > 0 and most + n_train > n_slots:
        needed = f"evaluate.n_samples + gconfig.n_samples = {most + n_train}"
        yield f"an evaluation in training needs room: {needed} exceeds rollout.max_concurrent_rollouts ({n_slots})"


def _training(c: Config) -> Iterator[str]:
    """Rules for groups, batches and the loss."""
    by_signal, n_samples = c.actor.normalize_batch is True, c.gconfig.n_samples
    n_parts, n_slots = c.actor.ppo_n_minibatches, c.rollout.max_concurrent_rollouts
    if n_samples < 2 and (c.actor.advantage in GROUP_BASELINES or by_signal):
        remedy = 'set it higher, or actor.advantage = "reinforce" (or "none", with actor.normalize_batch = "all")'
        yield f"a group baseline needs at least 2 samples: gconfig.n_samples is {n_samples}; {remedy}"
    if c.data.max_refill > 0 and n_samples < 2:
        why = "a group of one always has equal rewards"
        yield f"data.max_refill is refused: {why}; set gconfig.n_samples to 2 or more, or data.max_refill = 0"
    yield from _verdicts(c)
    if n_parts > c.data.batch_size:
        size = f"data.batch_size ({c.data.batch_size})"
        yield f"actor.ppo_n_minibatches ({n_parts}) must not exceed {size}: a minibatch holds whole groups"
    if n_slots < n_samples:
        yield f"rollout.max_concurrent_rollouts ({n_slots}) must hold one group: gconfig.n_samples is {n_samples}"


def _verdicts(c: Config) -> Iterator[str]:
    """Rules for failed scores."""
    declared = {"on_timeout": c.reward.on_timeout, "on_error": c.reward.on_error}
    large = [f"reward.{key} is {value:g}" for key, value in declared.items() if value != "refund" and abs(value) > 1e9]
    if large:
        yield f"a reward must be at most 1e9 in size: {', '.join(large)}"
    if c.reward.group and c.gconfig.n_samples < 2:
        remedy = f"set gconfig.n_samples to 2 or more (it is {c.gconfig.n_samples}), or use reward.function"
        yield f"reward.group compares the samples of a prompt: {remedy}"
    if c.reward.group == "verifiers" and not environment_of(c.workflow.function):
        remedy = f'set workflow.function to "{PREFIX}NAME" (it is {c.workflow.function!r}), or another reward.group'
        yield f'reward.group = "verifiers" is the rubric of an environment: {remedy}'
    if c.reward.partial_groups and "refund" not in declared.values():
        remedy = 'set it to false, or reward.on_timeout or reward.on_error to "refund"'
        yield f"reward.partial_groups leaves out samples without a reward, and every sample has one: {remedy}"
    if c.reward.partial_groups and c.gconfig.n_samples < 3:
        remedy = f"set gconfig.n_samples to 3 or more (it is {c.gconfig.n_samples}), or remove reward.partial_groups"
        yield f"reward.partial_groups trains two samples or more of a group that lost one: {remedy}"


def _engine(c: Config) -> Iterator[str]:
    """Rules for inference servers."""
    server_keys = sorted(c.engine.model_dump(exclude_defaults=True, exclude={"simulated"}))
    name, kind = c.rollout.engine, kind_of(c.rollout.engine)
    wrong = [url for url in c.engine.urls if not SERVER_URL.fullmatch(url)]
    n = c.topology.generators
    if not is_known(name):
        yield why_unknown(name)
    if c.topology.tensor_parallel > 1 and not kind.tensor_parallel:
        width = f"topology.tensor_parallel is {c.topology.tensor_parallel}"
        yield f'rollout.engine = "{name}" computes on one GPU: {width}; set it to 1, or rollout.engine to {SERVED}'
    if c.rollout.on_update == "finish_old" and not kind.holds_versions:
        remedy = 'set rollout.engine = "builtin", or rollout.on_update = "recompute", "keep" or "drain"'
        yield f'rollout.on_update = "finish_old" needs several versions: rollout.engine = "{name}" holds one; {remedy}'
    if not kind.is_server and server_keys:
        yield f"the {name} engine has no server: remove engine.{server_keys[0]}, or set rollout.engine = {SERVED}"
    if kind.makes_up_tokens and c.evaluate.is_on:
        remedy = "set evaluate.before and evaluate.after to false, and evaluate.every_steps to 0"
        yield f"the simulated engine does not use the model, so its evaluation is meaningless: {remedy}"
    if wrong:
        yield f'invalid URL in engine.urls: {wrong[0]!r}; it must be like "http://127.0.0.1:30000"'
    if c.engine.urls and n is not None and len(c.engine.urls) != n:
        yield f"engine.urls has a server for each generator: {len(c.engine.urls)} for {n} (topology.generators)"
    if len({url.rstrip("/").lower() for url in c.engine.urls}) < len(c.engine.urls):
        yield "duplicate server in engine.urls: each generator has its own"
    if kind.is_server and c.engine.start_timeout_s >= c.launch.timeout_s:
        least = f"engine.start_timeout_s ({c.engine.start_timeout_s:g})"
        yield f"the ring waits for servers: set launch.timeout_s ({c.launch.timeout_s:g}) to more than {least}"
    if c.engine.urls and (c.engine.python or c.engine.arguments):
        yield "a server of engine.urls runs already: remove engine.python and engine.arguments"


def _profile(c: Config) -> Iterator[str]:
    """Rules for recordings by torch.profiler."""
    actor, steps = c.profile.actor, c.profile.steps
    role, _, number = actor.partition(".")[0].partition("-")
    n = {"learner": c.topology.learners, "generator": c.topology.generators}.get(role)
    if is_adaptive(c.topology):
        n = None  # another split has others
    if bool(actor) != (steps is not None):
        both = 'set both ("learner-0.0", [10, 12]), or neither (SIGUSR2 records on demand)'
        yield f"missing profile.actor or profile.steps: {both}"
    if steps is not None and not 0 <= steps[0] <= steps[1] < c.run.total_train_steps:
        last = c.run.total_train_steps - 1
        yield f"profile.steps are the first and the last step to record, of steps 0 to {last}: {list(steps)}"
    if n is not None and int(number or 0) >= n:
        yield f"profile.actor must be an actor of the job: {actor} is none of its {n} {role}s, which count from 0"


def _ring(c: Config) -> Iterator[str]:
    """Rules for bootstrap, bus and the run's name."""
    meet = c.launch.rendezvous
    port = int(meet.rpartition(":")[2]) if RENDEZVOUS.fullmatch(meet) and meet.startswith("tcp") else 1
    if c.bus.interface in {"*", "0.0.0.0", "::"}:
        yield f'bus.interface must name one interface, {c.bus.interface!r} means all: set for example "lo" or "eth0"'
    if meet.startswith(("tcp://*", "tcp://0.0.0.0", "tcp://[::]")):
        example = '"tcp://10.0.0.1:29500"'
        yield f"launch.rendezvous must name one interface, {meet!r} means all: set for example {example}"
    if meet and (not RENDEZVOUS.fullmatch(meet) or not 1 <= port <= 65535):
        yield f'launch.rendezvous must be "tcp://HOST:PORT" (a port from 1 to 65535) or "ipc://PATH": it is {meet!r}'
    if meet.startswith("tcp://["):
        yield f"IPv6 is not supported: launch.rendezvous is {meet!r}; give an IPv4 address or a host's name"
    if c.bus.interface.count(":") > 1:
        given = f"bus.interface is {c.bus.interface!r}"
        yield f"IPv6 is not supported: {given}; give the name of an interface or its IPv4 address or network"
    if c.launch.start == "fork" and c.launch.bootstrap == "mpi":
        yield 'launch.start = "fork" forks processes, which is not safe after MPI_Init: set launch.bootstrap = "env"'
    if c.launch.start == "fork" and c.topology.gpus_per_host > 0:
        given = f"topology.gpus_per_host is {c.topology.gpus_per_host}"
        yield f'launch.start = "fork" is for ranks on CPU: {given}; set it to 0, or launch.start to "spawn"'
    if why := reserved_name(c.run.name):
        yield why


def _topology(c: Config) -> Iterator[str]:
    """Rules for copies of the model and the memory of GPUs."""
    n, n_copies, width = c.topology.learners, c.topology.replicas, c.actor.context_parallel
    memory = c.topology.gpu_memory_gib
    if n % n_copies != 0:
        yield f"topology.replicas divides topology.learners: {n} learners are no {n_copies} copies of equally many"
    if n % width != 0:
        groups = f"{n} learners are no groups of {width} ranks that share a sequence"
        yield f"actor.context_parallel divides topology.learners: {groups}"
    if memory != "" and gib_of(memory) is None:
        rule = "topology.gpu_memory_gib is GiB above 0 or a card's name"
        yield f"{rule}: {memory!r} is neither; {nearest(str(memory))}"
    if memory != "" and c.topology.gpus_per_host == 0:
        remedy = f"set topology.gpus_per_host, or remove topology.gpu_memory_gib ({memory})"
        yield f"topology.gpu_memory_gib is of a GPU, and topology.gpus_per_host = 0 runs all on CPU: {remedy}"


def _watching(c: Config) -> Iterator[str]:
    """Rules for watchdog and journal."""
    if c.watchdog.act_s < c.watchdog.stall_s:
        least = f"watchdog.stall_s ({c.watchdog.stall_s:g})"
        yield f"watchdog.act_s ({c.watchdog.act_s:g}) must follow the first warning: set it to {least} or more"
    if c.journal.tokens and not c.journal.samples:
        yield "journal.tokens keeps the tokens of kept samples: set journal.samples = true (or journal.tokens = false)"
    yield from filter(None, map(why_unknown_tracker, c.journal.tracker))
    if len(set(c.journal.tracker)) < len(c.journal.tracker):
        yield f"journal.tracker names each tracker once: it is {list(c.journal.tracker)}"
