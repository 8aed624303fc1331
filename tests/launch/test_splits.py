"""Which actor each rank runs in each split of ranks, and how a supervisor follows a change."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.process import RESTART
from areal_bus.config.adapt import AdaptSettings
from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.core.parts.split import RankPool, Split
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.messages import Role
from areal_bus.storage import run_files
from launch.plan.seats import (
    Seat,
    all_places,
    first_split,
    most_generators,
    plan_ranks,
    present_context,
    rank_pool,
    seat_of,
)
from launch.plan.topology import ActorId
from launch.run.supervise import SupervisorTimes
from tests.launch.test_supervise import READ, WAIT, context, make

POOL = RankPool(1, 3)


def topology(*steps: tuple[int, int], **changes: object) -> TopologyConfig:
    return TopologyConfig.model_validate({"adapt": AdaptSettings(schedule=steps), **changes})


@given(
    learners=st.integers(1, 3),
    wanted=st.integers(1, 5),
    width=st.integers(1, 2),
    generators=st.integers(1, 4),
    reward=st.sampled_from(["rank", "beside"]),
    on_gpu=st.booleans(),
)
def test_in_every_split_each_actor_has_one_rank_and_its_seat_agrees(
    learners: int, wanted: int, width: int, generators: int, reward: str, on_gpu: bool
) -> None:
    size = learners + generators * width + (reward == "rank")
    plan = topology(
        (1, wanted), learners=learners, tensor_parallel=width, reward=reward, gpus_per_host=size if on_gpu else 0
    )
    hosts, pool = ["a"] * size, rank_pool(plan, size)
    if pool.refusal(wanted) or pool.refusal(learners):
        with pytest.raises(ConfigError, match=r"topology\.adapt\.schedule: "):
            plan_ranks(plan, hosts)
        return
    for n in (learners, wanted):
        split = Split(n, pool.generators_at(n))
        places = plan_ranks(plan, hosts, learners=n)
        actors = [actor for place in places for actor in place.actors]
        assert Counter(actor.role for actor in actors) == {
            Role.HEAD: 1, Role.LEARNER: n, Role.REWARD: 1, Role.GENERATOR: split.generators
        }  # fmt: skip
        assert len(set(actors)) == len(actors)
        assert places[0].actors == (ActorId(Role.HEAD, 0), ActorId(Role.LEARNER, 0))
        for place in places:
            seat = seat_of(place.rank, plan, hosts)
            found = next((x for x in place.actors if x.role in (Role.LEARNER, Role.GENERATOR)), None)
            assert (None if seat is None else seat.actor(split)) == found
            if seat is not None and found is not None and on_gpu:
                assert seat.gpus(found.role) == place.gpus
                assert len(place.gpus) == (width if found.role is Role.GENERATOR else 1)
    assert most_generators(plan, size) == pool.generators


def test_a_rank_that_changes_may_be_authenticated_in_both_roles() -> None:
    names = {str(actor) for place in all_places(topology((3, 2)), ["a"] * 5) for actor in place.actors}
    assert names >= {"learner-0", "learner-1", "learner-2", "generator-0", "generator-1", "generator-2"}


def test_a_resumed_run_goes_on_with_its_split_while_its_ranks_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(topology=topology((3, 2)))
    assert Split(**first_split(config, tmp_path, 5)) == Split(1, 3)
    run_files.write_split(tmp_path, POOL, Split(2, 2, 1, 3))
    assert Split(**first_split(config, tmp_path, 5)) == Split(2, 2, 1, 3)
    assert "goes on with the split of version 3: 2 learners, 2 generators" in capsys.readouterr().out
    assert Split(**first_split(config, tmp_path, 6)) == Split(1, 4, 2)
    assert "other ranks than before, so the split of the settings holds" in capsys.readouterr().out
    run_files.write_split(tmp_path, POOL, Split(3, 1, 4, 9))
    assert Split(**first_split(config, tmp_path, 5)) == Split(1, 3, 5)
    assert (
        "3 learners, 1 generator are no longer allowed, so the split of the settings holds" in capsys.readouterr().out
    )
    (tmp_path / run_files.SPLIT).write_text("{")
    assert Split(**first_split(Config(), tmp_path, 5)) == Split(1, 3)
    assert run_files.read_split(tmp_path) is None


def test_a_planner_goes_on_with_each_split_that_it_may_choose(tmp_path: Path) -> None:
    config = Config(topology=TopologyConfig(adapt=AdaptSettings(every_steps=5)))
    run_files.write_split(tmp_path, POOL, Split(3, 1, 4, 9))
    assert first_split(config, tmp_path, 5)["learners"] == 3


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / run_files.SPLIT).write_text('{"pool": {"learners": 1}, "le')
    with pytest.raises(CheckpointError, match=run_files.SPLIT):
        run_files.read_split(tmp_path)


def test_a_supervisor_starts_the_actor_of_the_new_split_and_counts_no_crash(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`max_restarts` is 0, so a counted crash would end the rank. The generator changes the split and ends. The learner
    that follows changes it back and exits with 1. The next generator ends the run.
    """
    report = (
        READ + "x = json.loads(line); print(x['role'], x['index'], x['incarnation'], x['n_learners'], flush=True); "
    )
    change = (
        "from pathlib import Path; from areal_bus.core.parts.split import RankPool, Split; "
        "from areal_bus.storage import run_files; run = Path(x['run_folder']); "
        "later = x['role'] == 'learner'; "
        "run_files.write_split(run, RankPool(1, 3), Split(1, 3, 2, 5) if later else Split(2, 2, 1, 3)); "
    )
    end = "(run / 'summary.json').write_text('{\"code\": 0}') if x['incarnation'] == 2 else None; "
    code = report + change + end + f"sys.exit(1 if later else {RESTART})"
    run_files.write_split(tmp_path, POOL, Split(1, 3))
    supervisor = make(run=tmp_path)
    supervisor.seat = Seat(1, 2)
    supervisor.command = [sys.executable, "-c", code]
    supervisor.start(context(index=2, role="generator", run=tmp_path))
    assert supervisor.wait() == 0
    out, err = capfd.readouterr()
    assert out.split("\n")[:3] == ["generator 2 0 1", "learner 1 1 2", "generator 2 2 1"]
    assert "(generator-2): runs learner-1 from now on" in err


