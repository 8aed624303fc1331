"""The shipped configs: each passes a dry run, and those for GPUs state their start command."""

import re
import tomllib
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from areal_bus.config.names.gpu_memory import gib_of
from areal_bus.errors import ConfigError
from launch.commands.dry_run import dry_run, make_plan_page
from launch.commands.main import check_rank_count
from launch.plan.topology import check_gpus, min_ranks

FOLDER = Path(__file__).parents[2] / "configs"
BASES = {"paper.toml", "gpus.toml"}
FILES = [path for path in FOLDER.rglob("*.toml") if not {"sweeps", "algorithms"} & set(path.parts)]  # those are no runs
CONFIGS = sorted(path for path in FILES if str(path.relative_to(FOLDER)) not in BASES)
FOR_GPUS = sorted(FOLDER.glob("gpus-*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_be_planned_and_starts_with_its_least_number_of_ranks(file: Path) -> None:
    config = load(file, (), {})
    least = min_ranks(config.topology)
    output = dry_run(config, file, None)
    assert output.startswith(f"{least} ranks, ")
    assert "head-0 + learner-0" in output
    check_rank_count(config, least, [])


def test_a_base_config_is_marked_as_a_base() -> None:
    for name in BASES:
        assert (FOLDER / name).read_text().startswith(("# A base", "# What the four sizes")), name
    assert (FOLDER / "plan.toml").read_text().startswith("# Input of areal_lab.simulate, not a run to start")
    output = dry_run(load(FOLDER / "gpus.toml", (), {}), FOLDER / "gpus.toml", None)
    assert re.match(r"\S+/gpus.toml is a base for other configs; these extend it: .*/gpus-1.toml, ", output)
    assert "is a base" not in dry_run(load(FOLDER / "tiny.toml", (), {}), FOLDER / "tiny.toml", None), "a run, too"


@pytest.mark.parametrize("file", FOR_GPUS, ids=lambda path: path.stem)
def test_a_config_for_gpus_states_its_start_command_and_uses_every_gpu(file: Path) -> None:
    config, first = load(file, (), {}), file.read_text(encoding="utf-8").splitlines()[0]
    n_gpus = int(file.stem.split("-")[1])
    assert first.startswith("# ")
    line = f"mpirun -np {config.topology.ranks} python -m areal_bus.launch configs/{file.name}"
    assert first.endswith(f": {line}")
    assert config.run.name == file.stem
    assert config.topology.gpus_per_host == n_gpus
    output = dry_run(config, file, None)
    rows = re.findall(r"^[0-9]+ +host-0 +([0-9]+) ", output, re.MULTILINE)
    assert {int(gpu) for gpu in rows} == set(range(n_gpus)), "every GPU is used"
    assert len(rows) == (2 if n_gpus == 1 else n_gpus)
    assert "unknown" not in output


def test_a_card_of_24_gb_holds_a_7b_with_adapters_only_by_offloading() -> None:
    file = FOLDER / "lora-1gpu.toml"
    assert not make_plan_page(load(file, (), {}), file, None).is_too_large
    assert "40.4 million trained in adapters of rank 16" in dry_run(load(file, (), {}), file, None)
    for change in ("actor.offload=none", 'weights.staging="auto"'):
        assert make_plan_page(load(file, (change,), {}), file, None).is_too_large, change


def test_a_start_without_the_gpus_is_refused_with_the_host() -> None:
    check_gpus(2, ["a", "a", "b"], [(2, "2.13.0"), (2, "2.13.0"), (8, "2.13.0")])
    check_gpus(0, ["a"], [(0, "")])
    with pytest.raises(
        ConfigError, match=r"gpus_per_host = 2 needs .*: torch \(2\.13\.0\) finds 1 on b; run on a machine"
    ):
        check_gpus(2, ["a", "b"], [(2, "2.13.0"), (1, "2.13.0")])


def test_every_package_that_make_setup_installs_is_pinned_and_data_sets_are_among_them() -> None:
    """Eleven configs need datasets."""
    root = FOLDER.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    installed = re.search(r"--editable '\.\[([a-z,-]+)\]'", (root / "launch" / "setup.sh").read_text())
    assert installed is not None
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(need for extra in installed[1].split(",") for need in extras[extra])]
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (root / "constraints.txt").read_text().lower(), re.MULTILINE))
    names = {re.split(r"[<>=\[ ]", need)[0].lower() for need in wanted}
    assert "datasets" in names
    assert names - pinned == set()


@pytest.mark.parametrize(("name", "context"), [("deepscaler", [8192, 16384, 24576]), ("deepcoder", [16384, 32768])])
def test_a_config_of_stages_shows_the_memory_of_each(name: str, context: list[int]) -> None:
    file = FOLDER / f"{name}.toml"
    assert "Not run here" in file.read_text()
    output = dry_run(load(file, (), {}), file, None)
    rows = re.findall(r"^([0-9]+) +[0-9]+ +([0-9]+) +[0-9]+ +([0-9.]+) GiB.* ([0-9.]+) GiB", output, re.MULTILINE)
    assert [int(row[1]) for row in rows] == context
    assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows), (
        "more context, more keys and values"
    )
    learner, generator = max(float(row[2]) for row in rows), max(float(row[3]) for row in rows)
    assert re.search(rf"learner-0 +{learner:g} GiB", output), "the plan counts the largest stage"
    assert re.search(rf"generator-0.* {generator:g} GiB ", output)


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b", "32b", "llama-8b", "deepscaler", "deepcoder"])
def test_a_config_of_a_published_run_names_its_card_and_fits_it(size: str) -> None:
    """7b's generators, 14b's and 32b's learners did not fit cards of 80 GB."""
    file = FOLDER / f"{size}.toml"
    config = load(file, (), {})
    assert gib_of(config.topology.gpu_memory_gib) is not None
    assert not make_plan_page(config, file, None).is_too_large
