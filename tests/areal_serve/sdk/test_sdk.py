import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_bus.process.isolation import ROOT
from areal_serve.front import API, NOT_SERVED, Front
from areal_serve.registry import Registry
from areal_serve.samplers import Samplers
from tests.areal_serve.processes import serving
from tools.report.facts.run_facts import read_facts
from tools.run import Run

pytestmark = [pytest.mark.tinker, pytest.mark.slow]

SDK = ROOT / ".venv-tinker" / "bin" / "python"
PROGRAM_S = 900


def program(name: str, server: dict[str, str], *words: str, most_s: float = PROGRAM_S) -> Any:
    """What a program of the SDK prints."""
    variables = {key: value for key, value in server.items() if key.startswith("TINKER")} | {
        "TINKER_PROJECT_ID": "project"
    }
    command = [str(SDK), str(Path(__file__).parent / f"program_{name}.py"), *words]
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=most_s, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(
        tmp_path_factory.mktemp("tiny"), "configs/tiny.toml", "-np", "3", "--set", "serve.save_every=3"
    ) as server:
        yield server


def test_every_public_method_is_served_or_listed(tiny: dict[str, str]) -> None:
    found = program("methods", tiny)
    assert found["missing"] == []
    assert found["loss"][1] < found["loss"][0]
    assert found["sum"][0] == pytest.approx(found["sum"][1], rel=1e-5)
    assert found["norms"] == pytest.approx([found["norms"][0]] * 3, rel=1e-5)
    assert found["same"][0] == found["same"][1]
    assert found["logps"][0] == pytest.approx(found["logps"][1], abs=1e-5)
    assert found["learner"] == pytest.approx(found["logps"][1], abs=1e-5)
    assert found["shapes"] == [4, 6, [3, 2]]
    assert found["alternatives"] == [3, 2]
    assert found["base"][1] is True
    assert found["inflight"] == [False, True]
    assert found["handle"] is True
    assert found["loaded"] == [found["loaded"][0]] * 3
    assert found["checkpoints"] == ["sampler_weights/two", "weights/one"]
    assert found["info"] == [True, 4]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert found["downloads"] == [True, True]
    assert found["left"] == 0
    assert found["whole_is_lora"] is False
    assert all("not served" in error for error in found["refused"].values()), found["refused"]


def test_sdk_asks_for_no_path_that_is_unknown(tmp_path: Path) -> None:
    folder = next((ROOT / ".venv-tinker" / "lib").glob("python3*/site-packages/tinker"))
    asked: set[str] = set()
    for file in folder.rglob("*.py"):
        if not file.stem.endswith("_test") and "cli" not in file.relative_to(folder).parts:
            asked |= {
                re.sub(r"\{[^}]*\}", "{}", path) for path in re.findall(r'f?"(/api/v1/[^"`]*)"', file.read_text())
            }
    front = Front(
        Registry(tmp_path, save_every=1, to_trainer=print), Samplers(), key="k", name="n", context=1, tokenizer="t"
    )
    known = {resource.canonical for resource in front.app.router.resources()} | {API + path for path in NOT_SERVED}
    plain = {re.sub(r"\{[^}]*\}", "{}", path).replace("{}/{}/publish", "{}/publish") for path in known}
    plain |= {path.replace("checkpoints/{}/{}", "checkpoints/{}") for path in plain}  # an id is KIND/NAME
    assert asked
    assert asked <= plain


ROLES = ["trainer", "sampler", "front", "trainer", "front", "sampler"]
MANY = random.Random(1).sample(["front", "trainer", "sampler", "trainer", "sampler"] * 4, 20)


@pytest.mark.parametrize(
    ("n_updates", "roles"),
    [(24, ROLES), pytest.param(60, MANY, marks=pytest.mark.soak)],
    ids=["six-kills", "twenty-kills"],
)
def test_kills_of_every_process_change_no_bit_and_no_figure_of_the_journal(
    tmp_path: Path, n_updates: int, roles: list[str]
) -> None:
    with serving(tmp_path, "configs/tiny.toml", "-np", "3", "--set", "serve.save_every=7") as server:
        calm = program("kills", server, server["RUN"], f"{n_updates}")
        found = program("kills", server, server["RUN"], f"{n_updates}", *roles, most_s=4 * PROGRAM_S)
        facts = read_facts(Run(Path(server["RUN"])))
    assert found == calm | {"kills": len(roles)}
    for client in facts.clients.of.values():
        assert (client.n_steps, client.n_passes, client.n_errors) == (n_updates, n_updates, 0)
    assert facts.incidents.n_of["restart"] == roles.count("front")


NAMED = Path("Qwen", "Qwen3-4B-Instruct-2507")  # a model that the cookbook knows; its turns are those of SmolLM2


def recipe(name: str, server: dict[str, str], folder: Path, *words: str) -> list[dict[str, Any]]:
    """The metrics of each step of a recipe of the cookbook, unmodified. `folder`: it looks there for files."""
    log = folder / f"log-{name}"
    command = [str(SDK), "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAMED}", f"log_path={log}"]
    variables = {key: value for key, value in server.items() if key.startswith("TINKER")}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    words = (f"base_url={server['TINKER_BASE_URL']}", *words)
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=PROGRAM_S, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_recipe_of_the_cookbook_learns_sums(tmp_path: Path) -> None:
    """Its `sl_loop`, with a data set of ours in place of the downloaded one."""
    model = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip("needs SmolLM2: make model")
    for place in (NAMED.parent, Path("HuggingFaceH4", "no_robots")):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / NAMED).symlink_to(model)
    rows = [(a, b) for a in range(10) for b in range(10)]
    asked = [[("user", f"What is {a}+{b}?"), ("assistant", str(a + b))] for a, b in rows]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) for turns in asked]
    (tmp_path / "HuggingFaceH4/no_robots/train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with serving(tmp_path, "configs/demo.toml", "--set", f"model.path={tmp_path / NAMED}") as server:
        steps = recipe("sl_loop", server, tmp_path, "batch_size=8", "max_steps=4", "learning_rate=4e-4")
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0], losses


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """A server of a model that answers half of some sums right, and its folder: with these sums as GSM8K."""
    folder = tmp_path_factory.mktemp("warmed")
    command = [sys.executable, "-m", "tests.areal_serve.sdk.warmed_model", str(folder / NAMED)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(folder / "openai/gsm8k")], check=True, cwd=ROOT, env=variables)
    sizes = ("rollout.max_concurrent_rollouts=256", "learner.max_tokens_per_mb=16384")
    words = [word for setting in (f"model.path={folder / NAMED}", *sizes) for word in ("--set", setting)]
    with serving(folder, "configs/demo.toml", *words) as server:
        yield server, folder


RECIPES = {
    "rl_loop": "batch_size=25 group_size=8",
    "math_rl.train": "env=gsm8k groups_per_batch=25 group_size=8",
    "rl_basic": f"""dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder
        dataset_builder.model_name_for_tokenizer={NAMED} dataset_builder.renderer_name=qwen3_instruct
        dataset_builder.batch_size=25 dataset_builder.group_size=8""",
}


@pytest.mark.parametrize("name", RECIPES)
def test_reward_of_a_recipe_of_the_cookbook_rises(warmed: tuple[dict[str, str], Path], name: str) -> None:
    common = ("learning_rate=2e-3", "max_tokens=8", "max_steps=16")
    steps = recipe(name, *warmed, *common, *RECIPES[name].split())
    rewards = [step["reward/total" if name == "rl_loop" else "env/all/reward/total"] for step in steps]
    assert len(rewards) == 16
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