def test_an_older_file_than_the_split_of_an_actor_does_not_move_it(tmp_path: Path) -> None:
    """A network file system may show the file late."""
    run_files.write_split(tmp_path, POOL, Split(2, 2, 1, 3))
    started = [replace(context(index=2, role="generator", run=tmp_path), split=split) for split in (0, 1, 2)]
    found = [present_context(one, Seat(1, 2)) for one in started]
    assert [(one.role, one.index) for one in found if one is not None] == [
        ("learner", 1),
        ("learner", 1),
        ("generator", 2),
    ]


def test_an_actor_that_does_not_end_for_the_new_split_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_files.write_split(tmp_path, POOL, Split(2, 2, 1, 3))
    supervisor = make(run=tmp_path, times=SupervisorTimes(poll_s=0.05, reassign_s=0.1, over_s=0.1))
    supervisor.seat = Seat(1, 2)
    over = f"open({str(tmp_path / 'summary.json')!r}, 'w').write('{{\"code\": 0}}') if inc else None; "
    supervisor.command = [sys.executable, "-c", WAIT.replace("sys.stdin.read()", over + "sys.stdin.read()")]
    supervisor.start(context(index=2, role="generator", run=tmp_path))
    assert supervisor.wait() == 0
    assert "generator-2.0 does not end for the new split: it is killed" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["{", None])
def test_a_parked_rank_stays_parked_when_the_split_file_is_damaged_or_missing(tmp_path: Path, text: str | None) -> None:
    """A damaged file, or none."""
    if text is not None:
        (tmp_path / run_files.SPLIT).write_text(text)
    supervisor = make(run=tmp_path)
    supervisor.seat = Seat(2, None)
    supervisor.park(context(index=2, role="learner", run=tmp_path))
    (actor,) = supervisor.actors
    assert not supervisor._take_seat(actor)
    assert actor.is_parked


def test_a_rank_that_only_gives_its_gpu_waits_until_it_learns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_files.write_split(tmp_path, RankPool(1, 2, 2), Split(3, 1, 1, 2))
    supervisor = make(run=tmp_path)
    supervisor.seat = Seat(2, None)
    code = READ + "x = json.loads(line); print(x['role'], x['index'], flush=True); "
    code += f"open({str(tmp_path / 'summary.json')!r}, 'w').write('{{\"code\": 0}}')"
    supervisor.command = [sys.executable, "-c", code]
    supervisor.park(context(index=2, role="learner", run=tmp_path))
    assert supervisor.wait() == 0
    assert capfd.readouterr().out == "learner 2\n"
    assert json.loads((tmp_path / run_files.SPLIT).read_text())["learners"] == 3
