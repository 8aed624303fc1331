"""The memory estimate of a dry run: the parts of its formula. Real peaks: test_measured_memory.py (`make soak`)."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_bus.config.loader import load
from areal_bus.config.names.engines import ENGINES
from areal_bus.config.names.gpu_memory import gib_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.weights.delta import MAX_SHARE
from launch.commands.dry_run import dry_run, longest_prompt, make_plan_page
from launch.memory import ranks
from launch.memory.fits import SPARE_SHARE
from launch.memory.loads import CUDA, NCCL, Proposal, format_bytes, fsdp_bytes, gpu_loads, gpu_overhead, host_loads
from launch.memory.ranks import SERVER_RANK, MicroBatch, activations, estimate, layer_bytes, saved_bytes
from launch.memory.shape import (
    KNOWN_SHAPES,
    LIBRARIES,
    MAX_DELTA_SHARE,
    MIB,
    REWARD_WORKER,
    DecoderShape,
    Need,
    ParameterCounts,
    find_shape,
    read_shape,
)
from launch.plan.topology import plan

ROOT = Path(__file__).parents[2]
SHAPE = DecoderShape(8, 2, 16, 2, 1, 4, 10, True)
N = 2 * (8 * 4 * 2 * 3 + 3 * 8 * 16) + 80  # its parameters


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {"model": {"scratch": {}}, "data": {"task": "sums", "batch_size": 4}}
    base["checkpoint"] = {"async_save": False}  # no copy of it on the host
    return Config.model_validate(base | {"gconfig": {"n_samples": 2, "max_new_tokens": 6}} | sections)


def test_a_dry_run_refuses_a_model_that_is_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{folder}"\n[data]\ntask = "sums"\n')
    with pytest.raises(ConfigError, match=r"missing weights: no \*\.safetensors"):
        dry_run(load(file, (), {}), file, None)
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match="whole safetensors file"):
        dry_run(load(file, (), {}), file, None)


@pytest.mark.parametrize(("learners", "says"), [(2, True), (1, False)])
def test_a_dry_run_warns_that_minibatches_depend_on_the_learner_ranks(learners: int, says: bool) -> None:
    tiny = Path("configs/tiny.toml")
    settings = load(tiny, [f"topology.learners={learners}", "actor.ppo_n_minibatches=2"], {})
    assert ("depends on the number of learner ranks" in dry_run(settings, tiny, 6)) == says


def test_a_shape_is_read_from_a_published_config() -> None:
    published = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
    fields = {"num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": True}
    assert read_shape(published | fields) == SHAPE
    assert read_shape(published | fields | {"model_type": "llama"}) == replace(SHAPE, is_ours=True)
    assert read_shape(published | fields | {"model_type": "qwen3"}) == replace(SHAPE, norms_heads=True)
    gemma = replace(SHAPE, n_norms=4, norms_heads=True)
    assert read_shape(published | fields | {"model_type": "gemma3_text"}) == gemma
    assert SHAPE.n_parameters == N


def test_a_micro_batch_holds_whole_groups_each_with_its_prompt_once() -> None:
    assert MicroBatch.of(config(), 10) == MicroBatch(rows=4 * 22, seen=8 * 16, wanted=8 * 6, n=1)
    two = config(learner={"max_tokens_per_mb": 50})
    assert MicroBatch.of(two, 10) == MicroBatch(rows=2 * 22, seen=4 * 16, wanted=4 * 6, n=2)
    apart = config(learner={"max_tokens_per_mb": 20})  # no group fits: a sequence at a time
    assert MicroBatch.of(apart, 10) == MicroBatch(rows=16, seen=16, wanted=6, n=8)
    assert MicroBatch.of(config(actor={"ppo_n_minibatches": 2}), 10).rows == 2 * 22


def test_activations_are_counted_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = MicroBatch(rows=5, seen=7, wanted=3, n=1)
    layer = 4 * (5 * (6 * 8 + 2 * 4 + 4 * 16) + 7 * (2 * 4 * 3))
    logits, embedding = 2 * 3 * 10 * 4, 10 * 8 * 4
    assert activations(config(), SHAPE, batch) == 2 * layer + logits + embedding
    many = replace(batch, wanted=10**6)  # 38 MiB of logits: in chunks
    with monkeypatch.context() as small:
        small.setattr(ranks, "LOGITS_MIB", 8)
        assert activations(config(), SHAPE, many) == 2 * layer + 3 * 26214 * 10 * 4 + embedding
    gemma = 4 * (5 * (10 * 8 + 2 * 4 * 3 + 2 * 4 + 4 * 16) + 7 * (2 * 4 * 3))
    normed = replace(SHAPE, n_norms=4, norms_heads=True)
    assert activations(config(), normed, batch) == 2 * gemma + logits + embedding
    ours = 4 * 5 * (2 * 8 + 2 * 4 * 3 + 2 * 16)
    assert activations(config(), replace(SHAPE, is_ours=True), batch) == 2 * ours + logits + embedding
    for other in ({"topology": {"learners": 2}}, {"model": {"scratch": {}, "dtype": "bfloat16"}}):
        found = activations(config(**other), replace(SHAPE, is_ours=True), batch)
        assert found == activations(config(**other), SHAPE, batch)
    spared = config(learner={"gradient_checkpointing": True})
    assert activations(spared, SHAPE, batch) == 2 * 5 * 8 * 4 + layer + logits + embedding


def test_ranks_that_share_a_sequence_keep_their_part_of_it_and_the_keys_they_see() -> None:
    batch = MicroBatch(rows=8, seen=12, wanted=6, n=1)
    for on_gpu, key_heads in ((False, 1), (True, 2)):
        topology = {"learners": 4, "gpus_per_host": 4 if on_gpu else 0}
        shared = config(topology=topology, actor={"context_parallel": 2})
        keys = 15 * 2 * key_heads * 4 + 8 * 2 * 4  # 1 + 1/4 of what is seen, and what is gathered
        layer = 4 * (4 * (6 * 8 + 2 * 4 + 4 * 16) + 4 * 2 * 2 * 4 + keys)
        logits, embedding = (3 if on_gpu else 2) * 3 * 10 * 4, 10 * 8 * 4
        assert activations(shared, SHAPE, batch) == 2 * layer + logits + embedding
        sparing = config(topology=topology, actor={"context_parallel": 2}, learner={"gradient_checkpointing": True})
        assert activations(sparing, SHAPE, batch) == 2 * 4 * 8 * 4 + layer + logits + embedding
    each = config(topology={"learners": 4}, data={"task": "sums", "batch_size": 8}, learner={"max_tokens_per_mb": 30})
    both = each.model_copy(update={"actor": each.actor.model_copy(update={"context_parallel": 2})})
    assert MicroBatch.of(both, 4).n == 2 * MicroBatch.of(each, 4).n, "half as many shares"


def test_a_learner_needs_gradients_or_activations_and_with_several_micro_batches_both() -> None:
    one, several = config(), config(learner={"max_tokens_per_mb": 50})
    passing = {c: activations(c, SHAPE, MicroBatch.of(c, 10)) for c in (one, several)}
    assert passing[one] > 4 * N
    snapshots = 2 * 4 * N
    assert need(one, Role.LEARNER) == Need(12 * N + passing[one], LIBRARIES[Role.LEARNER] + snapshots)
    assert need(several, Role.LEARNER).device == 12 * N + 4 * N + passing[several]
    assert need(one, Role.LEARNER, index=1).host == LIBRARIES[Role.LEARNER]
    large = DecoderShape(64, 2, 16, 2, 1, 4, 10, True)  # gradients are more than what so few tokens leave
    little = config(data={"task": "sums", "batch_size": 1}, gconfig={"n_samples": 2, "max_new_tokens": 1})
    found, batch = estimate(little, large, Role.LEARNER, 0, n_prompt=1), MicroBatch.of(little, 1)
    at_the_end = 4 * large.n_parameters + 10 * 64 * 4 + layer_bytes(little, large, batch)
    assert found.device == 12 * large.n_parameters + at_the_end > activations(little, large, batch)


def test_ranks_on_a_cpu_keep_room_for_gathered_layers_and_loading_takes_a_model_twice() -> None:
    two = config(topology={"learners": 2}, data={"task": "sums", "batch_size": 8})
    passing = activations(two, SHAPE, MicroBatch.of(two, 10))
    assert need(two, Role.LEARNER).device == 12 * N // 2 + 4 * (N + 80) + passing
    on_gpu = config(topology={"learners": 2, "gpus_per_host": 2}, data={"task": "sums", "batch_size": 8})
    on_gpu_passing = activations(on_gpu, SHAPE, MicroBatch.of(on_gpu, 10))
    assert need(on_gpu, Role.LEARNER).device == 12 * N // 2 + on_gpu_passing
    wide = DecoderShape(640, 2, 16, 2, 1, 4, 10_000, True)
    lora = config(actor={"lora": {"rank": 1, "target_modules": ["k_proj"]}}, data={"task": "sums", "batch_size": 1})
    loading = estimate(lora, wide, Role.LEARNER, 1, n_prompt=1)
    assert loading.device + loading.host == LIBRARIES[Role.LEARNER] + 2 * 4 * wide.n_parameters


def test_a_checkpoint_that_training_waits_for_gathers_or_rounds_its_weights() -> None:
    counts = ParameterCounts(N, 0, 2 * N)
    two: dict[str, Any] = {"topology": {"learners": 2}}
    rounded: dict[str, Any] = {"model": {"scratch": {}, "dtype": "bfloat16"}}
    assert saved_bytes(config(), counts) == 0
    assert saved_bytes(config(**rounded), counts) == 2 * N
    assert saved_bytes(config(**two), counts) == saved_bytes(config(**two, **rounded), counts) == N
    assert saved_bytes(config(**two, checkpoint={"async_save": True}), counts) == 0, "copied in any case"
    assert saved_bytes(config(**two, actor={"lora": {}}), counts) == 0


def test_a_simulated_learner_stages_weights_and_no_moments() -> None:
    sections: dict[str, Any] = {"learner": {"simulated": {}}, "rollout": {"engine": "simulated"}}
    for bytes_a_number, dtype in ((4, "float32"), (2, "bfloat16")):
        made: dict[str, Any] = {"model": {"scratch": {}, "dtype": dtype}, "topology": {"learners": 2}, **sections}
        copied, waiting = (config(**made, checkpoint={"async_save": is_beside}) for is_beside in (True, False))
        masters = 0 if dtype == "float32" else 4 * N
        rank_1 = need(copied, Role.LEARNER, index=1)
        assert rank_1 == Need(4 * N, LIBRARIES[Role.LEARNER] + bytes_a_number * N // 2)
        rank_0 = LIBRARIES[Role.LEARNER] + 2 * bytes_a_number * N + bytes_a_number * N // 2
        assert need(copied, Role.LEARNER).host == rank_0 + masters
        gathered = 0 if dtype == "float32" else N
        assert need(waiting, Role.LEARNER, index=1).host == LIBRARIES[Role.LEARNER] + gathered


def test_adapters_need_optimizer_state_and_the_model_itself_none() -> None:
    lora = config(actor={"lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}}, model={"scratch": {}})
    counts = ParameterCounts.of(lora, SHAPE)
    n = 2 * 3 * ((8 + 8) + (8 + 16))
    assert (counts.trained, counts.frozen, counts.pushed_bytes) == (n, N, 4 * n)
    assert (counts.adapted, counts.largest) == (2 * (8 * 8 + 8 * 16), 8 * 16)
    passing = activations(lora, SHAPE, MicroBatch.of(lora, 10))
    whole = activations(config(), SHAPE, MicroBatch.of(lora, 10))
    assert passing == whole - 10 * 8 * 4 + 2 * MicroBatch.of(lora, 10).rows * 2 * 3 * 4  # no gradient of the embedding
    found = need(lora, Role.LEARNER)
    assert found == Need(12 * n + 4 * N + max(passing, 4 * n), LIBRARIES[Role.LEARNER] + 2 * 4 * n)
    generators = [estimate(c, SHAPE, Role.GENERATOR, 0, n_prompt=10).host for c in (lora, config())]
    assert generators[0] - generators[1] == 4 * counts.adapted + 4 * n + 4 * counts.largest - 4 * N - 2 * 4 * (N - n)


def test_adapters_with_ranks_of_their_own_and_magnitudes_are_counted() -> None:
    target = {"q_proj": 2, "down_proj": [5, 1.0]}
    plain, dora = (
        config(actor={"lora": {"variant": kind, "target_modules": target}}, model={"scratch": {}})
        for kind in ([], ["dora"])
    )
    n = 2 * (2 * (8 + 8) + 5 * (8 + 16))
    assert [ParameterCounts.of(one, SHAPE).trained for one in (plain, dora)] == [n, n + 2 * (8 + 8)]
    batch = MicroBatch.of(dora, 10)
    more = activations(dora, SHAPE, batch) - activations(plain, SHAPE, batch)
    assert more == 2 * batch.rows * 2 * (8 + 8) * 4 + 4 * (16 * 16 + 3 * 8 * 16)


def test_each_optimizer_has_a_state_of_its_own_size() -> None:
    large = DecoderShape(64, 2, 1024, 2, 1, 4, 1000, True)  # its weights are more than its activations
    n, ends = large.n_parameters, 64_000
    kept: dict[str, Need] = {}
    for name in ("adamw", "muon", "adamw8bit", "sgd", "mine:make"):
        made = config(
            actor={"optimizer": name}, data={"task": "sums", "batch_size": 1}, checkpoint={"async_save": True}
        )
        kept[name] = estimate(made, large, Role.LEARNER, 1, n_prompt=1)
    gathered = 20 * 64 * 1024 - (ends * 4 + layer_bytes(made, large, MicroBatch.of(made, 1)))
    assert gathered > 0, "Muon's whole matrix is more than the last gradients"
    at = kept["adamw"]
    assert at.device - kept["muon"].device == 4 * (n - ends) - gathered
    assert at.device - kept["adamw8bit"].device == 8 * n - 2 * n - 2 * n * 4 // 256
    assert at.device - kept["sgd"].device == 8 * n
    assert kept["mine:make"] == at
    staged = {name: need.host - kept["sgd"].host for name, need in kept.items()}
    assert staged == {"adamw": 8 * n, "muon": 8 * n - 4 * (n - ends), "adamw8bit": 8 * n, "sgd": 0, "mine:make": 8 * n}


Sections = dict[str, dict[str, Any]]
TWO: Sections = {"topology": {"learners": 2}}
GPU: Sections = {"topology": {"gpus_per_host": 1}}
GPUS: Sections = {"topology": {"learners": 2, "gpus_per_host": 2}}
SAVED: Sections = {"checkpoint": {"async_save": True}}
BF16: Sections = {"model": {"scratch": {}, "dtype": "bfloat16"}}
ON_HOST, ON_DEVICE = ({"weights": {"staging": staging}} for staging in ("host", "device"))
ATTACHED: Sections = {"engine": {"urls": ["http://127.0.0.1:30000"]}}
SGLANG, VLLM = ({"rollout": {"engine": engine}} for engine in ("sglang", "vllm"))
DELTA: Sections = {"weights": {"delta_push": "auto"}}
KEEPS, FINISHES = ({"rollout": {"on_update": way, "max_head_offpolicyness": 3}} for way in ("keep", "finish_old"))
TURNS: Sections = {"workflow": {"function": "tools"}}
ETA_0, ETA_1 = ({"rollout": {"max_head_offpolicyness": eta, "max_concurrent_rollouts": 8}} for eta in (0, 1))
PREFIXES = 8 // 2 * SHAPE.kv_per_token * 4  # bytes for each position of a slot
POSITIONS = -(-((10 + 6) * 5 // 4) // ranks.SLOT_STEP) * ranks.SLOT_STEP  # of a prompt of 10 tokens and its answer of 6
MORE: dict[str, tuple[str, Sections, Sections, int | None, int]] = {  # rank, settings, others: bytes of device and host
    "a background checkpoint copies a rank's state": ("learner-1", TWO, SAVED, 0, 12 * N // 2),
    "of masters": ("learner-1", TWO | BF16, SAVED, 0, 14 * N // 2),
    "of a critic": ("learner-1", TWO | {"actor": {"advantage": "gae"}}, SAVED, 0, 24 * N // 2),
    "of a reference that moves": (
        "learner-1", TWO | {"actor": {"kl_ctl": 0.1}, "reference": {"update_every": 3}}, SAVED, 0, 16 * N // 2
    ),
    "from a GPU it is always copied": ("learner-1", GPUS, SAVED, 0, 0),
    "weights are staged where weights.staging puts them": ("generator-0", ON_HOST, ON_DEVICE, 4 * N, -4 * N),
    "auto: where it computes": ("generator-0", ON_DEVICE, GPU | {"weights": {}}, 0, 0),
    "for a server on the host": ("generator-0", ON_HOST, GPU | SGLANG | ATTACHED | {"weights": {}}, 0, 0),
    "a model and its cache for each version": (
        "generator-0", KEEPS, FINISHES, 3 * 4 * (N + 32 * POSITIONS * SHAPE.kv_per_token), 0
    ),
    "processes of a server": ("generator-0", ON_HOST, SGLANG, None, ENGINES["sglang"].process_bytes),
    "vLLM copies the weights": ("generator-0", ON_HOST, VLLM, None, ENGINES["vllm"].process_bytes + 4 * N),
    "also where it is attached": ("generator-0", ON_HOST, VLLM | ATTACHED, None, 4 * N),
    "each rank of a server": (
        "generator-0", ON_HOST, VLLM | {"topology": {"tensor_parallel": 2, "gpus_per_host": 2}}, None,
        ENGINES["vllm"].process_bytes + SERVER_RANK + 4 * N,
    ),
    "a delta at a generator": ("generator-0", {}, DELTA, 0, 2 * N),
    "a delta and the changes of the last versions at the root": ("learner-0", {}, DELTA, 0, 2 * N + 8 * 4 * N // 16),
    "no delta by shared memory": ("learner-0", {}, {"weights": {"delta_push": "auto", "route": "shared"}}, 0, 0),
    "prefixes of several turns above eta 0": ("generator-0", ETA_0 | TURNS, ETA_1 | TURNS, PREFIXES * 16, 0),
    "and none for a single turn": ("generator-0", ETA_0, ETA_1, 0, 0),
    "none at eta 0": ("generator-0", ETA_0, ETA_0 | TURNS, 0, 0),
    "the same on a GPU": ("generator-0", GPU | ETA_0 | TURNS, ETA_1 | TURNS, PREFIXES * 16, 0),
}  # fmt: skip


@pytest.mark.parametrize("what", MORE)
def test_a_setting_adds_its_bytes_to_a_rank(what: str) -> None:
    name, before, changes, device, host = MORE[what]
    role, _, index = name.partition("-")
    one, other = (need(config(**sections), Role(role), index=int(index)) for sections in (before, before | changes))
    assert other.host - one.host == host
    assert device is None or other.device - one.device == device


def test_a_simulated_generator_and_actors_without_a_model_need_no_device() -> None:
    made_up = need(config(rollout={"engine": "simulated"}), Role.GENERATOR)
    assert made_up == Need(0, need(config(**ON_HOST), Role.GENERATOR).host), "what it receives is all of its model"
    assert need(config(), Role.REWARD).host == LIBRARIES[Role.REWARD] + REWARD_WORKER
    assert need(config(), Role.HEAD) == Need(0, LIBRARIES[Role.HEAD])
    assert MAX_DELTA_SHARE == MAX_SHARE


def test_a_servers_formats_of_one_byte_count_as_one_and_unknown_ones_as_the_model() -> None:
    def device(*arguments: str) -> int:
        chosen = config(rollout={"engine": "vllm"}, engine={"arguments": arguments})
        return need(chosen, Role.GENERATOR).device

    def saved(*arguments: str) -> int:
        return device() - device(*arguments)

    positions = ranks.SLOT_STEP  # of each of 32 slots: no answer is longer
    assert saved("--quantization", "fp8") == 3 * (N - SHAPE.vocabulary * SHAPE.hidden), "not of the tied embedding"
    assert saved("--kv-cache-dtype=int8") == 3 * 32 * positions * SHAPE.kv_per_token
    assert saved("--quantization", "gptq", "--kv-cache-dtype", "auto") == 0


def test_forked_actors_share_imported_modules() -> None:
    """The plan of 512 ranks on a host with 24 GiB: without forks it needs several such hosts."""
    simulated = load(ROOT / "configs" / "sim512.toml", ["topology.host_memory_gib=24"], {})
    (forked,), (spawned,) = (host_loads(Proposal(one, 512, SHAPE, 10)) for one in (simulated, spawning(simulated)))
    assert 8 < forked.n_bytes / 2**30 < 12
    assert spawned.n_bytes / 2**30 > 80


def spawning(config: Config) -> Config:
    return config.model_copy(update={"launch": config.launch.model_copy(update={"start": "spawn"})})


def test_snapshots_are_on_the_gpu_when_pushes_stay_on_it() -> None:
    one_gpu = {"gpus_per_host": 1, "ranks_per_gpu": 2}
    kept, sent = (need(config(topology=one_gpu, weights={"route": r}), Role.LEARNER) for r in ("auto", "gloo"))
    host = LIBRARIES[Role.LEARNER] + 12 * N  # with the copy of a checkpoint
    assert (kept.device - sent.device, kept.host) == (2 * 4 * N, host + 4 * N)
    assert 4096 < 4 * N <= 8192
    assert sent.host == host + 2 * 8192, "pinned, by powers of two"
    large = DecoderShape(64, 2, 16, 2, 1, 4, 10, True)  # what so few tokens leave is less than AdamW's room for a step
    little = config(topology=one_gpu, data={"task": "sums", "batch_size": 1}, weights={"route": "gloo"})
    assert estimate(little, large, Role.LEARNER, 0, n_prompt=1).device == (12 + 4 + 4) * large.n_parameters
    alone = config(topology=one_gpu | {"ranks_per_gpu": 1})
    assert need(alone, Role.LEARNER) == sent


def test_each_frozen_model_counts_in_the_dtype_of_the_run_and_is_sharded(tmp_path: Path) -> None:
    plain = config(model={"scratch": {}, "dtype": "bfloat16"}, topology={"learners": 2})
    both: dict[str, Any] = {
        "actor": {"kl_ctl": 0.1, "distill_coef": 0.5},
        "teacher": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
    }
    frozen = config(model={"scratch": {}, "dtype": "bfloat16"}, topology={"learners": 2}, **both)
    shape, with_models = (find_shape(one, tmp_path) for one in (plain, frozen))
    assert shape is not None
    assert with_models is not None
    teacher = KNOWN_SHAPES["Qwen/Qwen2.5-0.5B-Instruct"].n_parameters
    assert (shape.n_frozen, with_models.n_frozen) == (0, shape.n_parameters + teacher)
    needs = [estimate(c, s, Role.LEARNER, 1, n_prompt=1) for c, s in ((plain, shape), (frozen, with_models))]
    assert needs[1].device - needs[0].device == pytest.approx(2 * (shape.n_parameters + teacher) / 2, abs=2)
    by_words = frozen.model_copy(update={"actor": frozen.actor.model_copy(update={"distill_beta": 0.5})})
    taught = find_shape(by_words, tmp_path)
    assert taught is not None
    assert taught.n_taught == 151936 * 896  # the embedding, which is the head
    more = estimate(by_words, taught, Role.LEARNER, 1, n_prompt=1).device - needs[1].device
    assert more == pytest.approx(2 * taught.n_taught / 2, rel=0.02)


def test_the_longest_prompt_is_counted_where_data_and_tokenizer_are_here(tmp_path: Path) -> None:
    words = config(
        model={"scratch": {}}, data={"task": "reverse", "prompt": "{question}>", "chat_template": False, "largest": 8}
    )
    assert longest_prompt(words, tmp_path) == 9
    elsewhere = config(model={"path": "nobody/model"}, data={"path": "nobody/data", "max_prompt_tokens": 77})
    assert longest_prompt(elsewhere, tmp_path) == 77


def written(tmp_path: Path, **changes: str) -> tuple[Config, Path]:
    """A config with a known shape of 0.5 billion parameters: a learner and a generator on separate GPUs."""
    file = tmp_path / "plan.toml"
    text = (ROOT / "configs" / "tiny.toml").read_text()
    file.write_text(text)
    gpus = ["topology.ranks=3", "topology.gpus_per_host=3", "topology.learners=1", "topology.generators=1"]
    return load(file, [*gpus, *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())], {}), file


def test_a_plan_that_does_not_fit_a_gpu_is_flagged_with_the_keys_to_change(tmp_path: Path) -> None:
    """Every setting that is named makes it fit."""
    settings, file = written(tmp_path, topology__gpu_memory_gib="4")
    assert not make_plan_page(settings, file, None).is_too_large
    large = written(tmp_path, topology__gpu_memory_gib="1", gconfig__max_new_tokens="2000")[0]
    page = make_plan_page(large, file, None)
    assert page.is_too_large
    (line,) = [line for line in page.text.splitlines() if line.startswith("  generator (1 GPU")]
    output = re.search(r"DOES NOT FIT: .* set rollout.max_concurrent_rollouts = (\d+) \(it is \d+\)", line)
    assert output is not None
    changed = written(
        tmp_path,
        topology__gpu_memory_gib="1",
        gconfig__max_new_tokens="2000",
        rollout__max_concurrent_rollouts=output[1],
    )[0]
    page = make_plan_page(changed, file, None)
    assert "generator (1 GPU" in page.text
    assert not any("generator" in line and "DOES NOT FIT" in line for line in page.text.splitlines())


@pytest.mark.parametrize(
    ("config_name", "key"), [("gpus-2", "topology.learners"), ("7b", "rollout.max_concurrent_rollouts")]
)
def test_an_advised_plan_passes_all_checks_with_spare_memory(config_name: str, key: str) -> None:
    """Two learners of two ranks were advised and then refused; 79.0 GiB of 79.6 were advised."""
    file = ROOT / "configs" / f"{config_name}.toml"
    gpus = {"gpus-2": ["topology.gpu_memory_gib=24"], "7b": ["rollout.max_concurrent_rollouts=32"]}[config_name]
    page = make_plan_page(load(file, gpus, {}), file, None)
    assert page.is_too_large
    (line,) = [line for line in page.text.splitlines() if "DOES NOT FIT" in line]
    output = re.findall(r"([a-z_]+\.[a-z_]+) = (\S+) \(it is", line)
    assert (key in dict(output)) == (config_name == "7b")
    if config_name == "gpus-2":
        assert "no single setting is enough: use a smaller model, larger GPUs, or more of them" in line
    for name, value in output:
        settings = load(file, [*gpus, f"{name}={value}"], {})
        assert not make_plan_page(settings, file, None).is_too_large
        shape = find_shape(settings, file.parent)
        assert shape is not None
        loads = gpu_loads(Proposal(settings, None, shape, longest_prompt(settings, file.parent)))
        changed = [load for load in loads if f"  {load.roles} (" in line]
        assert changed
        assert all(load.n_bytes <= 81559 * MIB * (1 - SPARE_SHARE) for load in changed)


def test_a_plan_that_does_not_fit_a_host_is_flagged_and_host_memory_can_be_set() -> None:
    """A CPU plan of 554 GiB ended with 0 on a machine of 24."""
    file = ROOT / "configs" / "plan.toml"
    small = make_plan_page(load(file, ["topology.host_memory_gib=500"], {}), file, None)
    assert small.is_too_large
    assert "each host has 500 GiB (topology.host_memory_gib = 500)" in small.text
    output = re.search(
        r"DOES NOT FIT: \d.* GiB too much; set (rollout.max_concurrent_rollouts = \d+) \(it is 256\)", small.text
    )
    assert output is not None
    less = load(file, ["topology.host_memory_gib=500", output[1].replace(" ", "")], {})
    assert not make_plan_page(less, file, None).is_too_large
    assert not make_plan_page(load(file, ["topology.host_memory_gib=600"], {}), file, None).is_too_large
    not_downloaded = make_plan_page(load(file, ["model.path=owner/not-downloaded"], {}), file, None)
    assert not not_downloaded.is_too_large, "the sizes of the model are not known"
    tiny = ROOT / "configs" / "tiny.toml"
    assert "(this machine, " in dry_run(load(tiny, (), {}), tiny, None)
    several = make_plan_page(load(file, ["topology.ranks_per_host=2"], {}), file, None)
    assert not several.is_too_large
    assert "the memory of 4 hosts is not checked: set topology.host_memory_gib" in several.text


def test_sizes_are_plain_numbers() -> None:
    assert [format_bytes(int(n * MIB)) for n in (0, 0.5, 12.34, 1020, 1024, 3000, 600 * 1024, 2e6)] == [
        "-", "0.5 MiB", "12.3 MiB", "1020 MiB", "1 GiB", "2.93 GiB", "600 GiB", "1953 GiB",
    ]  # fmt: skip


def test_a_card_is_known_by_its_name_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    for name in ("H100", "NVIDIA H100 80GB HBM3", "h100-80g"):
        assert gib_of(name) == 81559 / 1024
    assert gib_of("A100-80G") == gib_of("NVIDIA A100-SXM4-80GB") == 80.0
    assert gib_of("rtx 4090") == gib_of("NVIDIA GeForce RTX 4090")
    assert gib_of("A100") is None, "there are two"
    assert (gib_of("24"), gib_of(24.0), gib_of(0.0), gib_of("")) == (24.0, 24.0, None, None)
    with pytest.raises(ConfigError, match=r"GiB above 0 or a card's name: 'A100' is neither; did you mean A100-"):
        written(tmp_path, topology__gpu_memory_gib="A100")
    with pytest.raises(ConfigError, match=r"is of a GPU, and topology.gpus_per_host = 0 runs all on"):
        load(ROOT / "configs" / "plan.toml", ["topology.gpu_memory_gib=24"], {})
    file = tmp_path / "plan.toml"
    file.write_text((ROOT / "configs" / "gpus-1.toml").read_text().replace("gpus.toml", f"{ROOT}/configs/gpus.toml"))
    assert "24 GiB (topology.gpu_memory_gib = 24" in dry_run(load(file, ["topology.gpu_memory_gib=24"], {}), file, None)


def test_cuda_and_gathered_fsdp_layers_count_against_the_gpu() -> None:
    """79.7 GiB did not fit 80."""
    two = config(topology={"learners": 2, "gpus_per_host": 3, "generators": 1})
    place = plan(two.topology, ["h"] * 4)[0]
    assert gpu_overhead(two, place, SHAPE) == CUDA + NCCL + fsdp_bytes(two, SHAPE)
    root, layer = 80, (N - 80) // 2
    assert fsdp_bytes(two, SHAPE) == 4 * (root + 2 * layer)
    one = config(topology={"learners": 1, "gpus_per_host": 2, "generators": 1})
    assert gpu_overhead(one, plan(one.topology, ["h"] * 3)[0], SHAPE) == CUDA
    on_cpu = config(topology={"learners": 2})
    assert gpu_overhead(on_cpu, plan(on_cpu.topology, ["h"] * 4)[0], SHAPE) == 0


def test_a_dry_run_prints_the_plan_and_then_only_changed_settings(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text((ROOT / "configs" / "tiny.toml").read_text())
    settings = load(file, (), {})
    short, long = (dry_run(settings, file, 4, every=every) for every in (False, True))
    assert short.startswith("4 ranks, 1 host(s); model [model.scratch]")
    plan_lines, _, toml = short.partition("\n\n")
    assert "learner-0" in plan_lines
    assert "each host has " in plan_lines
    assert len(short.splitlines()) < 60 < 160 < len(long.splitlines())
    again = tmp_path / "again.toml"
    again.write_text(toml)
    assert load(again, (), {}) == settings


@pytest.mark.slow
def test_a_dry_run_reports_whether_the_servers_interpreter_is_installed(tmp_path: Path) -> None:
    settings, file = written(tmp_path, rollout__engine="sglang", engine__python="/nowhere/bin/python")
    assert "\nengine.python = /nowhere/bin/python is not on this machine" in dry_run(settings, file, None)
    settings, _ = written(tmp_path, rollout__engine="sglang", engine__python=sys.executable)
    assert "rollout.engine needs sglang, which is not there" in dry_run(settings, file, None)


def need(config: Config, role: Role, *, index: int = 0) -> Need:
    return estimate(config, SHAPE, role, index, n_prompt=10)
