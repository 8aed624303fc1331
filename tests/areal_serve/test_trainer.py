from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_serve.rejection import Rejected
from areal_serve.trainer import Trainer
from areal_serve.wire import Datum
from tests.areal_serve.parts import CONTEXT, data, request, trainer

LORA = {"rank": 4, "seed": 1}


def parameters(own: Trainer, id: str = "m") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in own.models[id].policy.parameters().items()}


def made(lora: dict[str, Any] | None = LORA) -> Trainer:
    own = trainer()
    own.create("m", lora)
    return own


def learn(own: Trainer, id: str = "m", *, seed: int = 0) -> None:
    own.run(id, request("cross_entropy", data(9, 5, seed=seed)))
    own.step(id, {"learning_rate": 1e-2})


def test_gradients_add_up_over_passes_until_the_step() -> None:
    one, two = made(), made()
    whole = data(9, 5, 12)
    one.run("m", request("cross_entropy", whole))
    for part in (whole[:1], whole[1:]):
        two.run("m", request("cross_entropy", part))
    two.run("m", request("cross_entropy", data(7), forward_only=True))  # adds none
    metrics = [own.step("m", {"learning_rate": 1e-2}) for own in (one, two)]
    assert metrics[0]["grad_norm:mean"] == pytest.approx(metrics[1]["grad_norm:mean"], rel=1e-5)
    for name, tensor in parameters(one).items():
        torch.testing.assert_close(tensor, parameters(two)[name], atol=1e-5, rtol=1e-4)
    before = parameters(one)
    one.step("m", {"learning_rate": 1e-2})  # without a gradient
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters(one).items())


