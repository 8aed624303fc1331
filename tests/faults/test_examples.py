"""Each example of examples/ as a job of five updates, with an agent's process, a generator and the head killed."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.ring import Ring

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = ("run.total_train_steps=5", "checkpoint.every_steps=2", "bus.silent_s=1.5", "evaluate.before=false",
            "evaluate.after=false")  # fmt: skip
IN_PROCESS = ("self_play/nim", "environments/frozen-lake")
START_S = 300.0  # agents import their packages


def agent_processes(ring: Ring) -> list[int]:
    """Worker processes of the generators that run an agent's code."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ring.pids()}
    return [pid for pid, command in commands.items() if b"actors.endpoint.agent_worker" in command]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("self_play/nim", ""),
        ("environments/frozen-lake", "gymnasium"),
        ("environments/openenv", "openenv"),
        pytest.param("agents/openai-agents", "agents", marks=pytest.mark.soak),
        pytest.param("agents/smolagents", "smolagents", marks=pytest.mark.soak),
    ],
)
def test_an_example_survives_the_death_of_its_agent_its_generator_and_the_head(
    tmp_path: Path, name: str, package: str
) -> None:
    if package and find_spec(package) is None:
        pytest.skip(f"the package with the module {package} is not installed")
    if package == "agents" and tuple(map(int, metadata.version("openai-agents").split(".")[:2])) < (0, 24):
        pytest.skip("an openai-agents before 0.24 does not fit this openai: InputTokensDetails needs another field")
    warmup = ["learner.warmup.steps=5"] if name.startswith("agents/") else []
    patience = [f"workflow.agent.timeout_s={START_S}"] if name not in IN_PROCESS else []
    ring = Ring(tmp_path, *SETTINGS, *warmup, *patience, ranks=3, config=EXAMPLES / f"{name}.toml")
    ring.throttle(0.02)  # so that episodes are under way when they are killed
    with ring.started():
        ring.wait_for("update", version=1, timeout_s=START_S)
        agents = agent_processes(ring)
        assert bool(agents) == (name not in IN_PROCESS)
        for pid in agents[:1]:
            ring.kill_process(pid)
        death = ring.kill("generator-0")
        ring.wait_for("member", name=death.next, state="healthy", timeout_s=START_S)
        ring.kill("head-0")
        ring.wait_for("term", n=2, timeout_s=START_S)
        ring.throttle(None)
        ring.finish(timeout_s=START_S)
    history = ring.check_survived()
    assert len(history.versions) == 5
