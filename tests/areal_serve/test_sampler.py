from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.models.loading import load_tokenizer
from areal_serve.registry import Future
from areal_serve.sampler import BASE, KEPT, Job, Sampler
from areal_serve.samplers import MOST_ENDS, Samplers
from areal_serve.trainer import Trainer
from areal_serve.wire import Datum, fields
from areal_serve.worker import Frame
from tests.areal_serve.parts import CONFIG, CONTEXT, data, model_folder, request, trainer

PROMPT = [5, 9, 4, 12]


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(CONFIG, str(model_folder()), load_tokenizer(str(model_folder())), device="cpu")


def trained(folder: Path) -> tuple[Trainer, dict[str, str]]:
    """Two adapters and a whole model, with their saved folders; "" is the base."""
    own, folders = trainer(), {BASE: BASE}
    own.create(BASE, {"rank": 1, "seed": 1})  # B is zero: the base
    for number, (id, lora) in enumerate({"a": {"rank": 4, "seed": 1}, "b": {"rank": 2, "seed": 2}, "w": None}.items()):
        own.create(id, lora)
        own.run(id, request("cross_entropy", data(9, 5, seed=number)))
        own.step(id, {"learning_rate": 3e-2})
        own.save(id, folder / id, optimizer=False, overwrite=False, meta={})
        folders[id] = str(folder / id)
    return own, folders


def job(id: str, weights: str, *, n_samples: int = 1, seed: int = 1, prompt: list[int] = PROMPT, **params: Any) -> Job:
    options: dict[str, Any] = {name: params.pop(name) for name in list(params) if "logprobs" in name or "alt" in name}
    sampling = {"max_tokens": 6, "stop": [], **params}
    return Job(id, weights, prompt, n_samples, (seed,), {"sampling_params": sampling, **options})


def run(sampler: Sampler, *jobs: Job) -> dict[str, dict[str, Any]]:
    for one in jobs:
        sampler.submit(one)
    found: dict[str, dict[str, Any]] = {}
    while not sampler.is_idle:
        found |= dict(sampler.step())
    return found


def sequences(reply: dict[str, Any]) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
    """(ids, log-probs) of a reply's sequences."""
    parts = [dict(fields(value)) for number, value in fields(memoryview(reply["result"])) if number == 1]  # type: ignore[arg-type]
    return [(np.frombuffer(p[2], "<i4").tolist(), np.frombuffer(p[3], "<f4")) for p in parts]  # type: ignore[call-overload]


