"""The optimizer of the policy: AdamW, Muon, SGD (torch), 8-bit AdamW (torchao), the user's own. A critic: AdamW."""

import math
import re
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from actors.learner.model.policy import Policy, whole
from actors.models.lora import has_package
from actors.runtime.user_code import cause, load_function
from areal_bus.config.algorithms import is_users
from areal_bus.config.learner import ActorConfig
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

Groups = list[dict[str, Any]]  # of torch: "params", "lr", "weight_decay"

HOST = torch.device("cpu")
MOMENTUM = 0.95  # of Muon


class Muon(torch.optim.Muon):
    """torch's Muon with Moonshot's size of a step. A sharded matrix is gathered: its update depends on all rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = whole(gradient.lerp(state["momentum_buffer"], group["momentum"]))
        form = torch.float32 if direction.device == HOST else torch.bfloat16
        move = orthogonalised(direction, group, form).to(parameter.dtype)
        move.mul_(-group["lr"] * 0.2 * math.sqrt(max(direction.shape)))
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            move = DTensor.from_local(move, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, parameter.placements)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(move)


def orthogonalised(matrix: Tensor, group: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Singular values near 1, by Newton-Schulz steps as in torch's Muon, which computes in bfloat16 everywhere.

    On a CPU without instructions for it that takes 35 times as long as float32.
    """
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).to(dtype)
    x = x / x.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Both(torch.optim.Optimizer):
    """Two optimizers as one: their groups and their state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def make_optimizer(policy: Policy, actor: ActorConfig) -> torch.optim.Optimizer:
    """Raises ConfigError for a group without parameters, a missing package, and a wrong result of the user's own."""
    if is_users(actor.optimizer):
        return _users(policy.parameters(), actor)
    groups = parameter_groups(policy.parameters(), actor)
    betas = (actor.adam_beta1, actor.adam_beta2)
    if actor.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=actor.lr)
    if actor.optimizer == "adamw8bit":
        check_torchao()
        from torchao.optim import AdamW8bit  # optional

        made: torch.optim.Optimizer = AdamW8bit(groups, lr=actor.lr, betas=betas, eps=actor.adam_eps)
        return made
    fused = True if not policy.sharded and policy.device.type == "cpu" else None  # None: torch chooses
    if actor.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=actor.lr, betas=betas, eps=actor.adam_eps, fused=fused)
    matrices = {id(parameter) for parameter in matrices_of(policy)}
    rest = parameter_groups(policy.parameters(), actor, lr=actor.adamw_lr)
    parts: list[torch.optim.Optimizer] = []
    if by_muon := _only(groups, lambda parameter: id(parameter) in matrices):
        parts.append(Muon(by_muon, lr=actor.lr, momentum=MOMENTUM))
    if by_adamw := _only(rest, lambda parameter: id(parameter) not in matrices):
        parts.append(torch.optim.AdamW(by_adamw, lr=actor.lr, betas=betas, eps=actor.adam_eps, fused=fused))
    return Both(*parts)


def matrices_of(policy: Policy) -> list[nn.Parameter]:
    """Parameters that Muon trains: matrices, except embeddings and the head."""
    model = policy.model
    ends = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return [one for one in policy.parameters().values() if one.ndim == 2 and id(one) not in ends]


def parameter_groups(parameters: Mapping[str, nn.Parameter], actor: ActorConfig, lr: float | None = None) -> Groups:
    """Parameters with equal settings together. The first of [[actor.group]] whose pattern a name contains applies."""
    base = actor.lr if lr is None else lr
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    used = set()
    for name, parameter in parameters.items():
        group = next((one for one in actor.group if re.search(one.match, name)), None)
        used.add(group)
        decay = actor.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        found.setdefault((base if group is None else base * group.lr_scale, decay), []).append(parameter)
    if idle := [one.match for one in actor.group if one not in used]:
        raise ConfigError(
            f"unused pattern {idle[0]!r} in [[actor.group]]: no trained parameter has a name with it, or an earlier "
            f"table takes all that do; the names are like {next(iter(parameters))!r}"
        )
    return [{"params": held, "lr": lr, "weight_decay": decay} for (lr, decay), held in found.items()]


def _only(groups: Groups, wanted: Any) -> Groups:
    chosen = [{**group, "params": [one for one in group["params"] if wanted(one)]} for group in groups]
    return [group for group in chosen if group["params"]]


