"""Optimizers of the policy: each steps as torch's own, sharded or not, and goes on from a checkpoint bit for bit."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from actors.learner.link.rendezvous import part
from actors.learner.update import optimizers
from actors.learner.update.optimizers import (
    LearningRates,
    Muon,
    check_torchao,
    move_states,
    offload,
    orthogonalised,
)
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.memory.ranks import estimate
from launch.memory.shape import DecoderShape
from tests.support.forked_ranks import met, run_ranks, write_weights
from tests.support.learner_setup import (
    random_shard,
    resume,
    save,
    settings,
    tiny_actor,
    tiny_model,
    train,
    update,
    weights,
)

LR, OTHER_LR, DECAY = 1e-2, 1e-3, 0.1
JORDAN = {"eps": 1e-7, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5}  # as he publishes Newton-Schulz
FORMS = [(64, 32), (32, 64), (33, 7), (7, 33), (1, 8), (3, 3)]


def config_of(optimizer: str, **more: Any) -> Config:
    return settings(actor={"lr": LR, "optimizer": optimizer, "max_grad_norm": 1e9, "weight_decay": DECAY, **more})


def test_muon_steps_matrices_by_its_formula_and_the_rest_by_adamw(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of("muon", adamw_lr=OTHER_LR))
    before = weights(actor.policy)
    momentum = {name: torch.zeros_like(value) for name, value in before.items()}
    others = {name: nn.Parameter(value.clone()) for name, value in before.items() if not is_matrix(name)}
    adamw = torch.optim.AdamW(others.values(), lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for version in range(3):
        train(actor, range(version, version + 1))
        for name, parameter in actor.policy.parameters().items():
            if not is_matrix(name):
                others[name].grad = parameter.grad.clone()
                continue
            momentum[name] = momentum[name].lerp(parameter.grad, 1 - 0.95)
            direction = orthogonalised(parameter.grad.lerp(momentum[name], 0.95), JORDAN, torch.float32)
            size = 0.2 * max(parameter.shape) ** 0.5
            before[name] = before[name] * (1 - LR * DECAY) - LR * size * direction
        adamw.step()
    found = weights(actor.policy)
    assert sum(map(is_matrix, found)) == 14
    for name, value in found.items():
        wanted = before[name] if is_matrix(name) else others[name].detach()
        torch.testing.assert_close(value, wanted, atol=1e-6, rtol=0)


def is_matrix(name: str) -> bool:
    return "proj" in name


def steps_of_a_rank(index: int, endpoint: str, size: int) -> None:
    """Fails unless three steps of sharded matrices are those of whole ones, bit for bit."""
    met(index, endpoint, size)
    mesh = init_device_mesh("cpu", (size,))
    for rows, columns in FORMS:
        draw = torch.Generator().manual_seed(rows)
        start = torch.randn(rows, columns, generator=draw)
        alone = nn.Parameter(start.clone())
        sharded = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        pair = [Muon([one], lr=LR, weight_decay=DECAY) for one in (alone, sharded)]
        for _ in range(3):
            gradient = torch.randn(rows, columns, generator=draw)
            alone.grad = gradient.clone()
            sharded.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            for optimizer in pair:
                optimizer.step()
        assert torch.equal(sharded.full_tensor(), alone), (rows, columns)  # type: ignore[attr-defined]
        assert not torch.equal(alone, start)
    part()


def test_muon_turns_a_gradient_as_torchs_own_does_in_bfloat16_and_exactly_in_float32() -> None:
    for form in FORMS:
        one = nn.Parameter(torch.zeros(form))
        one.grad = torch.randn(form, generator=torch.Generator().manual_seed(form[0]))
        how: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
        reference = torch.optim.Muon([one], lr=1.0, weight_decay=0.0, **how)
        reference.step()
        group, wanted = reference.param_groups[0], -one.detach() / (0.2 * max(form) ** 0.5)
        torch.testing.assert_close(orthogonalised(one.grad, group, torch.bfloat16).float(), wanted, atol=1e-6, rtol=0)
        exact = orthogonalised(one.grad, group, torch.float64)
        torch.testing.assert_close(orthogonalised(one.grad, group, torch.float32).double(), exact, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_muon_steps_a_sharded_matrix_as_a_whole_one() -> None:
    """Also one with fewer rows than ranks, which torch's own step refuses."""
    run_ranks(__name__, steps_of_a_rank.__name__, {"size": 2})


