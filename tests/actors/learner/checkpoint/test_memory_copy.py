"""A copy of a learner's state in memory is whole or does not count, and is made as often as it costs little."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.actor import Learner
from actors.learner.checkpoint import memory_copy
from actors.learner.checkpoint.memory_copy import ALWAYS_S, CopyMemory, MemoryCopies, available_bytes
from areal_bus.errors import Restart
from areal_bus.storage.journal import Journal
from tests.support.learner_setup import RESUMED, check_equal_states, resumed_config, tiny_actor, train, weights
from tests.support.learner_setup import settings as config_of

OWNER = "job 0 0/1"


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


class Killed(BaseException):
    """The process ends here."""


def state(version: int) -> dict[str, Tensor]:
    """Sizes that are no multiples of a word, an empty piece, a number, and more than the buffer holds."""
    numbers = torch.Generator().manual_seed(version)
    return {
        "odd": torch.randint(0, 255, (version % 7 + 3,), dtype=torch.uint8, generator=numbers),
        "empty": torch.zeros(0, 3),
        "step": torch.tensor(float(version)),
        "half": torch.randn(5, 3, generator=numbers).bfloat16(),
        "large": torch.randn(100, 40, generator=numbers),
    }


def write_and_die(memory: CopyMemory, version: int, after: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Write a copy; the process is killed after so many bytes. Returns whether the copy was finished before."""
    real, left = os.pwrite, [after]

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        part = memoryview(data)[: left[0]]
        left[0] -= real(descriptor, part, at) if len(part) else 0
        if len(part) < len(memoryview(data)):
            raise Killed
        return len(part)

    with monkeypatch.context() as patch:
        patch.setattr(memory_copy.os, "pwrite", pwrite)
        try:
            memory.write(version, state(version), {"owner": OWNER, "max_lag": version})
        except Killed:
            return False
    return True


WRITES = st.lists(st.one_of(st.none(), st.integers(0, 18_000)), max_size=7)  # None: to the end


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=WRITES, damage=st.one_of(st.none(), st.tuples(st.sampled_from(["cut", "flip"]), st.integers(0, 16_000))))
def test_the_last_whole_copies_are_found_whatever_was_torn(
    monkeypatch: pytest.MonkeyPatch, writes: list[int | None], damage: tuple[str, int] | None
) -> None:
    """Each write may end at any byte; then a byte of the newest copy may change, or its end be lost."""
    monkeypatch.setattr(memory_copy, "BUFFER_BYTES", 4096)
    descriptor, whole = os.memfd_create("test"), [0, 0]  # versions, by slot; 0: none
    try:
        for version, after in enumerate(writes, start=1):
            memory = CopyMemory(descriptor)  # as the next process does
            found = memory.copies()
            if found:
                memory.go_on_from(found[0])
            slot = (whole.index(max(whole)) + 1) % 2 if max(whole) else 1
            whole[slot] = 0
            is_done = write_and_die(memory, version, 10**9 if after is None else after, monkeypatch)
            whole[slot] = version if is_done else 0
        memory = CopyMemory(descriptor)
        if damage is not None and max(whole):
            slot = whole.index(max(whole))
            if spoil(descriptor, memory.copies()[0].at, *damage):
                whole[slot] = 0
        found = memory.copies()
        assert [copy.version for copy in found] == sorted((v for v in whole if v), reverse=True)
        for copy in found:
            expected = state(copy.version)
            targets = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
            memory.load(copy, targets)
            assert all(torch.equal(targets[key], expected[key]) for key in expected)
            assert copy.about["max_lag"] == copy.version
    finally:
        os.close(descriptor)


def spoil(descriptor: int, at: int, how: str, offset: int) -> bool:
    """Change a byte of the tensors, or cut the file there where it ends with them. Whether that was possible."""
    size = os.fstat(descriptor).st_size
    if how == "flip":
        (byte,) = os.pread(descriptor, 1, at + offset)
        os.pwrite(descriptor, bytes([byte ^ 1]), at + offset)
        return True
    if size > at + 20_000 or size <= at + offset:  # the other slot follows
        return False
    os.ftruncate(descriptor, at + offset)
    return True


def copies(memory: int, folder: Path, **how: Any) -> MemoryCopies:
    journal = Journal(folder / "copies", role="learner", index=0, incarnation=0)
    return MemoryCopies(memory, owner=OWNER, journal=journal, **({"used": lambda: 0.0} | how))


@pytest.mark.parametrize("kind", [*RESUMED, "reference"])
def test_an_actor_from_a_copy_trains_on_bit_equal(tmp_path: Path, memory: int, kind: str) -> None:
    config = (
        resumed_config(kind) if kind in RESUMED else config_of(actor={"kl_ctl": 0.1}, reference={"update_every": 2})
    )
    first = tiny_actor(tmp_path / "first", config)
    keeper = copies(memory, tmp_path / "first")
    keeper.begin(first)
    for _ in range(3):
        train(first, range(first.version, first.version + 1))
        assert keeper.keep(first, 2)
    again = tiny_actor(tmp_path / "again", config)
    heir = copies(memory, tmp_path / "again")
    assert heir.versions == [2, 3]
    assert heir.restore(again, 3) == 2
    assert again.version == 3
    check_equal_states(first, again)
    for actor in (first, again):
        torch.manual_seed(0)  # no copy has it: dropout draws anew
        train(actor, range(3, 4))
    check_equal_states(first, again)