def check_torchao() -> None:
    """Raises ConfigError without torchao. Imports nothing."""
    if not has_package("torchao"):
        raise ConfigError(
            f'missing package torchao, which actor.optimizer = "adamw8bit" needs: run {install_command("adamw8bit")}'
        )


def _users(parameters: Mapping[str, nn.Parameter], actor: ActorConfig) -> torch.optim.Optimizer:
    make = load_function("actor.optimizer", actor.optimizer)
    try:
        made = make(dict(parameters), actor)
    except Exception as error:
        raise ConfigError(f'actor.optimizer = "{actor.optimizer}" failed: {cause(error)}') from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f'actor.optimizer = "{actor.optimizer}" returns a torch.optim.Optimizer: got {type(made).__name__}'
        )
    if any("lr" not in group for group in made.param_groups):
        raise ConfigError(f'missing lr in a group of actor.optimizer = "{actor.optimizer}": the schedule sets it')
    if any(
        one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        for one in signature(made.step).parameters.values()
    ):
        raise ConfigError(
            f'unsupported actor.optimizer = "{actor.optimizer}": its step needs an argument (a closure), and an update '
            "calls it once, without"
        )
    held = [id(one) for group in made.param_groups for one in group["params"]]
    if sorted(held) != sorted(map(id, parameters.values())):
        raise ConfigError(
            f'mismatch in the parameters of actor.optimizer = "{actor.optimizer}": each of the {len(parameters)} '
            f"trained ones is in one group; it has {len(held)}"
        )
    return made


def check_states(optimizer: torch.optim.Optimizer, actor: ActorConfig) -> None:
    """Raises ConfigError for a state of the user's own that no checkpoint would hold. After a first step."""
    for parameter, states in optimizer.state.items() if is_users(actor.optimizer) else ():
        for kind, value in states.items():
            is_number = isinstance(value, int | float | None) or (isinstance(value, Tensor) and not value.dim())
            if not is_number and getattr(value, "shape", None) != parameter.shape:
                form = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(
                    f'unsupported state {kind!r} of actor.optimizer = "{actor.optimizer}", {form} for a parameter of '
                    f"the form {list(parameter.shape)}: a checkpoint keeps tensors of the parameter's form and single "
                    "numbers, and a resume would lose any other"
                )


class LearningRates:
    """Sets the learning rate of each group: actor.lr's, times what the group had of it at the start."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self._groups = [(group, float(group["lr"]) / lr) for group in optimizer.param_groups]

    def set(self, lr: float) -> None:
        for group, share in self._groups:
            if isinstance(group["lr"], Tensor):  # torchao compiles its step
                group["lr"].fill_(lr * share)
            else:
                group["lr"] = lr * share


def offload(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep the states in host memory between steps; they come to the device for one."""
    optimizer.register_step_pre_hook(lambda *_: move_states(optimizer, device))
    optimizer.register_step_post_hook(lambda *_: move_states(optimizer, HOST))


def move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all states but single numbers."""
    for state in optimizer.state.values():
        tensors = {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim()}
        state.update({kind: value.to(device) for kind, value in tensors.items()})


NUMBERS = {one.__name__: one for one in (bool, int, float)}  # states that are numbers of Python


def key_of(kind: str, value: Any) -> str:
    """Of a state in a checkpoint: one that is a number of Python has its type behind its name."""
    return kind if isinstance(value, Tensor) else f"{kind}={type(value).__name__}"


def plain(value: Any) -> Tensor:
    """A state in the type of a checkpoint: one of 8 bits as float32, a number as a tensor."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "dequantize") or type(local) is Tensor:
        return value
    numbers = local.dequantize()
    if not isinstance(value, DTensor):
        return numbers
    how: dict[str, Any] = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(numbers, value.device_mesh, value.placements, **how)


def kept(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Tensor) -> tuple[str, Any]:
    """The reverse of `key_of` and `plain`: name and value of a state as the optimizer keeps it."""
    kind, _, number = key.partition("=")
    if number in NUMBERS:
        return kind, NUMBERS[number](value.item())
    make = getattr(optimizer, "_new_buffer", None)  # of torchao
    if make is None or value.shape != parameter.shape:
        return kind, value
    buffer: Tensor = make(parameter, kind == "exp_avg")
    held, numbers = (one.to_local() if isinstance(one, DTensor) else one for one in (buffer, value))
    held.copy_(numbers)
    return kind, buffer
