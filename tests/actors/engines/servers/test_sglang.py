"""The protocol of SGLang: the calls of an update, the fields of a request, the command line of its server."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Request, SamplingControls
from actors.engines.servers import sglang
from actors.engines.servers.connect import open_engine
from actors.engines.servers.sglang import command, environment, split
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.errors import EngineError
from tests.servers.attached import WEIGHTS, ask, having, old, requests, running, sent, update
from tests.servers.engines import Running, context_of, model, model_folder, sglang_python, weights, worst
from tests.servers.speaks_sglang import SpeaksSGLang, speaking


def steps(fake: SpeaksSGLang) -> list[str]:
    """Calls of the last update, in order."""
    short = {"/pause_generation": "pause", "/continue_generation": "resume", "/begin_weight_update": "begin",
             "/end_weight_update": "end", "/update_weights_from_distributed": "weights"}  # fmt: skip
    names = [
        f"pause {body['mode']}" if short[path] == "pause" else short[path] for path, body in fake.calls if path in short
    ]
    last = max(i for i, name in enumerate(names) if name.startswith("pause"))
    return names[last:]


def test_an_update_retracts_and_flushes_with_the_last_weights_but_with_keep(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3, term=1)
        assert steps(fake) == ["pause retract", "begin", "weights", "end", "resume"]
        (body,) = fake.called(WEIGHTS["sglang"])
        assert (body["flush_cache"], body["weight_version"], body["abort_all_requests"]) == (True, fake.label, False)
        assert fake.label.endswith(".1.3")
    with (
        speaking(having(settings={"disable_overlap_schedule": True})) as fake,
        running(folder, fake, on_update="keep") as run,
    ):
        update(run.engine, 0)
        for term, pause in ((0, "pause in_place"), (1, "pause retract")):
            update(run.engine, 1, term=term)
            assert steps(fake)[0] == pause
            assert fake.called(WEIGHTS["sglang"])[-1]["flush_cache"] is bool(term)


def test_weights_go_in_parts_of_a_bucket_and_the_last_one_is_stamped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.zeros(n) for name, n in (("a", 3), ("b", 2), ("c", 9), ("d", 1))}
    assert split(tensors, 24) == [["a", "b"], ["c"], ["d"]]
    with speaking() as fake, running(folder, fake) as run:
        monkeypatch.setattr(sglang, "BUCKET_BYTES", 1 << 16)
        update(run.engine, 2)
        parts = fake.called(WEIGHTS["sglang"])
        assert len(parts) > 1
        assert [name for part in parts for name in part["names"]] == list(run.engine.parameters())
        assert [part.get("weight_version") for part in parts] == [None] * (len(parts) - 1) + [fake.label]
        assert [part["flush_cache"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_an_older_server_is_asked_for_the_rest_with_the_tokens_so_far_as_prompt(folder: Path) -> None:
    with speaking(old) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(ask(n=9))
        fake.allow(3)
        run.tokens(3)
        update(run.engine, 1)
        fake.allow(9)
        run.all()
    first, rest = requests(fake)
    assert (first["input_ids"], first["sampling_params"]["max_new_tokens"]) == ([3, 4], 9)
    assert (rest["input_ids"], rest["sampling_params"]["max_new_tokens"]) == ([3, 4, 2, 3, 4], 6)
    assert len(first["rid"]) == len(rest["rid"])
    assert all(body["flush_cache"] for body in fake.called(WEIGHTS["sglang"]))


def test_requests_of_a_killed_generator_are_aborted_first(folder: Path) -> None:
    with speaking() as fake, running(folder, fake):
        paths = [path for path, _ in fake.calls]
        left = ["/end_weight_update", "/continue_generation", "/abort_request"]
        assert [path for path in paths if path in left] == left
        assert paths.index("/abort_request") < paths.index("/generate")


# the fields of a request


USUAL = {
    "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "stop_token_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("controls", "others"),
    [
        (SamplingControls(), {}),
        (
            SamplingControls(top_k=5, min_p=0.1, stop_token_ids=(30,)),
            {"top_k": 5, "min_p": 0.1, "stop_token_ids": [1, 30]},
        ),
    ],
)
def test_a_request_sets_every_sampling_parameter_that_a_models_generation_config_could_change(
    folder: Path, controls: SamplingControls, others: dict[str, Any]
) -> None:
    body = sent(folder, replace(ask(temperature=0.7, top_p=0.9), controls=controls))
    assert body["sampling_params"].items() >= (USUAL | others).items()
    assert "ignore_eos" not in body["sampling_params"]
    assert body["return_logprob"] is True


def test_with_ignore_eos_the_server_ends_at_no_token_so_the_engine_does(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3)
        run.engine.submit(replace(ask(n=30), controls=SamplingControls(ignore_eos=True, stop_token_ids=(8,))))
        fake.allow(6)
        (completion,) = run.all().values()
        (body,) = requests(fake)
    assert body["sampling_params"]["ignore_eos"] is True
    assert (completion.ids, completion.finish, completion.spans) == ([5, 6, 7, 8], "stop", [[3, 4]])


def test_controls_that_change_log_probs_are_refused(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        for controls in (
            SamplingControls(repetition_penalty=1.1),
            SamplingControls(presence_penalty=0.1),
            SamplingControls(frequency_penalty=0.1),
            SamplingControls(logit_bias=((3, 1.0),)),
            SamplingControls(min_new_tokens=2),
        ):
            with pytest.raises(EngineError, match="log-probs are of logits after penalties"):
                run.engine.submit(replace(ask(), controls=controls))


# the command line of its server


def words(folder: Path, *, on_update: str = "recompute", **context: Any) -> list[str]:
    config = Config.model_validate({
        "run": {"seed": 3},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"task": "sums"},
        "rollout": {"engine": "sglang", "on_update": on_update},
        "engine": {"arguments": ["--mem-fraction-static", "0.7"]},
        "topology": {"tensor_parallel": 2},
    })  # fmt: skip
    return command(context_of(folder, **context), config, most_tokens=256, port=30007)


def test_the_servers_command_line_follows_from_the_settings(tmp_path: Path) -> None:
    on_gpu, kept = words(tmp_path, device="cuda"), words(tmp_path, device="cuda", on_update="keep")
    on_cpu = words(tmp_path)
    for line in (on_gpu, kept, on_cpu):
        assert dict(pairwise(line)).items() >= {
            "--model-path": str(tmp_path), "--port": "30007", "--dtype": "bfloat16", "--tp-size": "2",
            "--host": "127.0.0.1", "--load-format": "dummy",
        }.items()  # fmt: skip
        assert line[-2:] == ["--mem-fraction-static", "0.7"]
    assert ["--disable-overlap-schedule" in line for line in (on_gpu, kept)] == [False, True]
    assert ("--device" in on_gpu, "--device" in on_cpu) == (False, True)
    config = Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"task": "sums"}})
    assert environment(context_of(tmp_path, device="cuda"), config)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_servers_of_other_generators_and_incarnations_draw_other_numbers(tmp_path: Path) -> None:
    lines = [dict(pairwise(words(tmp_path, index=i, incarnation=n))) for i in (0, 1) for n in (0, 1)]
    assert len({line["--random-seed"] for line in lines}) == 4


@pytest.mark.sglang
def test_two_tensor_parallel_ranks_of_a_real_server_sample_as_one_over_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # it asks for a core a rank
    folder = model_folder(tmp_path / "model")
    models = {version: model(folder, version) for version in range(3)}
    config = Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums"},
        "rollout": {"engine": "sglang", "max_concurrent_rollouts": 8},
        "engine": {"python": sglang_python()},
        "topology": {"tensor_parallel": 2},
    })  # fmt: skip
    run = Running(open_engine(context_of(folder), config, load_tokenizer(str(folder))))
    requests = [Request(("", uid, 0, 0, 0), [5 + uid, 6, 7], (1, uid), 150, 1.0, 1.0) for uid in range(4)]
    try:
        run.engine.update(0, weights(models[0]))
        for request in requests:
            run.engine.submit(request)
        for version in (1, 2):
            run.tokens(60)
            run.engine.update(version, weights(models[version]))
        ended = run.all()
    finally:
        run.engine.close()
    assert max(worst(request, ended[request.key], models) for request in requests) < 1e-4
    assert max(len(completion.spans) for completion in ended.values()) >= 2
