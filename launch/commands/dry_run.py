"""The page of --dry-run: role, host, GPU and memory of each rank, and the changed settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from actors.data.loading import rows_with_origins
from actors.engines.servers.server_process import installed, interpreter
from actors.models.loading import check_model_path
from areal_bus.config.adapt import is_adaptive, settings_by_split
from areal_bus.config.loader import extending
from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.core.parts.split import Split
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.process import terminal
from launch.checks.model_checks import check_token_ids, check_tokenizer
from launch.checks.row_checks import count_tokens, render_prompt
from launch.memory.fits import Fit, compare
from launch.memory.loads import Proposal, format_bytes, rank_need, stage_lines
from launch.memory.ranks import N_LOGITS, MicroBatch, copied_bytes, learner_activation_numbers
from launch.memory.shape import BYTES, DecoderShape, ParameterCounts, find_shape
from launch.plan.seats import plan_ranks, rank_pool
from launch.plan.settings_text import as_toml
from launch.plan.topology import RankPlan, check_route, min_ranks, planned_hosts, ranks_by_gpu
from launch.run.resume import preview_resume

FORMULA = """memory: the peak, every completion at full length; with [[run.stage]] that of the largest stage.
learner: 12 bytes a parameter (float32: itself, two AdamW moments; 4 to 10 with another actor.optimizer) / learners of a
copy; in a step the activations of a micro-batch or 4 bytes a parameter for gradients, whichever is more (both, with
several micro-batches); learner 0 also two snapshots in host memory, or on its GPU where pushes stay within that.
generator: weights twice (live, and received as weights.staging says; a server's in host memory), keys and values of all
slots; the device's part / tensor_parallel.
A server takes what its arguments allow on the device. On the host its processes count, if the job starts them, and for
vllm a copy of the weights in /dev/shm. The simulated engine has in host memory what it receives, and nothing else.
Snapshots, activations and generators are in model.dtype; a lone learner in bfloat16 also rounds its parameters. Host
memory has what libraries take on CPU, and 60 MiB for each rank's supervisor. On CPU both columns add up, and several
learners keep room for what FSDP gathers: the model in model.dtype, embedding and head once more. The comparison with a
GPU's memory adds 0.75 GiB for CUDA (each rank on a GPU) and, with several learners, 1 GiB for NCCL and what FSDP
gathers: embedding, head and two layers in model.dtype. With actor.context_parallel a rank has its part of the tokens of
a micro-batch, and the keys and values of all. With actor.lora the 12 and 4 bytes are those of the adapters'
numbers, and the model itself is in model.dtype; a generator keeps base and merged weights, and receives adapters. A
checkpoint that is written beside training is copied to the host first: 8 bytes a parameter, 12 where they are rounded,
and the pushed weights, / learners; with checkpoint.async_save = false training waits; on CPU there is no copy."""
HEADINGS = ("ranks", "host", "GPU", "role", "device memory", "host memory")
MAX_COUNTED_ROWS = 256  # the rows that are longest in bytes are tokenized
MAX_SINGLE_ROWS = 16  # with more ranks, similar ranks share a line


@dataclass(frozen=True, slots=True)
class PlanPage:
    """`is_too_large`: the plan needs more memory than a GPU or a host has."""

    text: str
    is_too_large: bool


def dry_run(config: Config, file: Path, size: int | None, *, every: bool = False) -> str:
    """The text of `make_plan_page`."""
    return make_plan_page(config, file, size, every=every).text


def make_plan_page(config: Config, file: Path, size: int | None, *, every: bool = False) -> PlanPage:
    """The plan and changed settings (`every`: all). `size` None: topology.ranks, or the least. Raises ConfigError."""
    resumed, folder = preview_resume(config, file), file.resolve().parent
    places = plan_ranks(config.topology, planned_hosts(config.topology, size or min_ranks(config.topology)))
    check_route(config, places)
    check_weights(config, folder)
    shape = find_shape(config, folder)
    check_generation(config, shape, folder)
    n_prompt = longest_prompt(config, folder)
    fit = compare_splits(config, len(places), shape, n_prompt) if shape else Fit()
    plan_lines = [
        *base_lines(config, file),
        headline(config, places, shape),
        *terminal.table([HEADINGS, *rank_rows(config, places, shape, n_prompt)]),
        *stage_lines(config, shape, n_prompt),
        *minibatch_lines(config, places),
        *shared_gpu_lines(config, places, shape, n_prompt),
        *copy_lines(config, shape),
        *fit.lines,
        *interpreter_lines(config, folder),
    ]
    if every:
        rest = [FORMULA, *bytes_per_token_lines(largest(config), shape, n_prompt), "", as_toml(config)]
    else:
        rest = ["# changed settings; --all: every setting, and the memory formula", as_toml(config, changed_only=True)]
    return PlanPage("\n".join([*resumed, *plan_lines, "", *rest]), fit.is_too_large)


def copy_lines(config: Config, shape: DecoderShape | None) -> list[str]:
    """The copies of a learner's state in memory, which are made only where there is room."""
    if shape is None:
        return []
    size = format_bytes(copied_bytes(config, shape))
    return [f"copies in memory of each learner rank's state: {size} more on its host, if that has 4 times as much free"]


def check_weights(config: Config, folder: Path) -> None:
    """Raises ConfigError for a model folder that is here and not whole. A folder that is elsewhere is not looked at."""
    for name in ("model", "reference", "teacher", "critic"):
        path = "" if name == "model" and config.model.scratch is not None else getattr(config, name).path
        if path and any((place / Path(path).expanduser()).is_dir() for place in (Path.cwd(), folder)):
            check_model_path(path, folder, key=f"{name}.path")


def minibatch_lines(config: Config, places: Sequence[RankPlan]) -> list[str]:
    """Several minibatches are dealt by learner rank, so their content depends on the number of ranks."""
    n = config.actor.ppo_n_minibatches
    learners = sum(actor.role == Role.LEARNER for place in places for actor in place.actors)
    if n < 2 or learners < 2:
        return []
    what = f"which groups share a minibatch depends on the number of learner ranks ({learners})"
    return [f"actor.ppo_n_minibatches = {n}: {what}; compare runs with the same number (docs/loss.md)"]


def compare_splits(config: Config, size: int, shape: DecoderShape, n_prompt: int) -> Fit:
    """`compare`, for each split that topology.adapt may reach."""
    if not is_adaptive(config.topology):
        return compare(Proposal(config, size, shape, n_prompt))
    lines: list[str] = []
    is_too_large = False
    pool = rank_pool(config.topology, size)
    for learners, settings in settings_by_split(config).items():
        if pool.refusal(learners):
            continue
        fit = compare(Proposal(settings, size, shape, n_prompt))
        lines += [f"topology.adapt: a split of {Split(learners, pool.generators_at(learners))}", *fit.lines]
        is_too_large = is_too_large or fit.is_too_large
    return Fit(tuple(lines), is_too_large)


def headline(config: Config, places: Sequence[RankPlan], shape: DecoderShape | None) -> str:
    model = config.model.path or "[model.scratch]"
    known = f"{shape.n_parameters / 1e6:,.0f} million parameters" if shape else "shape unknown: no config.json here"
    n_hosts = len({p.host for p in places})
    return f"{len(places)} ranks, {n_hosts} host(s); model {model} ({known}{adapters(config, shape)})"


def adapters(config: Config, shape: DecoderShape | None) -> str:
    """How many parameters are trained, with actor.lora."""
    if config.actor.lora is None or shape is None:
        return ""
    n = ParameterCounts.of(config, shape).trained
    ranks = " and ".join(str(rank) for rank in sorted({rank for rank, _ in config.actor.lora.forms}))
    return f", {n / 1e6:,.1f} million trained in adapters of rank {ranks}"


def base_lines(config: Config, file: Path) -> list[str]:
    """For a file without run.name that others in its folder extend."""
    over = [] if config.run.name else extending(file)
    return [f"{file} is a base for other configs; these extend it: {', '.join(over)}"] if over else []


def interpreter_lines(config: Config, folder: Path) -> list[str]:
    """Whether the server's interpreter is on this machine and has the server's package."""
    packages = kind_of(config.rollout.engine).packages
    if not packages or config.engine.urls:
        return []
    python, of_hosts = interpreter(config.engine.python, folder), "every host with a generator needs it"
    if config.engine.python and not Path(python).exists():
        return [f"engine.python = {config.engine.python} is not on this machine: {of_hosts}"]
    try:
        return [f"engine.python: {packages[0]} {installed(python, *packages)} in {python}"]
    except ConfigError as error:
        return [f"not on this machine, and {of_hosts}: {error}"]


def model_folders(config: Config, folder: Path) -> list[Path]:
    """Where the model lies on this machine."""
    return [path for path in (Path(config.model.path), folder / config.model.path) if (path / "config.json").is_file()]


def check_generation(config: Config, shape: DecoderShape | None, folder: Path) -> None:
    """Raises ConfigError for generation settings that the model does not have, as far as it is here."""
    if shape is not None:
        check_token_ids(config, shape.vocabulary)
    if models := model_folders(config, folder):
        check_tokenizer(config, str(models[0]))


def longest_prompt(config: Config, folder: Path) -> int:
    """Tokens of the longest prompt; data.max_prompt_tokens without rows, tokenizer or the built-in workflow."""
    most, data = config.data.max_prompt_tokens, config.data
    models = model_folders(config, folder)
    has_rows = all(
        part.is_generated or (part.path and any((base / part.path).is_file() for base in (Path(), folder)))
        for _, part in data.parts
    )
    if not config.has_plain_prompts or not has_rows or not (models or config.model.scratch):
        return most
    prompts = [render_prompt(config, row) for row in rows_with_origins(config, folder)]
    longest = sorted(prompts, key=lambda asked: len(asked.text.encode()))[-MAX_COUNTED_ROWS:]
    return min(max(count_tokens(longest, config, str(models[0]) if models else "")), most)


def bytes_per_token_lines(config: Config, shape: DecoderShape | None, n_prompt: int) -> list[str]:
    if shape is None:
        return []
    one, batch = BYTES[config.model.dtype], MicroBatch.of(config, n_prompt)
    row, seen = (one * shape.layers * n for n in learner_activation_numbers(config, shape))
    slot = one * shape.kv_per_token
    wanted = N_LOGITS * shape.vocabulary * BYTES["float32"]
    kept = "each layer's input" if config.learner.gradient_checkpointing else "all"
    return [
        f"bytes a token: learner {row:,} for each token of a micro-batch ({kept} kept), {seen:,} more in attention,",
        f"{wanted:,} for the logits of a trained token; a micro-batch has at most {batch.rows:,}, {batch.seen:,} and",
        f"{batch.wanted:,} of them; generator {slot:,} for each position of a slot. The longest prompt has {n_prompt} "
        "tokens.",
    ]


def rank_rows(
    config: Config, places: Sequence[RankPlan], shape: DecoderShape | None, n_prompt: int
) -> list[tuple[str, ...]]:
    """One row a rank; with many ranks, one row for consecutive ranks with the same roles on a host."""
    rows: list[tuple[str, ...]] = []
    several = len(places) > MAX_SINGLE_ROWS
    for _, group in groupby(places, key=lambda p: row_key(p) if several else p.rank):
        block = list(group)
        first, last = block[0], block[-1]
        names = map(span, names_of(first), names_of(last))
        rows.append((*names, *memory_cells(config, first, shape, n_prompt)))
    return rows


def row_key(place: RankPlan) -> tuple[object, ...]:
    """Consecutive ranks with the same key share a row. Members of a generator count as generators."""
    roles = [actor.role for actor in place.actors if actor.role is not Role.GENERATOR]
    generates = place.member_of is not None or Role.GENERATOR in [actor.role for actor in place.actors]
    return (place.host, generates, tuple(role for role in roles if not generates))


def span(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


def names_of(place: RankPlan) -> tuple[str, str, str, str]:
    """Rank, host, GPU and role."""
    role = " + ".join(map(str, place.actors)) if place.member_of is None else f"member of {place.member_of}"
    return str(place.rank), place.host, "cpu" if place.own_gpu is None else str(place.own_gpu), role


def shared_gpu_lines(
    config: Config, places: Sequence[RankPlan], shape: DecoderShape | None, n_prompt: int
) -> list[str]:
    """Memory of the ranks that share a GPU, one line a GPU; with many GPUs only the largest."""
    if shape is None:
        return []
    needs: list[tuple[int, str]] = []
    for (host, gpu), ranks in ranks_by_gpu(places).items():
        if len(ranks) > 1:
            device = sum(rank_need(config, place, shape, n_prompt).device for place in ranks)
            names = " and ".join(str(place.rank) for place in ranks)
            needs.append((device, f"GPU {gpu} of {host}: ranks {names} need {format_bytes(device)} together"))
    return [line for _, line in (needs if len(needs) <= MAX_SINGLE_ROWS else [max(needs)])]


def memory_cells(config: Config, place: RankPlan, shape: DecoderShape | None, n_prompt: int) -> tuple[str, str]:
    """Device and host memory of one rank, as text."""
    if shape is None:
        return "unknown", "unknown"
    found = rank_need(config, place, shape, n_prompt)
    return format_bytes(found.device), format_bytes(found.host)
