"""Checkpoints of several ranks load at any number of ranks, and one that a dead rank left is whole or not there."""

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.learner.checkpoint import checkpoint, shards
from actors.learner.checkpoint.checkpoint import PendingCheckpoint
from actors.learner.checkpoint.model_part import ModelPart
from actors.learner.checkpoint.shards import ShardReader
from actors.learner.link.rendezvous import LearnerRanks, part
from actors.learner.model.policy import whole
from actors.learner.update.ppo import PPOActor
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.errors import CheckpointError
from areal_bus.storage import versioned_dirs
from tests.support.forked_ranks import met, run_ranks
from tests.support.learner_setup import (
    NoTokenizer,
    begun_at,
    random_shard,
    save,
    settings,
    tiny_actor,
    update,
)
from tools.offline.save_hf import save_hf

CHAIN = ((2, 1), (4, 2), (3, 1), (1, 1))  # (ranks, copies of the model)
MASTERS, LORA, MUON = "masters", "lora", "muon"
KINDS = (MASTERS, LORA, MUON)


def config_of(kind: str) -> Config:
    """MASTERS: weights are pushed in bfloat16, and there is a critic. LORA: adapters with dropout. MUON:
    Muon and AdamW.
    """
    if kind == MUON:
        return settings(actor={"lr": 1e-3, "optimizer": "muon", "adamw_lr": 1e-4, "weight_decay": 0.1})
    if kind == LORA:
        return settings(
            actor={"lr": 1e-3, "lora": {"rank": 4, "variant": ["dora"], "target_modules": {"q_proj": 2, "up_proj": 4}}}
        )
    return settings(model={"scratch": {}, "dtype": "bfloat16"}, actor={"lr": 1e-3, "advantage": "gae"})


