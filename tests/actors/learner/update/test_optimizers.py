"""Optimizers of the policy: each steps as torch's own, sharded or not, and goes on from a checkpoint bit for bit."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from actors.learner.batching import build
from actors.learner.checkpoint import checkpoint
from actors.learner.link.rendezvous import meet, part
from actors.learner.update import optimizers
from actors.learner.update.optimizers import LearningRates, Muon, check_torchao, kept, plain
from actors.learner.update.ppo import PPOActor
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.weights.process_group import join_store
from tests.support.forked_ranks import run_ranks
from tests.support.learner_setup import random_shard, settings, tiny_actor, tiny_model

LR, OTHER_LR, DECAY = 1e-2, 1e-3, 0.1
FORMS = [(64, 32), (32, 64), (33, 7), (7, 33), (1, 8), (3, 3)]
NO_DECAY = [{"match": "norm|bias", "weight_decay": 0.0}]


def config_of(optimizer: str, **more: Any) -> Config:
    return settings(actor={"lr": LR, "optimizer": optimizer, "max_grad_norm": 1e9, "weight_decay": DECAY, **more})


def train(actor: PPOActor, versions: range) -> None:
    for version in versions:
        batch = build(random_shard(version, clock=version), step=version, clock=version, n_groups=3, eta=0)
        actor.ppo_update(actor.compute_advantages_and_returns(batch))


def held(actor: PPOActor) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in actor.policy.parameters().items()}


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz as Jordan publishes it, of a wide matrix; the order of operations decides its rounding."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.shape[0] <= matrix.shape[1] else matrix.bfloat16().T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).float()


def test_muon_steps_matrices_by_its_formula_and_the_rest_by_adamw(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of("muon", adamw_lr=OTHER_LR))
    before = held(actor)
    momentum = {name: torch.zeros_like(value) for name, value in before.items()}
    others = {name: nn.Parameter(value.clone()) for name, value in before.items() if not is_matrix(name)}
    adamw = torch.optim.AdamW(others.values(), lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for version in range(3):
        train(actor, range(version, version + 1))
        for name, parameter in actor.policy.parameters().items():
            assert parameter.grad is not None
            if not is_matrix(name):
                others[name].grad = parameter.grad.clone()
                continue
            momentum[name] = momentum[name].lerp(parameter.grad, 1 - 0.95)
            direction = orthogonal(parameter.grad.lerp(momentum[name], 0.95))
            size = 0.2 * max(parameter.shape) ** 0.5
            before[name] = before[name] * (1 - LR * DECAY) - LR * size * direction
        adamw.step()
    found = held(actor)
    assert sum(map(is_matrix, found)) == 14
    for name, value in found.items():
        wanted = before[name] if is_matrix(name) else others[name].detach()
        torch.testing.assert_close(value, wanted, atol=1e-6, rtol=0)


def is_matrix(name: str) -> bool:
    return "proj" in name


def steps_of_a_rank(index: int, endpoint: str, size: int) -> None:
    """Fails unless three steps of sharded matrices are those of whole ones, bit for bit."""
    store = join_store(endpoint, 60.0)
    meet(store, index=index, size=size, interface="lo", device="cpu", timeout_s=60.0)
    mesh = init_device_mesh("cpu", (size,))
    for rows, columns in FORMS:
        draw = torch.Generator().manual_seed(rows)
        start = torch.randn(rows, columns, generator=draw)
        alone = nn.Parameter(start.clone())
        sharded = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        pair = [Muon([one], lr=LR, weight_decay=DECAY) for one in (alone, sharded)]
        torchs_own = nn.Parameter(start.clone())
        reference = torch.optim.Muon([torchs_own], lr=LR, weight_decay=DECAY)
        for _ in range(3):
            gradient = torch.randn(rows, columns, generator=draw)
            alone.grad, torchs_own.grad = gradient.clone(), gradient.clone()
            sharded.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            for optimizer in (*pair, reference):
                optimizer.step()
        assert torch.equal(sharded.full_tensor(), alone), (rows, columns)  # type: ignore[attr-defined]
        torch.testing.assert_close(alone, torchs_own, atol=1e-6, rtol=0)
        assert not torch.equal(alone, start)
    part()


@pytest.mark.slow
def test_muon_steps_a_sharded_matrix_as_a_whole_one() -> None:
    """Also one with fewer rows than ranks, which torch's own step refuses."""
    run_ranks(__name__, steps_of_a_rank.__name__, {"size": 2})