def prompt_logps(reply: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(dict(fields(memoryview(reply["result"])))[2], "<f4")  # type: ignore[call-overload,no-any-return]


def test_weights_of_several_models_are_sampled_one_after_the_other(sampler: Sampler, tmp_path: Path) -> None:
    own, folders = trained(tmp_path)
    order = [BASE, "a", "b", "w", "a", BASE, "w", "b"]
    jobs = [job(f"{i}", folders[id], n_samples=2, prompt_logprobs=True) for i, id in enumerate(order)]
    found = run(sampler, *jobs)
    for i, id in enumerate(order):
        for ids, logps in sequences(found[f"{i}"]):
            whole = PROMPT + ids
            datum = Datum(np.array(whole[:-1]), {"target_tokens": np.array(whole[1:])})
            expected = own.run(id, request("cross_entropy", [datum], forward_only=True)).logps[0]
            np.testing.assert_allclose(np.concatenate([prompt_logps(found[f"{i}"])[1:], logps]), expected, atol=1e-5)
        first = order.index(id)
        assert sequences(found[f"{i}"])[0][0] == sequences(found[f"{first}"])[0][0]  # same seed, same weights
    assert len(sampler._held) <= KEPT


def test_seed_decides_the_samples(sampler: Sampler) -> None:
    found = run(sampler, job("a", BASE, n_samples=3), job("b", BASE, n_samples=3), job("c", BASE, n_samples=3, seed=2))
    ids = {id: [one for one, _ in sequences(reply)] for id, reply in found.items()}
    assert ids["a"] == ids["b"] != ids["c"]
    assert len({tuple(one) for one in ids["a"]}) > 1


def test_stop_tokens_and_strings_end_a_sample_and_belong_to_it(sampler: Sampler) -> None:
    (ids, _), *_ = sequences(run(sampler, job("free", BASE, max_tokens=12))["free"])
    assert len(ids) == 12
    (ended, _), *_ = sequences(run(sampler, job("t", BASE, max_tokens=12, stop=[ids[3]]))["t"])
    assert ended == ids[: ids.index(ids[3]) + 1]
    text = load_tokenizer(str(model_folder())).decode([ids[4]])
    (ended, _), *_ = sequences(run(sampler, job("s", BASE, max_tokens=12, stop=text))["s"])
    assert ended == ids[: ids.index(ids[4]) + 1]


def test_scores_of_prompt_and_sample_are_those_of_the_model(sampler: Sampler) -> None:
    targets = np.array([[3, -1], [4, 5], [-1, 6]])
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 4}
    reply = run(sampler, job("x", BASE, **asked, prompt_logprobs_last_n=2, target_prompt_logprobs=targets))["x"]
    ((ids, _),) = sequences(reply)
    with torch.no_grad():
        whole = torch.tensor([PROMPT + ids])
        exact = sampler._model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1).numpy()
    prompt = prompt_logps(reply)
    assert np.isnan(prompt[:2]).all()
    np.testing.assert_allclose(prompt[2:], [exact[1, PROMPT[2]], exact[2, PROMPT[3]]], atol=1e-5)
    parts: dict[int, Any] = dict(fields(memoryview(reply["result"])))
    top = dict(fields(parts[3]))
    top_ids = np.frombuffer(top[1], "<i4").reshape(4, 3)  # type: ignore[call-overload]
    assert not top_ids[:2].any()
    assert top_ids[2].tolist() == np.argsort(-exact[1])[:3].tolist()
    sampled = dict(fields(dict(fields(parts[1]))[4]))  # type: ignore[arg-type]
    assert np.frombuffer(sampled[1], "<i4").reshape(6, 2)[:, 0].tolist() == exact[3:-1].argmax(-1).tolist()  # type: ignore[call-overload]
    scored = np.frombuffer(dict(fields(parts[5]))[1], "<f4").reshape(3, 2)  # type: ignore[call-overload]
    expected = [[exact[0, 3], 0], [exact[1, 4], exact[1, 5]], [0, exact[2, 6]]]
    np.testing.assert_allclose(scored, expected, atol=1e-5)
    drawn, at = (dict(fields(part)) for _, part in fields(parts[6]))  # type: ignore[arg-type]
    tokens = np.frombuffer(drawn[1], "<i8").reshape(3, 4)  # type: ignore[call-overload]
    np.testing.assert_allclose(
        np.frombuffer(at[1], "<f4").reshape(3, 4),
        np.take_along_axis(exact[:3], tokens, 1),
        atol=1e-5,  # type: ignore[call-overload]
    )


def test_changed_weights_on_disk_are_refused(sampler: Sampler, tmp_path: Path) -> None:
    _, folders = trained(tmp_path)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(str(file))
    next(iter(tensors.values())).view(-1)[0] += 1.0
    save_file(tensors, str(file))
    found = run(sampler, job("x", folders["a"]), job("y", folders["b"]), job("z", str(tmp_path / "gone")))
    assert "checksum mismatch" in found["x"]["error"]
    assert "result" in found["y"]
    assert "missing checkpoint" in found["z"]["error"]


def test_request_over_the_context_is_refused_and_cancelled_ones_leave_no_trace(sampler: Sampler) -> None:
    found = run(
        sampler, job("x", BASE, prompt=[5] * CONTEXT), job("y", BASE, max_tokens=CONTEXT), job("z", BASE, top_p=0)
    )
    assert all("result" not in reply for reply in found.values())
    assert "exceed the context" in found["y"]["error"]
    sampler.submit(job("slow", BASE, max_tokens=20, n_samples=2))
    sampler.step()
    sampler.cancel("slow")
    assert sampler.is_idle
    assert "result" in run(sampler, job("next", BASE))["next"]


def test_request_that_fails_in_the_sampler_gets_an_error_and_the_others_go_on(sampler: Sampler) -> None:
    wrong = job("wrong", BASE, prompt_logprobs=True)
    wrong.options["target_prompt_logprobs"] = "no array"  # type: ignore[index]  # as a fault of ours would leave it
    far = job("far", BASE, target_prompt_logprobs=np.full((3, 1), 1 << 30))
    found = run(sampler, wrong, far, job("right", BASE))
    assert "a fault of this server" in found["wrong"]["error"]
    assert "unknown token" in found["far"]["error"]
    assert "result" in found["right"]


def test_request_with_which_samplers_end_gets_an_error() -> None:
    class Silent:
        sent: ClassVar[list[str]] = []

        def send(self, frame: Frame) -> None:
            self.sent.append(frame["id"])

        def close(self) -> None: ...

    samplers, future = Samplers(), Future()
    samplers.add(Silent())
    samplers.submit({"id": "s:1", "weights": ""}, future)
    for _ in range(5):
        samplers.on_start(0)
    assert Silent.sent == ["s:1"] * MOST_ENDS
    assert "ended 3 times" in future.error