def test_adamw_and_sgd_are_torchs_own(tmp_path: Path) -> None:
    for name, make in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        actor = tiny_actor(tmp_path / name, config_of(name))
        copies = [nn.Parameter(value) for value in weights(actor.policy).values()]
        how: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
        wanted = make(copies, **how, **({"betas": (0.9, 0.95)} if name == "adamw" else {}))
        for version in range(2):
            train(actor, range(version, version + 1))
            for copy, parameter in zip(copies, actor.policy.parameters().values(), strict=True):
                copy.grad = parameter.grad
            wanted.step()
        for copy, value in zip(copies, weights(actor.policy).values(), strict=True):
            torch.testing.assert_close(value, copy.detach(), atol=1e-6, rtol=0)
        assert bool(actor.optimizer.state) == (name == "adamw")


def test_a_group_has_a_rate_and_a_decay_of_its_own_along_the_schedule(tmp_path: Path) -> None:
    groups = [{"match": "norm|bias", "weight_decay": 0.0}, {"match": "embed", "lr_scale": 0.5}]
    config = config_of("muon", group=groups, adamw_lr=OTHER_LR, lr_warmup_steps=4)
    actor = tiny_actor(tmp_path, config)
    train(actor, range(2))
    of = {id(p): (float(g["lr"]), g["weight_decay"]) for g in actor.optimizer.param_groups for p in g["params"]}
    half = 2 / 4  # of the warm-up
    for name, parameter in actor.policy.parameters().items():
        decay = 0.0 if "norm" in name else DECAY
        lr = LR if is_matrix(name) else OTHER_LR / 2 if "embed" in name else OTHER_LR
        assert of[id(parameter)] == (pytest.approx(lr * half), decay), name


@pytest.fixture
def eager_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step, which takes minutes on a CPU."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao (extra adamw8bit)")
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)


@pytest.mark.slow
def test_adamw8bit_is_near_adamw_and_its_states_survive_a_checkpoint(tmp_path: Path, eager_torchao: None) -> None:
    first, exact = (tiny_actor(tmp_path / name, wide(name), model=wide_model()) for name in ("adamw8bit", "adamw"))
    for actor in (first, exact):
        train(actor, range(3))
    wanted = weights(exact.policy)
    far = max(float((held - wanted[name]).abs().max()) for name, held in weights(first.policy).items())
    assert 0 < far < 2e-3  # of three steps of 1e-3
    parameter = max(first.policy.parameters().values(), key=lambda one: one.numel())
    state = first.optimizer.state[parameter]["exp_avg"]
    assert type(state).__name__ == "OptimState8bit"
    folder = save(first, tmp_path / "kept")
    second = tiny_actor(tmp_path / "b", wide("adamw8bit"), model=wide_model())
    resume(second, folder)
    largest = max(second.policy.parameters().values(), key=lambda one: one.numel())
    again = second.optimizer.state[largest]["exp_avg"]
    assert type(again) is type(state)
    kept_before = state.dequantize()
    assert float((again.dequantize() - kept_before).abs().max()) <= 0.02 * float(kept_before.abs().max())
    assert not torch.equal(kept_before, torch.zeros_like(kept_before))


def wide_model() -> Any:
    """A model with a matrix of 4,096 numbers: smaller ones have states in float32."""
    model = tiny_model()
    model.config.intermediate_size = 128
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(model.config)


def wide(optimizer: str) -> Config:
    return settings(actor={"lr": 1e-3, "optimizer": optimizer, "adam_eps": 1e-4, "max_grad_norm": 1e9})


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def test_an_optimizer_of_ones_own_steps_and_follows_the_schedule(tmp_path: Path, mine: ModuleType) -> None:
    mine.make = lambda parameters, actor: torch.optim.RMSprop(parameters.values(), lr=2 * actor.lr)  # type: ignore[attr-defined]
    actor = tiny_actor(tmp_path, settings(actor={"lr": LR, "optimizer": "mine:make", "lr_warmup_steps": 2}))
    start = weights(actor.policy)
    train(actor, range(1))
    assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(LR)  # half of twice
    assert any(not torch.equal(start[name], value) for name, value in weights(actor.policy).items())


def test_what_an_optimizer_needs_and_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unused pattern 'router' in \[\[actor.group\]\]"):
        tiny_actor(tmp_path, config_of("adamw", group=[{"match": "router", "lr_scale": 0.1}]))
    monkeypatch.setattr(optimizers, "has_package", lambda name: False)
    with pytest.raises(ConfigError, match=r"missing package torchao, .* run .*install .*areal-bus\[adamw8bit\]"):
        check_torchao()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda parameters, actor: 1, "returns a torch.optim.Optimizer: got int"),
        (lambda parameters, actor: torch.optim.SGD([next(iter(parameters.values()))]), "mismatch in the parameters"),
        (lambda parameters: 1, "failed: TypeError"),
        (lambda parameters, actor: torch.optim.LBFGS(list(parameters.values())), "its step needs an argument"),
        (lambda parameters, actor: torch.optim.Optimizer(parameters.values(), {}), "missing lr in a group"),
    ],
)
def test_a_wrong_optimizer_of_ones_own_is_refused(tmp_path: Path, mine: ModuleType, make: Any, said: str) -> None:
    mine.make = make  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=said):
        tiny_actor(tmp_path, settings(actor={"optimizer": "mine:make"}))