def test_adamw_and_sgd_are_torchs_own(tmp_path: Path) -> None:
    for name, make in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        actor = tiny_actor(tmp_path / name, config_of(name))
        copies = [nn.Parameter(value) for value in held(actor).values()]
        how: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
        wanted = make(copies, **how, **({"betas": (0.9, 0.95)} if name == "adamw" else {}))
        for version in range(2):
            train(actor, range(version, version + 1))
            for copy, parameter in zip(copies, actor.policy.parameters().values(), strict=True):
                copy.grad = parameter.grad
            wanted.step()
        for copy, value in zip(copies, held(actor).values(), strict=True):
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


def test_a_pattern_of_no_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unused pattern 'router' in \[\[actor.group\]\]"):
        tiny_actor(tmp_path, config_of("adamw", group=[{"match": "router", "lr_scale": 0.1}]))


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "muon", "adamw_lr": OTHER_LR},
        {"optimizer": "muon", "lora": {"rank": 4, "dropout": 0.1}},
        {"optimizer": "adamw", "group": NO_DECAY},
        {"optimizer": "sgd"},
    ],
    ids=lambda more: "-".join(map(str, more)),
)
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path: Path, more: dict[str, Any]) -> None:
    config = settings(actor={"lr": 1e-3, "weight_decay": DECAY, "ppo_epochs": 2, **more})
    first = tiny_actor(tmp_path / "a", config)
    train(first, range(2))
    folder = save(first, tmp_path / "kept")
    second = tiny_actor(tmp_path / "b", config)
    second.policy.model.load_state_dict(first.policy.model.state_dict())
    checkpoint.restore(checkpoint.load(folder), policy=second.policy, optimizer=second.optimizer)
    second.version = first.version
    for actor in (first, second):
        train(actor, range(2, 4))
    for (name, ours), theirs in zip(held(first).items(), held(second).values(), strict=True):
        assert torch.equal(ours, theirs), name


