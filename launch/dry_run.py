"""What a start would do, as text: rank -> host -> GPU -> role, memory per rank, resolved settings; starts nothing."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from actors.data.loading import place_rows
from areal_bus.config import Config
from areal_bus.messages import Role
from launch.explain import as_toml
from launch.memory import BYTES, GIB, N_LOGITS, SUPERVISOR, MicroBatch, Need, Shape, estimate, find_shape, saved
from launch.prompts import count_tokens, filled
from launch.resume import preview
from launch.topology import Place, by_gpu, check_route, dry_hosts, least_ranks, plan

FORMULA = """memory: the peak, every completion at full length.
learner: 12 bytes a parameter (float32: itself, two AdamW moments) / learners; in a step the activations of a
micro-batch or 4 bytes a parameter for gradients, whichever is more (both, with several micro-batches); learner 0 also
two snapshots in host memory, or on its GPU where pushes stay within that. generator: weights twice (live, and received
as weights.staging says; a server's in host memory), keys and values of all slots; the device's part / tensor_parallel.
A server takes what its arguments allow; the simulated engine has in host memory what it receives, and nothing else.
Each of learner.helpers has the slopes of a layer's weights, where helpers have a part in these, or what attention keeps
of a sample.
Snapshots, activations and generators are in model.dtype; a lone learner in bfloat16 also rounds its parameters. Host
memory has what libraries take on CPU, and 60 MiB for each rank's supervisor. On CPU both columns add up. What
CUDA takes for itself (for each rank on a GPU) and the layers that FSDP gathers come on top."""
LOOKED_AT = 256  # rows, the longest by bytes, whose tokens are counted
FEW = 16  # up to so many ranks each has its own line


def dry_run(config: Config, file: Path, size: int | None) -> str:
    """The whole page. `size` None: the number of ranks the file is written for, or the fewest. Raises ConfigError."""
    resumed = preview(config, file)
    size = size or least_ranks(config.topology)
    places = plan(config.topology, dry_hosts(config.topology, size))
    check_route(config, places)
    shape = find_shape(config, file.resolve().parent)
    n_prompt = longest_prompt(config, file.resolve().parent)
    rows = [("ranks", "host", "GPU", "role", "device memory", "host memory"), *table(config, places, shape, n_prompt)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    model = config.model.path or "[model.scratch]"
    known = (
        f"{shape.n_parameters / 1e6:,.0f} million parameters" if shape else "shape unknown: it has no config.json here"
    )
    parts = [
        f"{size} ranks, {len({p.host for p in places})} host(s); model {model} ({known})",
        *lines,
        *shared_gpus(config, places, shape, n_prompt),
        "",
        FORMULA,
        *per_token(config, shape, n_prompt),
        "",
    ]
    return "\n".join([*resumed, *parts, as_toml(config)])


def longest_prompt(config: Config, folder: Path) -> int:
    """Tokens of the longest prompt where rows, tokenizer and the built-in workflow are here; else the most allowed."""
    most, data = config.data.max_prompt_tokens, config.data
    models = [
        path for path in (Path(config.model.path), folder / config.model.path) if (path / "config.json").is_file()
    ]
    has_rows = data.task or any((base / data.path).is_file() for base in (Path(), folder))
    if config.workflow.function != "single_turn" or not has_rows or not (models or config.model.scratch):
        return most
    prompts = [filled(config, row) for row in place_rows(config, folder)]
    longest = sorted(prompts, key=lambda asked: len(asked.text.encode()))[-LOOKED_AT:]
    return min(max(count_tokens(longest, config, str(models[0]) if models else "")), most)


def per_token(config: Config, shape: Shape | None, n_prompt: int) -> list[str]:
    """Bytes a token, of this model."""
    if shape is None:
        return []
    one, batch = BYTES[config.model.dtype], MicroBatch.of(config, n_prompt)
    row, seen = (one * shape.layers * n for n in saved(config, shape))
    slot = one * shape.kv_per_token
    wanted = N_LOGITS * shape.vocabulary * BYTES["float32"]
    kept = "each layer's input" if config.learner.gradient_checkpointing else "all"
    return [
        f"bytes a token: learner {row:,} for each that is read ({kept} kept), {seen:,} more in attention, {wanted:,}",
        f"for the logits of each that is trained: at most {batch.rows:,}, {batch.seen:,} and {batch.wanted:,} of these",
        f"in a micro-batch; generator {slot:,} for each position of a slot. The longest prompt has {n_prompt} tokens.",
    ]


def table(config: Config, places: Sequence[Place], shape: Shape | None, n_prompt: int) -> list[tuple[str, ...]]:
    """A row a rank; for many ranks, a row for each run of ranks that differ in their numbers only."""
    rows: list[tuple[str, ...]] = []
    several = len(places) > FEW
    for _, group in groupby(places, key=lambda p: alike(p) if several else p.rank):
        block = list(group)
        first, last = block[0], block[-1]
        rows.append(
            (
                span(str(first.rank), str(last.rank)),
                span(first.host, last.host),
                span(gpu_name(first), gpu_name(last)),
                span(role_name(first), role_name(last)),
                *memory(config, first, shape, n_prompt),
            )
        )
    return rows


def alike(place: Place) -> tuple[object, ...]:
    """Ranks with the same key share a row: neighbours on a host with the same roles, a generator's members included."""
    roles = [seat.role for seat in place.seats if seat.role is not Role.GENERATOR]
    generates = place.member_of is not None or Role.GENERATOR in [seat.role for seat in place.seats]
    return (place.host, generates, tuple(role for role in roles if not generates))


def span(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


def gpu_name(place: Place) -> str:
    return "cpu" if place.own_gpu is None else str(place.own_gpu)


def role_name(place: Place) -> str:
    if place.member_of is not None:
        return f"member of {place.member_of}"
    return " + ".join(map(str, place.seats))


def shared_gpus(config: Config, places: Sequence[Place], shape: Shape | None, n_prompt: int) -> list[str]:
    """What the ranks of one GPU need together, a line for each that has several; of many the one that needs most."""
    if shape is None:
        return []
    needs = []
    for (host, gpu), ranks in by_gpu(places).items():
        if len(ranks) > 1:
            device = sum(need(config, place, shape, n_prompt).device for place in ranks)
            names = " and ".join(str(place.rank) for place in ranks)
            needs.append((device, f"GPU {gpu} of {host}: ranks {names} need {amount(device)} together"))
    return [line for _, line in (needs if len(needs) <= FEW else [max(needs)])]


def memory(config: Config, place: Place, shape: Shape | None, n_prompt: int) -> tuple[str, str]:
    """Of one rank, in words."""
    if shape is None:
        return "unknown", "unknown"
    found = need(config, place, shape, n_prompt)
    return amount(found.device), amount(found.host)


def need(config: Config, place: Place, shape: Shape, n_prompt: int) -> Need:
    """Of one rank, its actors and its supervisor; a member needs what its generator does on the device."""
    seats = place.seats if place.member_of is None else (place.member_of,)
    needs = [estimate(config, shape, seat.role, seat.index, n_prompt=n_prompt) for seat in seats]
    host = SUPERVISOR + (0 if place.member_of else sum(need.host for need in needs))
    return Need(sum(need.device for need in needs), host)


def amount(n_bytes: int) -> str:
    """A size with the unit that suits it."""
    if n_bytes == 0:
        return "-"
    return f"{n_bytes / GIB:.3g} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.3g} MiB"
