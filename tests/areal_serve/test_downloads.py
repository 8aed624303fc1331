"""Exported checkpoints: files by signed URL, streamed; folders that transformers and peft load."""

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.models.loading import load_base
from areal_serve.front import API
from areal_serve.storage.downloads import Downloads
from tests.areal_serve.parts import CONFIG, data, model_folder, request, trainer
from tests.areal_serve.test_front import Call, model, result, run, train


async def exported(call: Call, folder: Path) -> tuple[str, Path, dict[str, str]]:
    """A model, the folder of its export, and the URLs of its files behind the prefix of the API."""
    id = await model(call)
    await train(call, id, 1)
    given = {"model_id": id, "seq_id": 3, "path": "out", "ttl_seconds": None}
    saved = await result(call, "/save_weights_external", given)
    assert saved == {"path": f"tinker://{id}/external_weights/out", "type": "save_weights_external"}
    status, found = await call(
        f"/training_runs/{id}/checkpoints/external_weights/out/external_weights_urls", method="GET"
    )
    assert status == 200, found
    urls = {name: url.partition(API)[2] for name, url in found["urls"].items()}
    return id, folder / "models" / id / "external_weights" / "out", urls


def test_export_is_downloaded_without_the_key_by_its_urls(tmp_path: Path) -> None:
    async def scenario(call: Call) -> None:
        _, folder, urls = await exported(call, tmp_path)
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= urls.keys()
        assert "meta.json" not in urls
        for name, url in urls.items():
            status, found = await call(url, method="GET", key="")
            assert status == 200
            held = (folder / name).read_bytes()
            assert found == (json.loads(held) if name.endswith(".json") else held)

    run(tmp_path, scenario)


def test_url_is_refused_for_another_file_or_time_and_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(call: Call) -> None:
        id, folder, urls = await exported(call, tmp_path)
        url = urls["adapter_config.json"]
        (folder / "other.json").write_text("{}")
        _, _, query = url.partition("?")
        path = f"/files/{id}/out"
        for bad in (
            url.replace("adapter_config.json", "other.json"),
            url.replace("expires=", "expires=9"),
            url.replace("expires=", "expires=x"),
            url.partition("?")[0],
            f"{path}/..%2Fout%2Fadapter_config.json?{query}",
        ):
            status, found = await call(bad, method="GET", key="")
            assert (status, found["error"][:15]) == (403, "wrong signature"), bad
        assert (await call("/training_runs", method="GET", key=""))[0] == 401
        monkeypatch.setattr("areal_serve.storage.downloads.VALID_S", -10)
        where = f"/training_runs/{id}/checkpoints/external_weights/out"
        _, found = await call(f"{where}/external_weights_urls", method="GET")
        old = found["urls"]["adapter_config.json"].partition(API)[2]
        status, answer = await call(old, method="GET", key="")
        assert (status, answer["error"][:11]) == (403, "expired URL")
        assert (await call(where, method="DELETE"))[0] == 204
        assert (await call(url, method="GET", key=""))[0] == 404
        status, found = await call("/save_weights_external", {"model_id": id, "seq_id": 4, "path": "x",
                                                              "age_encryption_recipients": ["age1"]})  # fmt: skip
        assert status == 400
        assert "does not encrypt" in found["error"]
        status, found = await call(f"/training_runs/{id}/checkpoints/weights/a/external_weights_urls", method="GET")
        assert (status, found["error"][:25]) == (404, "only external_weights are")

    run(tmp_path, scenario)


def test_large_file_is_streamed(tmp_path: Path) -> None:
    size = 256 << 20
    folder = tmp_path / "m" / "external_weights" / "big"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)  # takes no space

    async def scenario() -> int:
        app = web.Application()
        app.add_routes(Downloads(tmp_path, b"key", API).routes(API))
        n_bytes = 0
        async with TestClient(TestServer(app)) as client:
            listed = f"{API}/training_runs/m/checkpoints/external_weights/big/external_weights_urls"
            async with client.get(listed) as response:
                (url,) = (await response.json())["urls"].values()
            tracemalloc.start()
            async with client.get(url[url.index(API) :]) as response:
                assert response.content_length == size
                async for part in response.content.iter_chunked(1 << 16):
                    n_bytes += len(part)
        return n_bytes

    try:
        assert asyncio.run(scenario()) == size
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("lora", [{"rank": 4, "seed": 1}, None])
def test_export_loads_in_transformers_and_peft(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    own = trainer()
    own.create("m", lora)
    own.run("m", request("cross_entropy", data(9, 5)))
    own.step("m", {"learning_rate": 1e-2})
    own.save("m", tmp_path / "out", optimizer=False, for_others=True, overwrite=False, meta={})
    if lora is None:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    else:
        theirs = PeftModel.from_pretrained(load_base(CONFIG, str(model_folder()), "cpu"), str(tmp_path / "out"))
    (datum,) = data(12, seed=3)
    (expected_T,) = own.run("m", request("cross_entropy", [datum], forward_only=True)).logps
    with torch.no_grad():
        logp_TV = torch.log_softmax(theirs(input_ids=torch.from_numpy(datum.ids_T)[None]).logits[0].float(), -1)
    targets_T = torch.from_numpy(datum.inputs["target_tokens"])
    found_T = logp_TV.gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(found_T, torch.from_numpy(expected_T), atol=1e-5, rtol=1e-4)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(AutoTokenizer.from_pretrained(model_folder()))