def test_step_is_that_of_adamw_with_the_settings_of_the_call() -> None:
    own = made(None)
    copies = {name: torch.nn.Parameter(tensor) for name, tensor in parameters(own).items()}
    theirs = torch.optim.AdamW(list(copies.values()), betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for turn, rate in enumerate((1e-2, 3e-3)):
        own.run("m", request("cross_entropy", data(9, 5, seed=turn)))
        for name, parameter in own.models["m"].policy.parameters().items():
            assert parameter.grad is not None
            copies[name].grad = parameter.grad.clone()
        theirs.param_groups[0]["lr"] = rate
        torch.nn.utils.clip_grad_norm_(list(copies.values()), 0.5)
        theirs.step()
        settings = {"learning_rate": rate, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
        own.step("m", {**settings, "grad_clip_norm": 0.5})
    for name, tensor in parameters(own).items():
        torch.testing.assert_close(tensor, copies[name].detach(), atol=1e-6, rtol=1e-6)


def test_models_of_one_base_keep_apart() -> None:
    alone, both = made(), made()
    both.create("other", {"rank": 2, "seed": 7})
    both.create("whole", None)
    for turn in range(2):
        learn(alone, seed=turn)
        for id in ("other", "m", "whole"):
            learn(both, id, seed=turn)
    assert all(torch.equal(tensor, parameters(both)[name]) for name, tensor in parameters(alone).items())
    base = dict(both._base.named_parameters())
    fresh = dict(trainer()._base.named_parameters())
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in base.items())
    assert any(
        p.data_ptr() == base["model.embed_tokens.weight"].data_ptr() for p in both.models["m"].policy.model.parameters()
    )


@pytest.mark.parametrize("between_passes", [False, True], ids=["after-a-step", "between-passes"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "whole"])
def test_saved_state_continues_bit_for_bit(tmp_path: Path, lora: dict[str, Any] | None, between_passes: bool) -> None:
    own, folder = made(lora), tmp_path / "weights" / "a"
    learn(own)
    if between_passes:
        own.run("m", request("cross_entropy", data(9, seed=1)))
    own.save("m", folder, optimizer=True, gradients=between_passes, overwrite=False, meta={"call": "m:3"})
    other, fresh = trainer(), trainer()
    other.create("m", lora, folder, optimizer=True)
    for one in (own, other):
        learn(one, seed=4)
    assert all(torch.equal(tensor, parameters(other)[name]) for name, tensor in parameters(own).items())
    fresh.create("m", lora, folder)
    assert not fresh.models["m"].optimizer.state
    assert fresh.models["m"].n_steps == 0


def test_checkpoint_is_replaced_by_its_own_call_or_on_request_only(tmp_path: Path) -> None:
    own, folder = made(), tmp_path / "weights" / "a"
    own.save("m", folder, optimizer=True, overwrite=False, meta={"call": "m:3"})
    learn(own)
    own.save("m", folder, optimizer=True, overwrite=False, meta={"call": "m:3"})
    with pytest.raises(Rejected, match="checkpoint 'a' exists"):
        own.save("m", folder, optimizer=True, overwrite=False, meta={"call": "m:4"})
    own.save("m", folder, optimizer=False, overwrite=True, meta={"call": "m:4"})
    with pytest.raises(Rejected, match="missing optimizer state"):
        own.load("m", folder, optimizer=True)
    own.load("m", folder, optimizer=False)


def test_load_is_refused_for_weights_of_another_kind_or_rank(tmp_path: Path) -> None:
    own = made()
    own.create("whole", None)
    own.create("wider", {"rank": 8, "seed": 1})
    own.save("m", tmp_path / "a", optimizer=True, overwrite=False, meta={})
    with pytest.raises(Rejected, match="kind mismatch"):
        own.load("whole", tmp_path / "a", optimizer=False)
    with pytest.raises(Rejected, match="shape mismatch"):
        own.load("wider", tmp_path / "a", optimizer=False)
    with pytest.raises(Rejected, match="missing checkpoint"):
        own.create("new", LORA, tmp_path / "b")
    assert "new" not in own.models


def test_adapters_are_on_the_chosen_layers() -> None:
    own = made({"rank": 2, "seed": 1, "train_mlp": False})
    assert {name.split(".")[-3] for name in parameters(own)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(Rejected, match="no layer would have an adapter"):
        own.create("none", {"rank": 2, "seed": 1, "train_mlp": False, "train_attn": False})


def wrong(**inputs: Any) -> Datum:
    (given,) = data(5)
    return Datum(given.ids_T, {**given.inputs, **inputs})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (wrong(advantages=np.array([1, np.nan, 0, 0, 0], np.float32)), "advantages of datum 0 holds a NaN"),
        (wrong(logprobs=np.full(5, -np.inf, np.float32)), "logprobs of datum 0 holds a NaN"),
        (wrong(logprobs=np.zeros(4, np.float32)), "shape mismatch in datum 0: logprobs"),
        (wrong(target_tokens=np.zeros(4, np.int64)), "shape mismatch in datum 0: 5 tokens"),
        (wrong(target_tokens=np.full(5, 9999)), "unknown token in datum 0"),
        (Datum(np.zeros(5, np.int64), {}), "missing target_tokens in datum 0"),
        (Datum(np.zeros(0, np.int64), {}), "too long or empty: it has 0 tokens"),
        (data(CONTEXT + 1)[0], f"it has {CONTEXT + 1} tokens, the context holds {CONTEXT}"),
        (wrong(logprobs=np.full(5, -1e4, np.float32)), "loss importance_sampling is"),
    ],
)
def test_refused_pass_leaves_the_gradients_of_earlier_ones(given: Datum, words: str) -> None:
    own = made()
    own.run("m", request("cross_entropy", data(9, 5)))
    before = [p.grad.clone() for p in own.models["m"].policy.parameters().values() if p.grad is not None]
    with pytest.raises(Rejected, match=words):
        own.run(
            "m",
            request("importance_sampling", [*data(20), given])
            if "datum 0" not in words
            else request("importance_sampling", [given]),
        )
    after = [p.grad for p in own.models["m"].policy.parameters().values() if p.grad is not None]
    assert before
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("settings", [{"lr": 1.0}, {"learning_rate": float("nan")}, {"beta1": 1.0}, {"eps": "x"}])
def test_step_is_refused_for_settings_without_a_meaning(settings: dict[str, Any]) -> None:
    own = made()
    own.run("m", request("cross_entropy", data(5)))
    before = parameters(own)
    with pytest.raises(Rejected):
        own.step("m", settings)
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters(own).items())