class Words:
    """Stands where a tokenizer does in an export."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "words.json").write_text("{}")


def save(actor: PPOActor, folder: Path) -> Path:
    how: dict[str, Any] = {"version": actor.version, "tokenizer": Words(), "keep": 1}
    return checkpoint.save(folder, policy=actor.policy, optimizer=actor.optimizer, **how)


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
    far = max(float((a - b).abs().max()) for a, b in zip(held(first).values(), held(exact).values(), strict=True))
    assert 0 < far < 2e-3  # of three steps of 1e-3
    parameter = max(first.policy.parameters().values(), key=lambda one: one.numel())
    state = first.optimizer.state[parameter]["exp_avg"]
    assert type(state).__name__ == "OptimState8bit"
    folder = save(first, tmp_path / "kept")
    second = tiny_actor(tmp_path / "b", wide("adamw8bit"), model=wide_model())
    checkpoint.restore(checkpoint.load(folder), policy=second.policy, optimizer=second.optimizer)
    largest = max(second.policy.parameters().values(), key=lambda one: one.numel())
    again = second.optimizer.state[largest]["exp_avg"]
    assert type(again) is type(state)
    wanted = state.dequantize()
    assert float((again.dequantize() - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    assert not torch.equal(wanted, torch.zeros_like(wanted))


def wide_model() -> Any:
    """A model with a matrix of 4,096 numbers: smaller ones have states in float32."""
    model = tiny_model()
    model.config.intermediate_size = 128
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(model.config)


def wide(optimizer: str) -> Config:
    return settings(actor={"lr": 1e-3, "optimizer": optimizer, "adam_eps": 1e-4, "max_grad_norm": 1e9})


def test_a_missing_torchao_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "has_package", lambda name: False)
    with pytest.raises(ConfigError, match=r"missing package torchao, .* run .*install .*areal-bus\[adamw8bit\]"):
        check_torchao()


def test_states_without_8_bits_stay_as_they_are() -> None:
    parameter, value = nn.Parameter(torch.zeros(3)), torch.ones(3)
    assert plain(value) is value
    assert kept(torch.optim.AdamW([parameter]), parameter, "exp_avg", value)[1] is value


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def test_an_optimizer_of_ones_own_steps_and_follows_the_schedule(tmp_path: Path, mine: ModuleType) -> None:
    mine.make = lambda parameters, actor: torch.optim.RMSprop(parameters.values(), lr=2 * actor.lr)  # type: ignore[attr-defined]
    actor = tiny_actor(tmp_path, settings(actor={"lr": LR, "optimizer": "mine:make", "lr_warmup_steps": 2}))
    start = held(actor)
    train(actor, range(1))
    assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(LR)  # half of twice
    assert any(not torch.equal(start[name], value) for name, value in held(actor).items())


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


class Own(torch.optim.Optimizer):
    """Momentum, with numbers of Python in its state, as many have them."""

    def __init__(self, parameters: Any, extra: Any = None) -> None:
        super().__init__(list(parameters), {"lr": LR})
        self._extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {
                    "step": 0,
                    "beta": 0.9,
                    "is_warm": True,
                    "m": torch.zeros_like(parameter),
                    "extra": self._extra,
                }
            state["step"] += 1
            state["m"].mul_(state["beta"]).add_(parameter.grad)
            parameter.add_(state["m"], alpha=-LR / state["step"])


@pytest.mark.parametrize("kind", ["own", "rmsprop", "adagrad", "nadam"])
def test_an_optimizer_of_ones_own_goes_on_bit_for_bit_after_a_resume(
    tmp_path: Path, mine: ModuleType, kind: str
) -> None:
    makes: dict[str, Any] = {
        "own": Own,
        "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=LR, momentum=0.9, centered=True),
        "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=LR),
        "nadam": lambda ps: torch.optim.NAdam(ps, lr=LR),
    }
    mine.make = lambda parameters, actor: makes[kind](parameters.values())  # type: ignore[attr-defined]
    config = settings(actor={"lr": LR, "optimizer": "mine:make"})
    first = tiny_actor(tmp_path / "a", config)
    train(first, range(2))
    folder = save(first, tmp_path / "kept")
    second = tiny_actor(tmp_path / "b", config)
    second.policy.model.load_state_dict(first.policy.model.state_dict())
    checkpoint.restore(checkpoint.load(folder), policy=second.policy, optimizer=second.optimizer)
    second.version = first.version
    for actor in (first, second):
        train(actor, range(2, 4))
    for (name, ours), theirs in zip(held(first).items(), held(second).values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("extra", [torch.zeros(2), [1.0], {}, "text"])
def test_a_state_that_no_checkpoint_holds_is_refused_after_the_first_update(
    tmp_path: Path, mine: ModuleType, extra: Any
) -> None:
    mine.make = lambda parameters, actor: Own(parameters.values(), extra)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"unsupported state 'extra' of actor.optimizer"):
        train(tiny_actor(tmp_path, settings(actor={"lr": LR, "optimizer": "mine:make"})), range(1))


def test_learning_rates_keep_their_ratios() -> None:
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.02}])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.02)
    LearningRates(optimizer, 0.1).set(0.05)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"optimizer": "adam"}, "unknown actor.optimizer 'adam': it is one of adamw, muon, adamw8bit, sgd"),
        ({"adamw_lr": 1e-3}, "actor.adamw_lr is for actor.optimizer = .muon."),
        ({"optimizer": "sgd", "adam_eps": 1e-4}, "actor.adam_eps is for AdamW"),
        ({"optimizer": "m:make", "weight_decay": 0.1}, "actor.weight_decay is for the named optimizers"),
        ({"group": [{"match": "("}]}, r"wrong match in \[\[actor.group\]\]: '\(' is not a regular expression"),
    ],
)
def test_settings_that_an_optimizer_does_not_read_are_refused(actor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings(actor=actor, data={"task": "sums", "chat_template": False}))
