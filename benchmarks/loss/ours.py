"""Our side of the bench `loss`, and its float64 reference."""

import torch
from torch import Tensor

from actors.learner.algorithms.fused import decoupled_ppo, gap, mismatch
from benchmarks.harness.worker_main import seconds, serve
from benchmarks.loss.inputs import draw

EPS = 0.2


class LossWork:
    """One forward and backward with all statistics that a training step journals of it."""

    def __init__(self, n: int, seed: int) -> None:
        self.theta_N, self.prox_N, self.behav_N, self.advantage_N = draw(n, seed)
        self.theta_N.requires_grad_()
        self.n = n
        self.loss = 0.0
        self.figures: dict[str, float] = {}

    def __call__(self) -> None:
        self.theta_N.grad = None
        apart = gap(self.prox_N, self.behav_N)
        terms = decoupled_ppo(self.theta_N, self.prox_N, apart.weight_N, self.advantage_N, eps_clip=EPS, cap=None)
        loss = terms.loss / self.n
        loss.backward()  # type: ignore[no-untyped-call]
        seen = mismatch(terms.ratio_N * apart.weight_N, apart)
        self.loss = float(loss.detach())
        self.figures = {
            "kl": seen.kl / self.n,
            "largest": seen.largest,
            "weight": seen.weight / self.n,
            "weight_squared": seen.weight_squared / self.n,
            "clipped": float(terms.clipped) / self.n,
        }


def loss(n: int, seed: int) -> dict[str, float]:
    work = LossWork(n, seed)
    took = seconds(work)
    return {"seconds": took, "loss": work.loss, "max_error": max_error(work)}


def alone(n: int, seed: int) -> dict[str, float]:
    """The loss without the inputs of its statistics."""
    theta_N, prox_N, behav_N, advantage_N = draw(n, seed)
    theta_N.requires_grad_()
    last = [0.0]

    def work() -> None:
        theta_N.grad = None
        weight_N = torch.exp(prox_N - behav_N)
        loss = decoupled_ppo(theta_N, prox_N, weight_N, advantage_N, eps_clip=EPS, cap=None).loss / n
        loss.backward()  # type: ignore[no-untyped-call]
        last[0] = float(loss.detach())

    return {"seconds": seconds(work), "loss": last[0]}


def max_error(work: LossWork) -> float:
    """Largest distance from a float64 computation by autograd: of the loss, each statistic (means over tokens) and the
    gradient of the sum of token losses by each token.
    """
    theta, prox, behav, advantage = (
        x.detach().double() for x in (work.theta_N, work.prox_N, work.behav_N, work.advantage_N)
    )
    theta.requires_grad_()
    ratio = torch.exp(theta - prox)
    plain, bounded = ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage
    total = -(torch.exp(prox - behav) * torch.minimum(plain, bounded)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    importance, d = torch.exp(theta.detach() - behav), prox - behav
    exact: dict[str, Tensor] = {
        "kl": (torch.expm1(d) - d).mean(),
        "largest": d.abs().max(),
        "weight": importance.mean(),
        "weight_squared": importance.square().mean(),
        "clipped": (bounded < plain).double().mean(),
    }
    errors = [abs(work.figures[name] - float(value)) for name, value in exact.items()]
    if work.theta_N.grad is None or theta.grad is None:
        raise RuntimeError("a backward pass leaves a gradient")
    gradients = (work.theta_N.grad.double() * work.n - theta.grad).abs().max()
    return max(abs(work.loss - float(total.detach()) / work.n), float(gradients), *errors)


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"loss": loss, "alone": alone})
