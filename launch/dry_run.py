"""What a start would do, as text: rank -> host -> GPU -> role, memory per rank, resolved settings; starts nothing."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from areal_bus.config import Config
from areal_bus.messages import Role
from launch.explain import as_toml
from launch.memory import GIB, Shape, estimate, find_shape
from launch.resume import preview
from launch.topology import Place, dry_hosts, least_ranks, plan

FORMULA = (
    "memory: learner = 16 bytes a parameter (float32: itself, gradient, two AdamW moments) / learners, and a single\n"
    "one in bfloat16 its rounded parameters; learner 0 also two snapshots in host memory; generator = (weights + keys\n"
    "and values of all slots at full length) / tensor_parallel, and the weights once more where it receives.\n"
    "Activations, layers that FSDP gathers and libraries come on top. All but the learner's are in model.dtype."
)
FEW = 16  # up to so many ranks each has its own line


def dry_run(config: Config, file: Path, size: int | None) -> str:
    """The whole page. `size` None: the number of ranks the file is written for, or the fewest. Raises ConfigError."""
    resumed = preview(config, file)
    size = size or least_ranks(config.topology)
    places = plan(config.topology, dry_hosts(config.topology, size))
    shape = find_shape(config, file.resolve().parent)
    rows = [("ranks", "host", "GPU", "role", "device memory", "host memory"), *table(config, places, shape)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    model = config.model.path or "[model.scratch]"
    known = (
        f"{shape.n_parameters / 1e6:,.0f} million parameters" if shape else "shape unknown: it has no config.json here"
    )
    parts = [f"{size} ranks, {len({p.host for p in places})} host(s); model {model} ({known})", *lines, "", FORMULA, ""]
    return "\n".join([*resumed, *parts, as_toml(config)])


def table(config: Config, places: Sequence[Place], shape: Shape | None) -> list[tuple[str, ...]]:
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
                *memory(config, first, shape),
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


def memory(config: Config, place: Place, shape: Shape | None) -> tuple[str, str]:
    """Of one rank, summed over its actors; a member needs what its generator's first rank does on the device."""
    if shape is None:
        return "unknown", "unknown"
    seats = place.seats if place.member_of is None else (place.member_of,)
    needs = [estimate(config, shape, seat.role, seat.index) for seat in seats]
    device = sum(need.device for need in needs)
    host = 0 if place.member_of else sum(need.host for need in needs)
    return amount(device), amount(host)


def amount(n_bytes: int) -> str:
    """A size with the unit that suits it."""
    if n_bytes == 0:
        return "-"
    return f"{n_bytes / GIB:.3g} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.3g} MiB"
