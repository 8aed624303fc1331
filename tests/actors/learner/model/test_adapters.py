"""Adapters: what is trained, pushed, merged and written; the model's own weights never change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from actors.engines.adapter_engine import AdapterEngine
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.adapters import Adapters
from actors.learner.model.policy import Policy
from actors.learner.model.startup import load_policy
from actors.learner.update.ppo import PPOActor
from actors.models.loading import check_model_path, load_model
from actors.models.lora import adapted_layers, merged
from actors.models.packed_row import SequencePiece
from areal_bus.config.algorithms import refusals
from areal_bus.config.learner import LoraConfig
from areal_bus.config.sections import Config
from areal_bus.errors import CheckpointError, ConfigError, EngineError
from launch.checks.model_checks import check_lora
from tests.support.learner_setup import save, scratch_tokenizer, settings, tiny_actor, tiny_model, train, weights
from tools.offline.save_hf import save_hf

LORA = {"rank": 4, "alpha": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "rslora": {**LORA, "variant": ["rslora"]},
    "dora": {**LORA, "variant": ["dora"]},
    "groups": {
        **LORA, "variant": ["rslora", "dora"], "target_modules": {"q_proj": 2, "up_proj": [8, 3.5], "v_proj": [4, 6]}
    },
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 2, 3, 4, 9]])
SETTINGS: dict[str, Any] = {"ranks": LearnerRanks(), "device": "cpu", "temperature": 1.0}
PEFT_USES = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def lora_config(**actor: Any) -> Config:
    return settings(actor={"lr": 1e-2, "lora": LORA, **actor})


def save_run(actor: PPOActor, folder: Path) -> Path:
    return save(actor, folder / "checkpoints", tokenizer=scratch_tokenizer(folder / "scratch"))


def base(folder: Path) -> str:
    tiny_model().save_pretrained(folder / "base")
    return str(folder / "base")


def policy_of(config: Config, model: str, held: str = "") -> Policy:
    """From a folder, not from scratch."""
    path = config.model.model_copy(update={"scratch": None, "path": model})
    return load_policy(config.model_copy(update={"model": path}), model, SETTINGS, checkpoint=held)


def logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.logprobs([SequencePiece(IDS[0], torch.arange(1, IDS.shape[1]))])[0]


def plain_logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)[0, :-1].gather(1, IDS[0, 1:, None])[:, 0]  # type: ignore[no-any-return]


def test_only_adapters_are_trained_and_pushed(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, lora_config())
    assert torch.allclose(logprobs(actor.policy), plain_logprobs(tiny_model().eval()), atol=1e-5)  # B is zero
    train(actor, range(2))
    held = {id(parameter) for group in actor.optimizer.param_groups for parameter in group["params"]}
    names = set(actor.policy.parameters())
    assert held == {id(parameter) for parameter in actor.policy.parameters().values()}
    assert names == {f"{layer}.lora_{x}.weight" for layer in adapted_layers(tiny_model(), ()) for x in "AB"}
    assert set(actor.policy.pushed()) == names | {"base.digest"}
    plain = dict(tiny_model().named_parameters())
    assert all(torch.equal(weight, plain[name]) for name, weight in actor.policy.adapters.base().items())
    assert all(parameter.abs().max() > 0 for parameter in actor.policy.parameters().values())


@pytest.mark.filterwarnings(PEFT_USES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_merges_as_peft_does_from_the_base_each_time(tmp_path: Path, variant: str) -> None:
    lora = LoraConfig.model_validate(VARIANTS[variant])
    actor = tiny_actor(tmp_path, lora_config(lora=lora), model=load_model(base(tmp_path), "float32", "cpu"))
    plain_logp_T = plain_logprobs(load_model(base(tmp_path), "float32", "cpu"))
    assert torch.allclose(logprobs(actor.policy), plain_logp_T, atol=1e-6)  # version 0 is the base
    model = load_model(base(tmp_path), "float32", "cpu")
    inner = BuiltinEngine(model, EngineOptions(n_slots=2), stop_ids=frozenset({1}))
    layers = list(adapted_layers(model, lora.target_modules))
    engine = AdapterEngine(inner, inner.parameters(), layers, lora, base_on=torch.device("cpu"), is_live=True)
    assert {name: form.shape for name, form in engine.parameters().items()} == {
        name: tensor.shape for name, tensor in actor.policy.pushed().items()
    }
    for version in range(3):  # many merges leave no trace
        tensors = {name: tensor.detach().clone() for name, tensor in actor.policy.pushed().items()}
        engine.update(version, tensors)
        train(actor, range(version, version + 1))
    tensors = {name: tensor.detach().clone() for name, tensor in actor.policy.pushed().items()}
    engine.update(3, tensors)
    plain = PeftModel.from_pretrained(tiny_model(), save_run(actor, tmp_path) / "model")
    assert torch.allclose(logprobs(actor.policy), plain_logprobs(plain), atol=1e-5)
    expected = dict(plain.merge_and_unload().named_parameters())
    live = inner.parameters()
    assert live.keys() == expected.keys()
    assert all(torch.allclose(live[name], expected[name], atol=1e-6, rtol=0) for name in live)
    assert "dora" in lora.variant or all(torch.equal(live[name], expected[name]) for name in live)
    assert actor.policy.adapters is not None
    with actor.policy.adapters.off():
        assert torch.allclose(logprobs(actor.policy), plain_logp_T, atol=1e-6)
    assert not torch.allclose(logprobs(actor.policy), plain_logp_T, atol=1e-2)
    before = {name: weight.clone() for name, weight in live.items()}
    other = tensors | {"base.digest": tensors["base.digest"] + 1}
    with pytest.raises(ConfigError, match="other weights than this generator's"):
        engine.update(4, other)
    with pytest.raises(EngineError, match="versions never go back"):
        engine.update(2, tensors)
    with pytest.raises(EngineError, match="every adapter and no other tensor: 1 differ"):
        engine.update(
            4, {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj.lora_A" not in name}
        )
    assert all(torch.equal(weight, before[name]) for name, weight in inner.parameters().items())


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.floats(0.1, 8.0), st.integers(0, 99))
def test_a_merge_is_the_base_and_the_scaled_product(rank: int, n_out: int, n_in: int, scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    w, a, b = (torch.randn(*form, generator=draw) for form in ((n_out, n_in), (rank, n_in), (n_out, rank)))
    assert torch.equal(merged(w.bfloat16(), a, b, scale), (b @ a) * scale + w.bfloat16().float())
    assert torch.equal(merged(w, a, torch.zeros_like(b), scale), w)


def test_adapters_are_float32_and_the_reference_is_the_model_without_them(tmp_path: Path) -> None:
    config = settings(model={"scratch": {}, "dtype": "bfloat16"}, actor={"lr": 1e-2, "kl_ctl": 0.1, "lora": LORA})
    actor = tiny_actor(tmp_path, config, model=load_model(base(tmp_path), "bfloat16", "cpu"))
    stats = train(actor, range(2))
    assert stats[0]["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert stats[1]["kl_ref"] > 1e-6
    assert {weight.dtype for weight in weights(actor.policy).values()} == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_folder_is_a_model_folder_and_the_start_of_a_run(tmp_path: Path, variant: str) -> None:
    config = lora_config(lora=VARIANTS[variant])
    actor = tiny_actor(tmp_path, config, model=load_model(base(tmp_path), "float32", "cpu"))
    train(actor, range(1))
    actor.policy.adapters.config.base_model_name_or_path = str(tmp_path / "base")  # type: ignore[union-attr]
    folder = str(save_run(actor, tmp_path) / "model")
    check_lora(config, folder)
    start = policy_of(config, folder)
    assert torch.allclose(logprobs(start), plain_logprobs(load_model(folder, "float32", "cpu")), atol=1e-5)
    torch.testing.assert_close(weights(start), weights(actor.policy), atol=0, rtol=0)
    assert torch.equal(start.pushed()["base.digest"], actor.policy.pushed()["base.digest"])
    with pytest.raises(ConfigError, match=r"would be the base of .*, not version 0"):
        check_lora(lora_config(lora=VARIANTS[variant], kl_ctl=0.1), folder)
    for other in VARIANTS.keys() - {variant}:
        with pytest.raises(ConfigError, match=r"mismatch of actor.lora"):
            check_lora(lora_config(lora=VARIANTS[other]), folder)
    assert check_model_path(folder, tmp_path) == str(Path(folder).resolve())
    found = load_model(folder, "float32", "cpu")
    assert torch.allclose(plain_logprobs(found), logprobs(actor.policy), atol=1e-5)
    if "dora" not in VARIANTS[variant].get("variant", ()):  # transformers loses its magnitudes; peft reads them
        of_transformers = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.allclose(plain_logprobs(of_transformers), logprobs(actor.policy), atol=1e-5)
    save_hf(Path(folder).parent, tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(map(torch.equal, whole.parameters(), found.parameters()))
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"the base model of .* must be a model folder"):
        check_model_path(folder, tmp_path)


def test_impossible_adapter_settings_are_refused(tmp_path: Path) -> None:
    config, model = lora_config(), base(tmp_path)
    for wanted, sentence in (
        (
            ("q_proj", "qkv"),
            "unknown layer 'qkv' in .*: .* are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        (("lm_head",), "unknown layer 'lm_head'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_lora(lora_config(lora={"target_modules": wanted}), model)
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1))
    with pytest.raises(ConfigError, match=r"no linear layers .* of GPT2LMHeadModel"):
        Adapters(gpt, LoraConfig(), seed=1, base="base")
    refusing: list[tuple[Callable[[], Config], str]] = [
        (lambda: lora_config(kl_ctl=0.1).model_copy(update={"learner": warm}), "learner.warmup trains the adapters"),
        (
            lambda: settings(actor={"lora": {}}, rollout={"engine": "simulated"}),
            "simulated takes no adapters",
        ),
    ]
    warm = settings(learner={"warmup": {"steps": 1}}).learner
    for make, sentence in refusing:
        assert [text for text in refusals(make()) if sentence in text], sentence
    whole = tiny_actor(tmp_path / "whole", model=load_model(model, "float32", "cpu"))
    train(whole, range(1))
    of_whole, own = save_run(whole, tmp_path / "w"), save_run(tiny_actor(tmp_path / "l", config), tmp_path / "l")
    with pytest.raises(CheckpointError, match="holds a whole model; remove"):
        policy_of(config, model, str(of_whole))
    with pytest.raises(CheckpointError, match="holds adapters; set"):
        policy_of(settings(), model, str(own))
    for changed, sentence in (
        ({"rank": 5}, r"has rank 4 and alpha 6 in model.layers.0.mlp.down_proj, the settings 5 and 32; a run keeps"),
        ({**LORA, "target_modules": ["q_proj"]}, "mismatch of actor.lora.target_modules"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            policy_of(lora_config(lora=changed), model, str(own))


def test_the_log_probs_of_a_policy_are_without_dropout(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, lora_config(lora={**LORA, "dropout": 0.5}))
    train(actor, range(1))
    pieces = [SequencePiece(IDS[0], torch.arange(1, IDS.shape[1]))]
    assert torch.equal(logprobs(actor.policy), logprobs(actor.policy))
    assert not torch.equal(actor.policy.logprobs(pieces)[0], actor.policy.logprobs(pieces)[0])


def test_offloaded_weights_stay_on_the_host_and_compute_the_same(tmp_path: Path) -> None:
    offloaded = tiny_model().bfloat16()
    adapters = Adapters(offloaded, LoraConfig(**LORA), seed=1, base="base", on_host=True)
    plain = tiny_model().bfloat16()
    beside = Adapters(plain, LoraConfig(**LORA), seed=1, base="base")
    settings = SETTINGS | {"dtype": "bfloat16", "gradient_checkpointing": True}
    found = [logprobs(Policy(*made, **settings)) for made in ((offloaded, adapters), (plain, beside))]
    assert torch.equal(*found)
    on_host = {name: weight.device.type for name, weight in offloaded.to("meta").named_parameters()}
    adapted = {f"{layer}.base_layer.weight" for layer in adapted_layers(tiny_model(), ())}
    assert {name for name, place in on_host.items() if place == "cpu"} == adapted
