"""A generator whose samples come from a server: new weights in mid-sample, a lost server."""

from pathlib import Path

from areal_bus.errors import EngineLost
from areal_bus.messages import Failure, Sampled, Trajectory
from tests.servers.speaks_sglang import SpeaksSGLang, speaking
from tests.support.generator_ring import WAIT_S, Ring, prompt, ring


def sections(fake: SpeaksSGLang) -> dict[str, dict[str, object]]:
    return {"rollout": {"engine": "sglang", "max_concurrent_rollouts": 4}, "engine": {"urls": [fake.url]}}


def failed(around: Ring) -> Exception:
    """What ended the generator; its head has heard it, too."""
    around.thread.join(WAIT_S)
    assert not around.thread.is_alive()
    (error,) = around.failed
    assert around.heard(Failure).error == f"{type(error).__name__}: {error}"
    return error


def test_new_weights_reach_the_server_in_mid_sample_and_its_stamps_reach_the_head(tmp_path: Path) -> None:
    with speaking() as fake, ring(tmp_path, **sections(fake)) as around:
        around.join()
        around.push(0)
        around.tell(prompt(0))
        fake.allow(4)
        around.beat_until(lambda beat: beat.progress == 8)
        around.push(1)
        fake.allow(10)
        both: list[Trajectory] = [around.heard(Trajectory, around.reward) for _ in range(2)]
        assert [t.spans for t in both] == [[[0, 4], [1, 6]]] * 2
        assert [around.heard(Sampled).n_tokens for _ in range(2)] == [10, 10]
        around.stop()
        assert [line["version"] for line in around.journal() if line["event"] == "pushed"] == [0, 1]


def test_a_generator_ends_with_its_server_and_logs_the_reason(tmp_path: Path) -> None:
    with speaking() as fake, ring(tmp_path, **sections(fake)) as around:
        around.join()
        around.push(0)
        around.tell(prompt(0))
        fake.allow(4)
        around.beat_until(lambda beat: beat.progress == 8)
        fake.close()
        error = failed(around)
        assert isinstance(error, EngineLost)
        assert "broke off" in str(error)
