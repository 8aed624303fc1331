"""Adapters on servers of the test's own: taken by name where a server can, else merged and pushed whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Engine, Request
from actors.engines.servers.connect import open_engine
from actors.models.loading import load_base, load_model, load_tokenizer
from actors.models.lora import BASE_DIGEST, base_digest
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tests.servers import speaks_vllm
from tests.servers.engines import Running, context_of, model_folder
from tests.servers.speaks_sglang import SpeaksSGLang, V, speaking
from tests.servers.speaks_vllm import SpeaksVLLM

LORA = {"rank": 2, "alpha": 2, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder(tmp_path_factory.mktemp("adapters") / "model")
    load_model(str(folder), "float32", "cpu", random_seed=1).save_pretrained(folder)
    return folder


@contextmanager
def running(folder: Path, fake: SpeaksSGLang, kind: str, on_update: str = "recompute") -> Iterator[Running]:
    config = Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums"},
        "rollout": {"engine": kind, "on_update": on_update},
        "engine": {"call_timeout_s": 10.0, "urls": (fake.url,)},
        "actor": {"lora": LORA},
    })  # fmt: skip
    engine = open_engine(context_of(folder), config, load_tokenizer(str(folder)))
    try:
        yield Running(engine)
    finally:
        engine.close()


def adapters(engine: Engine, number: float) -> dict[str, torch.Tensor]:
    """All of them that number."""
    return {name: torch.full(form.shape, number, dtype=form.dtype) for name, form in engine.parameters().items()}


def sglang(fake: SpeaksSGLang) -> None:
    fake.routes += ["/load_lora_adapter", "/unload_lora_adapter"]
    fake.settings |= {"enable_lora": True, "max_lora_rank": 16}  # type: ignore[dict-item]


def vllm(fake: SpeaksVLLM) -> None:
    fake.routes += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    fake.lora = {"max_lora_rank": 16}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_sample_goes_on_over_an_update_with_the_adapter_of_each_version(folder: Path, kind: str) -> None:
    speaks: Any = speaking(sglang) if kind == "sglang" else speaks_vllm.speaking(vllm)
    with speaks as fake, running(folder, fake, kind) as run:
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


@pytest.mark.parametrize("kind", [lambda fake: None, of_low_rank])
def test_another_server_is_sent_merged_weights(folder: Path, kind: Any) -> None:
    with speaking(kind) as fake, running(folder, fake, "sglang") as run:
        base = load_base(Config.model_validate({"model": {"path": str(folder)}}), str(folder), "cpu")
        weights = {name: parameter.detach() for name, parameter in base.named_parameters()}
        tensors = adapters(run.engine, 1.0) | {BASE_DIGEST: base_digest(weights)}
        run.engine.update(0, tensors)
        names = [name for body in fake.called("/update_weights_from_distributed") for name in body["names"]]
        assert names == list(weights)
        with pytest.raises(ConfigError, match="other weights than this generator's"):
            run.engine.update(1, adapters(run.engine, 1.0))
        assert not fake.called("/load_lora_adapter")