def test_a_copy_that_not_all_ranks_have_is_dropped_by_the_one_that_has_it(tmp_path: Path, memory: int) -> None:
    """Later it would pass for one of the timeline that began before it."""
    actor, keeper = tiny_actor(tmp_path / "first"), copies(memory, tmp_path / "first")
    for _ in range(2):
        train(actor, [actor.version])
        keeper.keep(actor, None)
    back = tiny_actor(tmp_path / "back")
    copies(memory, tmp_path / "back").restore(back, 1)
    assert copies(memory, tmp_path / "next").versions == [1]


def test_copies_of_another_rank_or_job_are_not_offered(tmp_path: Path, memory: int) -> None:
    actor = tiny_actor(tmp_path / "first")
    copies(memory, tmp_path / "first").keep(actor, None)
    journal = Journal(tmp_path / "other", role="learner", index=0, incarnation=1)
    assert MemoryCopies(memory, owner="job 1 0/2", journal=journal).versions == []


def test_a_copy_of_another_model_is_dropped_and_the_learner_goes_back_to_its_checkpoint(
    tmp_path: Path, memory: int
) -> None:
    copies(memory, tmp_path / "first").keep(tiny_actor(tmp_path / "first"), None)
    lora = tiny_actor(tmp_path / "lora", config_of(actor={"lora": {"rank": 2}}))
    learner: Any = SimpleNamespace(copies=copies(memory, tmp_path / "lora"), actor=lora)
    with pytest.raises(Restart):  # a CheckpointError would end the job
        Learner._restore_copy(learner, 0)
    assert copies(memory, tmp_path / "next").versions == []


def test_copies_take_two_percent_of_the_time_unless_they_are_short(tmp_path: Path, memory: int) -> None:
    clock, cost = [0.0], [1.0]

    def used() -> float:
        clock[0] += cost[0] / 2  # it is read before and after a copy
        return clock[0]

    actor = tiny_actor(tmp_path / "first")
    keeper = copies(memory, tmp_path / "first", now=lambda: clock[0], used=used)
    made = []
    for second in range(200):
        clock[0] += 1.0
        if keeper.keep(actor, None):
            made.append(second)
    assert 3 <= len(made) <= 10  # 50 seconds from one to the next, of this clock, which each check moves on
    cost[0] = ALWAYS_S
    clock[0] += 60.0
    assert [keeper.keep(actor, None) for _ in range(3)] == [True] * 3


def test_no_copy_is_made_without_memory(tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = tiny_actor(tmp_path / "first")
    need = 2 * 12 * sum(tensor.numel() for tensor in weights(actor.policy).values())
    for available, is_held in ((int(3.9 * need), False), (5 * need, True)):
        monkeypatch.setattr(memory_copy, "available_bytes", lambda n=available: n)
        keeper = copies(memory, tmp_path / f"{available}")
        keeper.begin(actor)
        assert keeper.keep(actor, None) is is_held


def test_a_full_memory_ends_the_copies_and_not_the_training(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, keeper = tiny_actor(tmp_path / "first"), copies(memory, tmp_path / "first")
    assert keeper.keep(actor, None)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(memory_copy.os, "pwrite", refuse)
    assert not keeper.keep(actor, None)
    assert os.fstat(memory).st_size == 0
    assert copies(memory, tmp_path / "next").versions == []


def test_the_available_memory_is_that_of_the_control_group_if_it_has_less(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n", encoding="utf-8")

    def available(mounted: str, limits: dict[str, str]) -> int:
        """`mounted`: where the limits are, below the folder of all groups."""
        groups = tmp_path / f"groups of {mounted} {len(limits)}"
        (groups / mounted).mkdir(parents=True)
        for name, text in limits.items():
            (groups / mounted / name).write_text(text + "\n", encoding="utf-8")
        return available_bytes(tmp_path, groups)

    v2 = {"memory.max": "3000000", "memory.current": "2500000", "memory.stat": "inactive_file 300000"}
    v1 = {"memory.limit_in_bytes": "3000000", "memory.usage_in_bytes": "2600000"}
    v1["memory.stat"] = "inactive_file 5\ntotal_inactive_file 100000"
    (tmp_path / "self/cgroup").write_text("5:devices:/\n4:memory:/docker/9\n0::/slurm/job_1/step_0\n", encoding="utf-8")
    assert available("elsewhere", v2) == 4000 << 10
    for mounted in ("slurm/job_1/step_0", "slurm/job_1", ""):  # the job's limit, a container's
        assert available(mounted, v2) == 800_000
    for mounted in ("memory/docker/9", "memory"):
        assert available(mounted, v1) == 500_000
    assert available("slurm", v2 | {"memory.max": "max"}) == 4000 << 10