@pytest.mark.parametrize("extra", [torch.zeros(2), [1.0], {}, "text"])
def test_a_state_that_no_checkpoint_holds_is_refused_after_the_first_update(
    tmp_path: Path, mine: ModuleType, extra: Any
) -> None:
    def make(parameters: Any, actor: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters.values(), lr=LR)
        made.register_step_post_hook(lambda *_: [made.state[one].update(extra=extra) for one in parameters.values()])
        return made

    mine.make = make  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"unsupported state 'extra' of actor.optimizer"):
        train(tiny_actor(tmp_path, settings(actor={"lr": LR, "optimizer": "mine:make"})), range(1))


def test_learning_rates_keep_their_ratios() -> None:
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.02}])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.02)
    LearningRates(optimizer, 0.1).set(0.05)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


# actor.offload, on a CPU that stands for GPU and host

MODELS = {"advantage": "gae", "kl_ctl": 0.3, "ppo_epochs": 2, "lr": 1e-3, "adam_eps": 1e-4}
WAYS = ("none", "optimizer", "all")


def offload_config(way: str) -> Config:
    return settings(actor=MODELS | {"offload": way}, critic={"lr": 1e-4}, learner={"max_tokens_per_mb": 24})


def offloading_rank(index: int, endpoint: str, folder: str, size: int) -> None:
    """FSDP2's group is the process's own: a fork has none yet."""
    ranks = met(index, endpoint, size)
    for way in WAYS:
        actor = tiny_actor(Path(folder) / f"{way}-{index}", offload_config(way), ranks=ranks)
        assert actor.policy.sharded == (size > 1 or way == "all")
        for version in range(2):
            drawn = random_shard(version, clock=version, n_groups=4)
            update(actor, [item for item in drawn if item.group % size == index])
        assert all(isinstance(one, DTensor) == actor.policy.sharded for one in actor.policy.parameters().values())
        write_weights(actor, Path(folder) / f"{way}.safetensors")
    part()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_offloaded_learners_have_the_same_weights(tmp_path: Path, size: int) -> None:
    run_ranks(__name__, offloading_rank.__name__, {"folder": str(tmp_path), "size": size})
    none, optimizer, everything = (load_file(tmp_path / f"{way}.safetensors") for way in WAYS)
    start = tiny_actor(tmp_path / "start", offload_config("none")).policy.parameters()
    assert all(not torch.equal(none[name], value) for name, value in start.items())
    for name, value in none.items():
        assert torch.equal(optimizer[name], value), name
        torch.testing.assert_close(everything[name], value, atol=1e-6, rtol=0)


def test_states_are_elsewhere_between_steps_and_single_numbers_stay() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer, seen = torch.optim.AdamW([parameter]), []
    offload(optimizer, torch.device("cpu"))
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.state[parameter]["exp_avg"].device.type))
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["cpu"]
    move_states(optimizer, torch.device("meta"))  # stands for another place
    kinds = {kind: value.device.type for kind, value in optimizer.state[parameter].items()}
    assert kinds == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


def test_the_plan_has_the_states_on_the_host_and_the_weights_only_by_all() -> None:
    shape = DecoderShape(512, 4, 2048, 8, 8, 64, 1000, True)
    n, data = shape.n_parameters, {"task": "sums", "batch_size": 2}

    def need(way: str, **actor: Any) -> Any:
        sizes: dict[str, Any] = {"topology": {"gpus_per_host": 4}, "gconfig": {"n_samples": 2, "max_new_tokens": 4}}
        return estimate(
            settings(actor={"offload": way, **actor}, data=data, **sizes), shape, Role.LEARNER, 1, n_prompt=2
        )

    none, states, everything = map(need, WAYS)
    assert (states.host - none.host, everything.host - none.host) == (8 * n, 16 * n)
    assert none.device == states.device, "the peak is the step of the optimizer, which needs the states"
    assert everything.device < none.device - 11 * n
    assert need("optimizer", advantage="gae").host - need("none", advantage="gae").host == 16 * n
