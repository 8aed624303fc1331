"""Each loss and its gradient against float64 on one process's whole sequences."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from actors.models.loading import load_base
from actors.models.lora import names_of
from areal_serve.losses import LOSSES, find_loss
from areal_serve.rejection import Rejected
from areal_serve.trainer import ALPHA, Trainer
from areal_serve.wire import Datum
from tests.areal_serve.parts import CONFIG, data, datum, model_folder, request, trainer

CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
}


def reference(name: str, logp: Tensor, own: Datum, config: dict[str, float]) -> Tensor:
    """The documented formula, of one datum, in float64."""
    get = {key: torch.from_numpy(value.astype(np.float64)) for key, value in own.inputs.items()}
    if name == "cross_entropy":
        return -(logp * get["weights"]).sum()
    gap, advantage = logp - get["logprobs"], get["advantages"]
    ratio = gap.exp()
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "dro":
        return -(logp * advantage - 0.5 * config["beta"] * gap**2).sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * logp * advantage).sum()
    if name == "gspo":
        mean = gap.detach()[get["sequence_ratio_mask"] != 0].mean()
        ratio = torch.exp(mean + logp - logp.detach())
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()


class Exact:
    """The model of a trainer in float64: its trained parameters as leaves, merged into the base by autograd."""

    def __init__(self, own: Trainer) -> None:
        self._model = load_base(CONFIG, str(model_folder()), "cpu").double()
        policy, lora = own.models["m"].policy, own.models["m"].lora
        self.leaves = {name: p.detach().double().requires_grad_() for name, p in policy.parameters().items()}
        self._weights = {name: p.detach() for name, p in self._model.named_parameters()}
        if lora is None:
            self._weights = dict(self.leaves)
            return
        for layer in {name.partition(".lora_")[0] for name in self.leaves}:
            a_RE, b_FR = (self.leaves[name] for name in names_of(layer))
            self._weights[f"{layer}.weight"] = self._weights[f"{layer}.weight"] + ALPHA / lora["rank"] * b_FR @ a_RE

    def logps(self, own: Datum) -> Tensor:
        given = {"input_ids": torch.from_numpy(own.ids_T)[None], "use_cache": False}
        logits = functional_call(self._model, self._weights, kwargs=given).logits[0]
        targets = torch.from_numpy(own.inputs["target_tokens"])
        found: Tensor = logits.log_softmax(-1).gather(1, targets.reshape(len(own.ids_T), -1))
        return found.reshape(targets.shape)


@pytest.fixture(scope="module")
def own() -> Trainer:
    return trainer()


@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "whole"])
def test_losses_equal_a_float64_reference_over_several_micro_batches(own: Trainer, whole: bool) -> None:
    own.create("m", None if whole else {"rank": 4, "seed": 1})
    own.run("m", request("cross_entropy", data(9, 5)))
    own.step("m", {"learning_rate": 1e-2})  # B is no longer zero
    given = data(11, 7, 23, 4, 16, seed=3)
    for name, config in CONFIGS.items():
        exact = Exact(own)
        logps = [exact.logps(one) for one in given]
        expected = sum(reference(name, logp, one, config) for logp, one in zip(logps, given, strict=True))
        assert isinstance(expected, Tensor)
        expected.backward()  # type: ignore[no-untyped-call]
        found = own.run("m", request(name, given, **config))
        assert found.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5), name
        for logp, one in zip(logps, found.logps, strict=True):
            np.testing.assert_allclose(one, logp.detach().numpy(), atol=1e-5)
        check_gradients(own, exact)


def check_gradients(own: Trainer, exact: Exact) -> None:
    """Those of the trainer are the exact ones; afterwards it has none."""
    theirs = {name: leaf.grad for name, leaf in exact.leaves.items() if leaf.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, parameter in own.models["m"].policy.parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), theirs[name], atol=1e-5 * scale, rtol=1e-4)
        parameter.grad = None


def test_loss_takes_several_targets_of_a_position(own: Trainer) -> None:
    own.create("m", None)
    given = [datum(np.random.default_rng(1), 6, targets=3), datum(np.random.default_rng(2), 5, targets=3)]
    exact = Exact(own)
    expected = sum(float(reference("cross_entropy", exact.logps(one), one, {}).detach()) for one in given)
    found = own.run("m", request("cross_entropy", given))
    assert [one.shape for one in found.logps] == [(6, 3), (5, 3)]
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_thresholds_of_a_datum_win_over_those_of_the_config(own: Trainer) -> None:
    own.create("m", None)
    first, second = data(8, 8)
    high = np.full(8, 1.01, np.float32)
    alone = [own.run("m", request("ppo", [first], forward_only=True, clip_high_threshold=1.01))]
    alone += [own.run("m", request("ppo", [second], forward_only=True))]
    both = [Datum(first.ids_T, {**first.inputs, "clip_high_threshold": high}), second]
    found = own.run("m", request("ppo", both, forward_only=True))
    assert found.metrics["loss:sum"] == pytest.approx(sum(one.metrics["loss:sum"] for one in alone), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_position_adds_nothing_whatever_its_log_prob_is(name: str) -> None:
    if name == "dro":
        return  # its quadratic term counts every position
    loss, needed, config = LOSSES[name]
    inputs = {key: torch.zeros(3) for key in (*needed, "advantages")}
    logp = torch.tensor([-1e30, -500.0, 0.0], requires_grad=True)
    value = loss(logp, {**inputs, "logprobs": torch.full((3,), -900.0)}, config, [3])
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0
    assert logp.grad is not None
    assert not logp.grad.any()


@pytest.mark.parametrize(
    ("loss_fn", "config", "words"),
    [
        ("dpo", {}, "unknown loss 'dpo'"),
        ("ppo", {"clip": 0.2}, "unknown key 'clip'"),
        ("ppo", {"clip_low_threshold": float("nan")}, "invalid clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "low"}, "invalid clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "it has none"),
    ],
)
def test_loss_is_refused_with_a_sentence(loss_fn: str, config: dict[str, float | str], words: str) -> None:
    with pytest.raises(Rejected, match=words):
        find_loss(loss_fn, config)
