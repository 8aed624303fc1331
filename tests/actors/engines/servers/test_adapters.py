"""Adapters on servers of the test's own: taken by name where a server can, else merged and pushed whole.

`make test-sglang` and `make test-vllm` have real servers take them by name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Engine, Request, SamplingControls
from actors.engines.servers.connect import open_engine
from actors.engines.servers.engine import ServerEngine
from actors.models.loading import load_base, load_model, load_tokenizer
from actors.models.lora import BASE_DIGEST, adapted_layers, base_digest, merged, names_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tests.servers.attached import SPEAKING, WEIGHTS, running
from tests.servers.engines import Running, context_of, model, model_folder, sglang_python, vllm_python, worst
from tests.servers.speaks_sglang import SpeaksSGLang, V
from tests.servers.speaks_vllm import UNTIED, SpeaksVLLM

LORA = {"rank": 2, "alpha": 2, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder(tmp_path_factory.mktemp("adapters") / "model")
    load_model(str(folder), "float32", "cpu", random_seed=1).save_pretrained(folder)
    return folder


def adapters(engine: Engine, number: float) -> dict[str, torch.Tensor]:
    """All of them that number."""
    return {name: torch.full(form.shape, number, dtype=form.dtype) for name, form in engine.parameters().items()}


def sglang(fake: SpeaksSGLang) -> None:
    fake.routes += ["/load_lora_adapter", "/unload_lora_adapter"]
    fake.settings |= {"enable_lora": True, "max_lora_rank": 16}  # type: ignore[dict-item]


def vllm(fake: SpeaksVLLM) -> None:
    fake.routes += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    fake.lora = {"max_lora_rank": 16}
    fake.model["hf_overrides"], fake.parallel["worker_cls"] = {}, "gpu_worker.Worker"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_sample_goes_on_over_an_update_with_the_adapter_of_each_version(folder: Path, kind: str) -> None:
    with SPEAKING[kind]({"sglang": sglang, "vllm": vllm}[kind]) as fake, running(folder, fake, lora=LORA) as run:
        run.engine.update(3, adapters(run.engine, 3))
        run.engine.submit(Request(("", 0, 0, 0, 0), [3, 4], (0,), 6, 1.0, 1.0))
        fake.allow(2)
        run.tokens(2)
        run.engine.update(5, adapters(run.engine, 5))
        fake.allow(9)
        (completion,) = run.all().values()
        (name,) = fake.adapters
        assert name.endswith(".0.5")  # that of version 3 is unloaded
    assert completion.spans == [[3, 2], [5, 4]]
    weights = [3, 3, 5, 5, 5, 5]
    assert completion.ids == [(weight + 2 + i) % V for i, weight in enumerate(weights)]
    assert not [path for path, _ in fake.calls if path in ("/update_weights_from_distributed", "/collective_rpc")][1:]
    about = fake.adapter_config
    assert (about["r"], about["lora_alpha"], about["target_modules"]) == (2, 2, ["down_proj", "q_proj"])


def of_low_rank(fake: SpeaksSGLang) -> None:
    sglang(fake)
    fake.settings["max_lora_rank"] = 1


def untied(fake: SpeaksVLLM) -> None:
    """A real one loaded a base without a head and sampled with random numbers for it."""
    vllm(fake)
    fake.model["hf_overrides"] = UNTIED


DORA = {"rank": 2, "variant": ["rslora", "dora"], "target_modules": ["q_proj", "down_proj"]}
SEVERAL = {"target_modules": {"q_proj": 2, "down_proj": [2, 4]}}


@pytest.mark.parametrize(
    ("kind", "change", "lora"),
    [
        ("sglang", None, LORA),
        ("sglang", of_low_rank, LORA),
        ("vllm", untied, LORA),
        ("vllm", vllm, DORA),
        ("sglang", sglang, SEVERAL),
    ],
)
def test_a_server_that_takes_no_such_adapters_is_sent_merged_weights(
    folder: Path, kind: str, change: Any, lora: dict[str, Any]
) -> None:
    with SPEAKING[kind](change) as fake, running(folder, fake, lora=lora) as run:
        base = load_base(Config.model_validate({"model": {"path": str(folder)}}), str(folder), "cpu")
        weights = {name: parameter.detach() for name, parameter in base.named_parameters()}
        run.engine.update(0, adapters(run.engine, 1.0) | {BASE_DIGEST: base_digest(weights)})
        if kind == "vllm":
            assert set(fake.taken[-1]) == {*weights, *(["lm_head.weight"] if change is untied else [])}
        else:
            names = [name for body in fake.called(WEIGHTS[kind]) for name in body["names"]]
            assert names == list(weights)
        with pytest.raises(ConfigError, match="other weights than this generator's"):
            run.engine.update(1, adapters(run.engine, 1.0))
        assert not [path for path, _ in fake.calls if path.endswith("/load_lora_adapter")]


@pytest.mark.parametrize(
    "kind", [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
)
def test_a_real_server_samples_with_the_adapter_of_each_version(tmp_path: Path, kind: str) -> None:
    """A base of its own head, which the server loads; two updates while samples are under way."""
    folder = model_folder(tmp_path / "model", hidden_size=128)
    base = model(folder, 1)
    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.save_pretrained(folder)
    config = Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums", "max_prompt_tokens": 64},
        "gconfig": {"max_new_tokens": 128},
        "rollout": {"engine": kind, "max_concurrent_rollouts": 8},
        "engine": {
            "python": sglang_python() if kind == "sglang" else vllm_python(),
            "start_timeout_s": 500.0,
            "call_timeout_s": 200.0,
            "silent_s": 200.0,
            "arguments": TAKES_ADAPTERS + (SGLANG_ON_CPU if kind == "sglang" else ()),
        },
        "actor": {"lora": WITH_VALUES},
    })  # fmt: skip
    engine = open_engine(context_of(folder), config, load_tokenizer(str(folder)))
    try:
        run, merged_models = Running(engine), {version: with_drawn(folder, engine, version) for version in range(3)}
        requests = [
            Request(("", i, 0, s, 0), [5 + i, 6, 7] * (i + 1), (7, i, s), 100, [1.0, 0.7][s], 1.0, controls=ENDLESS)
            for i in range(3)
            for s in range(2)
        ]
        engine.update(0, drawn(engine, 0))
        for request in requests:
            engine.submit(request)
        for version in (1, 2):
            run.tokens(100)
            engine.update(version, drawn(engine, version))
        ended = run.all()
    finally:
        engine.close()
    assert isinstance(engine, ServerEngine), "it takes adapters by name"
    assert {version for done in ended.values() for version, _ in done.spans} == {0, 1, 2}
    assert max(worst(request, ended[request.key], merged_models) for request in requests) < 1e-4
    assert max(worst(request, ended[request.key], dict.fromkeys(range(3), base)) for request in requests) > 0.1


TAKES_ADAPTERS = ("--load-format", "auto", "--enable-lora", "--max-lora-rank", "8")
SGLANG_ON_CPU = ("--lora-target-modules", "q_proj", "v_proj", "down_proj", "--lora-backend", "torch_native")
WITH_VALUES = LORA | {"target_modules": ["q_proj", "v_proj", "down_proj"]}  # SGLang refuses queries without values
ENDLESS = SamplingControls(ignore_eos=True)


def drawn(engine: Engine, version: int) -> dict[str, torch.Tensor]:
    """Random adapters of a version."""
    draw = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(form.shape, generator=draw) * 0.05 if form.dtype.is_floating_point else torch.zeros(16).byte()
        for name, form in engine.parameters().items()
    }


def with_drawn(folder: Path, engine: Engine, version: int) -> Any:
    """The base with these adapters merged into it."""
    made, tensors = load_model(str(folder), "float32", "cpu"), drawn(engine, version)
    weights = dict(made.named_parameters())
    with torch.no_grad():
        for layer in adapted_layers(made, WITH_VALUES["target_modules"]):  # type: ignore[arg-type]
            a_RE, b_FR = (tensors[name] for name in names_of(layer))
            weight = weights[f"{layer}.weight"]
            weight.copy_(merged(weight, a_RE, b_FR, 1.0))  # alpha = rank
    return made