def link_of_the_chain(index: int, endpoint: str, size: int, replicas: int, number: int, folder: str) -> None:
    """One rank: restore what the link before has written, compare, train a step and save."""
    ranks = met(index, endpoint, size, replicas)
    found = {}
    for kind in KINDS:
        home = Path(folder) / kind
        before = home / "checkpoints" / f"step-{number:06d}" if number else None
        actor = begun_at(home / f"{number}-{index}", config_of(kind), before, ranks=ranks)
        begun = fingerprint(actor)
        drawn = [item for item in random_shard(number, clock=number, n_groups=4) if item.group % size == index]
        update(actor, drawn)
        words = load_tokenizer(str(Path(folder) / "scratch"))
        save(actor, home / "checkpoints", tokenizer=words, keep=len(CHAIN))
        found[kind] = [begun, fingerprint(actor)]
    if index == 0:
        (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    part()


def fingerprint(actor: PPOActor) -> str:
    """Hash of all weights, optimizer states and this rank's random state. A collective when sharded."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    pairs = [(actor.policy, actor.optimizer)]
    pairs += [] if actor.critic is None else [(actor.critic.model, actor.critic.optimizer)]
    for model, optimizer in pairs:
        for name, parameter in sorted(model.parameters().items()):
            state: dict[str, Tensor] = {"": parameter.detach(), **optimizer.state.get(parameter, {})}
            for kind in sorted(state):
                digest.update(f"{name} {kind}".encode())
                digest.update(whole(state[kind]).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_a_checkpoint_loads_bit_for_bit_at_another_number_of_ranks_and_copies(tmp_path: Path) -> None:
    """2 -> 4 (two copies) -> 3, which do not divide the rows -> 1; weights, adapters, a critic, two optimizers in
    one.
    """
    write_scratch_folder(tmp_path / "scratch", ScratchConfig())
    links = [
        {"size": size, "replicas": replicas, "number": number, "folder": str(tmp_path)}
        for number, (size, replicas) in enumerate(CHAIN)
    ]
    run_ranks(__name__, link_of_the_chain.__name__, *links)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(len(CHAIN))]
    for kind in KINDS:
        for number in range(1, len(CHAIN)):
            assert found[number][kind][0] == found[number - 1][kind][1], (kind, CHAIN[number])
            assert found[number][kind][1] != found[number][kind][0]
    for number, (size, _) in enumerate(CHAIN):
        folder = tmp_path / MASTERS / "checkpoints" / f"step-{number + 1:06d}"
        checkpoint.verify(folder)
        assert len(list((folder / "shards").iterdir())) == len(list((folder / "model").glob("*.safetensors"))) == size
        save_hf(folder, tmp_path / f"hf-{number}", dtype="float32")
        exact = load_model(str(tmp_path / f"hf-{number}"), "float32", "cpu")
        rounded = load_model(str(folder / "model"), "float32", "cpu")
        reader = ShardReader(folder)
        for (name, weight), other in zip(exact.named_parameters(), rounded.parameters(), strict=True):
            master = torch.empty_like(weight)
            reader.load({f"policy/master/{name}": master})
            assert torch.equal(weight, master)
            assert torch.equal(weight.bfloat16().float(), other)


def staged_keys(kinds: list[str], index: int) -> set[str]:
    """What rank `index` of two copies writes of a state in this order."""
    dist.init_process_group("fake", store=FakeStore(), rank=index, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        state = {kind: DTensor.from_local(torch.ones(4), mesh, [Replicate(), Shard(0)]) for kind in kinds}
        return set(shards.stage_shard(state, index=index, size=2, replicas=2, copies=True).tensors)
    finally:
        dist.destroy_process_group()


def test_each_piece_is_written_once_whatever_the_order_of_a_ranks_state() -> None:
    """A resumed rank has the order in which the file system lists the shards."""
    kinds = ["policy/exp_avg/weight", "policy/exp_avg_sq/weight"]
    first, second = staged_keys(kinds, 0), staged_keys(kinds[::-1], 1)
    assert first | second == set(kinds)
    assert not first & second


class Death(BaseException):
    """Stands for SIGKILL: the rank does nothing more."""


N_RANKS = 3


class Deaths:
    """Ends the thread of one rank at one of its syncs, renames or words to the store."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at
        self.n = 0

    def look(self) -> None:
        if threading.current_thread().name == f"rank-{self.rank}":
            self.n += 1
            if self.n > self.at:
                raise Death


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_actor(tmp_path_factory.mktemp("actor")).policy


def pending(folder: Path, version: int, index: int, store: HashStore, policy: Any) -> PendingCheckpoint:
    """A rank's part of a checkpoint of one tensor of state and two weights a rank."""
    final = versioned_dirs.place(folder, version)
    key = "policy/exp_avg/weight"
    named = sorted(policy.parameters())[2 * index : 2 * index + 2]
    weights = {name: policy.parameters()[name].detach() + version for name in named}
    file = f"model-{index + 1:05d}-of-{N_RANKS:05d}.safetensors"
    return PendingCheckpoint(
        final=final,
        version=version,
        number=version,
        ranks=LearnerRanks(index, N_RANKS, store=store),
        building=versioned_dirs.temporary_of(final),
        shard=shards.Shard({key: torch.full((2, 4), version)}, {key: [2 * index, 0]}, f"shards/{index}.safetensors"),
        models=[ModelPart("model", policy, index == 0, file, weights)],
        tokenizer=NoTokenizer(),
        prune=lambda: versioned_dirs.prune(folder, 1, newest=final, counts=lambda _: True),
    )


def write_all(folder: Path, version: int, policy: Any) -> list[str]:
    """All ranks write, each on a thread; how each ended."""
    building = versioned_dirs.building(versioned_dirs.place(folder, version))
    for name in ("shards", "model"):
        (building / name).mkdir()
    store, ends = HashStore(), [""] * N_RANKS

    def write(index: int) -> None:
        try:
            pending(folder, version, index, store, policy).write()
            ends[index] = "written"
        except CheckpointError as error:
            ends[index] = str(error)
        except Death:
            ends[index] = "dead"

    threads = [threading.Thread(target=write, args=(i,), name=f"rank-{i}") for i in range(N_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def check_whole(folder: Path) -> int:
    """The newest version. All of it is there, and all of one before it that was not removed yet."""
    versioned_dirs.tidy(folder)
    found = versioned_dirs.versions(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(path.name for path in found.values())
    for version, path in found.items():
        checkpoint.verify(path)
        state = torch.zeros(2 * N_RANKS, 4, dtype=torch.int64)
        ShardReader(path).load({"policy/exp_avg/weight": state})
        assert bool((state == version).all())
        index = json.loads((path / "model" / "model.safetensors.index.json").read_text())
        assert len(index["weight_map"]) == 2 * N_RANKS
    return max(found)


@pytest.mark.slow
@examples(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rank=st.integers(0, N_RANKS - 1), at=st.integers(0, 22))
def test_a_rank_that_dies_at_any_point_leaves_the_new_checkpoint_whole_or_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, policy: Any, rank: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    deaths = Deaths(rank, at)
    with pytest.MonkeyPatch.context() as patched:
        assert write_all(folder, 1, policy) == ["written"] * N_RANKS
        assert check_whole(folder) == 1
        patched.setattr(shards, "TIMEOUT_S", 0.15)
        patched.setattr(shards, "POLL_S", 0.002)
        for owner, name in ((os, "fsync"), (Path, "rename"), (shards, "_store")):
            patched.setattr(owner, name, before(getattr(owner, name), deaths))
        ends = write_all(folder, 2, policy)
    assert (ends[rank] == "dead") == (deaths.n > at)
    version = check_whole(folder)
    others = [end for index, end in enumerate(ends) if index != rank]
    if version == 1:
        assert all("cannot write the checkpoint" in end for end in others), (
            "a rank reports a checkpoint as written that is not whole"
        )
    if rank != 0:
        assert (version == 2) == (ends[0] == "written")
    assert write_all(folder, 3, policy) == ["written"] * N_RANKS
    assert check_whole(folder) == 3


def before(real: Any, deaths: Deaths) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        deaths.look()
        return real(*args, **kwargs)

    return wrapped


def test_a_disk_that_one_rank_cannot_write_to_is_reported_by_all(tmp_path: Path, policy: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        real = shards.Shard.write

        def full(self: shards.Shard, building: Path) -> Any:
            if self.file == "shards/1.safetensors":
                raise OSError("no space left on device")
            return real(self, building)

        patched.setattr(shards.Shard, "write", full)
        ends = write_all(tmp_path, 1, policy)
    assert all("step-000001 (rank 1: no space left on device" in end for end in ends)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_see_the_folder_names_the_folder_to_share(tmp_path: Path, policy: Any) -> None:
    one = pending(tmp_path, 1, 0, HashStore(), policy)
    one.ranks = LearnerRanks()
    with pytest.raises(CheckpointError, match="on a file system that the hosts of all learners share"):
        one.write()
