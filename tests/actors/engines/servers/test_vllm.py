"""The protocol of vLLM: the calls of an update, the fields of a request, the command line of its server."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import Done, SamplingControls
from actors.engines.servers import server_process
from actors.engines.servers.protocol import PieceUpdate
from actors.engines.servers.request import begun
from actors.engines.servers.vllm import command, environment
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError
from tests.servers.attached import ask, attach, having, lost, running, sent, update
from tests.servers.engines import context_of
from tests.servers.speaks_sglang import V
from tests.servers.speaks_vllm import SpeaksVLLM, speaking

RAW = having(model={"logprobs_mode": "raw_logprobs"})


def steps(fake: SpeaksVLLM) -> list[str]:
    """Calls of the last update, in order."""
    short = {"/pause": "pause", "/resume": "resume", "/collective_rpc": "weights", "/reset_prefix_cache": "flush",
             "/update_weight_version": "stamp"}  # fmt: skip
    names = [
        f"pause {body['mode']} {body['clear_cache']}" if path == "/pause" else short[path]
        for path, body in fake.calls
        if path in short
    ]
    last = max(i for i, name in enumerate(names) if name.startswith("pause"))
    return names[last:]


ANEW = ["pause keep true", "weights", "flush", "stamp", "resume"]


def test_an_update_stamps_before_it_goes_on_and_drops_keys_and_prefixes_but_with_keep(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3, term=1)
        assert steps(fake) == ANEW
        assert fake.label.endswith(".1.3")
    with speaking() as fake, running(folder, fake, on_update="keep") as run:
        update(run.engine, 0)
        update(run.engine, 1)
        assert steps(fake) == ["pause keep false", "weights", "stamp", "resume"]
        update(run.engine, 1, term=1)
        assert steps(fake) == ANEW


def test_a_tied_weight_is_not_sent_to_a_server_that_ties_it(folder: Path) -> None:
    def tied(fake: SpeaksVLLM) -> None:
        fake.model["hf_overrides"], fake.parallel["worker_cls"] = {}, "gpu_worker.Worker"

    with speaking(tied) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        assert set(fake.taken[0]) == set(run.engine.parameters())


def test_a_request_sets_every_sampling_parameter_that_a_models_generation_config_could_change(folder: Path) -> None:
    assert sent(folder, ask(temperature=0.7), kind="vllm")["sampling_params"].items() >= {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True,
        "stop_token_ids": [1], "logprobs": 0,
    }.items()  # fmt: skip


def test_requests_of_a_killed_generator_are_aborted_first(folder: Path) -> None:
    with speaking() as fake, running(folder, fake):
        paths = [path for path, _ in fake.calls]
        assert [path for path in paths if path in ("/abort_requests", "/resume")] == ["/abort_requests", "/resume"]


def test_a_nucleus_needs_raw_log_probs_and_those_need_temperature_1(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        with pytest.raises(EngineError, match=r"of the nucleus: top_p 0\.9"):
            run.engine.submit(ask(top_p=0.9))
        with pytest.raises(EngineError, match=r"temperatures are 0, or 0\.01 and more"):
            run.engine.submit(ask(temperature=0.001))
    with speaking(RAW) as fake, running(folder, fake) as run:
        run.engine.submit(ask(top_p=0.9))
        with pytest.raises(EngineError, match=r"those at temperature 1, and 0\.7"):
            run.engine.submit(ask(1, temperature=0.7))
    with speaking(RAW) as fake, pytest.raises(ConfigError, match=r"those at temperature 1, and 0\.5"):
        attach(folder, fake, gconfig={"temperature": 0.5})
    with speaking() as fake, pytest.raises(ConfigError, match=r"of the nucleus: top_p 0\.8"):
        attach(folder, fake, gconfig={"top_p": 0.8})


def test_a_log_prob_that_is_not_a_number_loses_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.weight = 9999
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, "a log-prob is not a number")


def words(folder: Path, *, device: str = "cpu", gconfig: Any = None, **rollout: Any) -> list[str]:
    settled = Config.model_validate({
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"task": "sums"},
        "gconfig": gconfig or {},
        "rollout": {"engine": "vllm", **rollout},
        "engine": {"arguments": ["--gpu-memory-utilization", "0.7"]},
        "topology": {"tensor_parallel": 2},
    })  # fmt: skip
    return command(context_of(folder, device=device), settled, most_tokens=256, port=30007)


def test_the_servers_command_line_follows_from_the_settings(tmp_path: Path) -> None:
    on_gpu = words(tmp_path, device="cuda", gconfig={"top_p": 0.9})
    kept, on_cpu = words(tmp_path, device="cuda", on_update="keep"), words(tmp_path)
    for line in (on_gpu, kept, on_cpu):
        assert dict(pairwise(line)).items() >= {
            "--model": str(tmp_path), "--port": "30007", "--dtype": "bfloat16", "--tensor-parallel-size": "2",
            "--host": "127.0.0.1", "--load-format": "dummy",
        }.items()  # fmt: skip
        assert line[-2:] == ["--gpu-memory-utilization", "0.7"]
    modes = [dict(pairwise(line))["--logprobs-mode"] for line in (on_gpu, kept)]
    assert modes == ["raw_logprobs", "processed_logprobs"]
    assert ["--enforce-eager" in line for line in (on_gpu, on_cpu)] == [False, True]


def settings_of(folder: Path, **topology: Any) -> Config:
    whole = {"model": {"path": str(folder)}, "data": {"task": "sums"}, "topology": topology}
    return Config.model_validate(whole)


def test_servers_of_one_host_on_cpu_get_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight logical CPUs on four cores: 0 and 4 are one, and so on."""
    monkeypatch.setattr(server_process, "siblings", lambda cpu: str(cpu % 4))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def cores(n: int, index: int, *, interface: str = "lo", device: str = "cpu", **topology: Any) -> str | None:
        context = context_of(tmp_path, n_generators=n, index=index, interface=interface, device=device)
        return environment(context, settings_of(tmp_path, **topology)).get("VLLM_CPU_OMP_THREADS_BIND")

    assert [cores(2, index) for index in (0, 1)] == ["0,1", "2,3"]
    assert [cores(3, index) for index in (0, 1, 2)] == ["0", "1", "2,3"]
    assert [cores(2, index, tensor_parallel=2) for index in (0, 1)] == ["0|1", "2|3"]
    assert cores(5, 0) == "nobind"  # fewer cores than servers: the kernel schedules them
    assert (cores(1, 0), cores(2, 0, device="cuda"), cores(2, 0, interface="eth0")) == (None, None, None)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    assert cores(2, 0) is None  # that of the user is inherited
    assert environment(context_of(tmp_path), settings_of(tmp_path))["VLLM_SERVER_DEV_MODE"] == "1"


def test_controls_go_to_the_server_under_its_names_and_need_raw_log_probs(folder: Path) -> None:
    named = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    controls = SamplingControls(
        min_new_tokens=3, logit_bias=((7, -1.5),), stop_token_ids=(9,), ignore_eos=True, **named
    )  # type: ignore[arg-type]
    body = sent(folder, replace(ask(), controls=controls), RAW, kind="vllm")
    others = {"min_tokens": 3, "logit_bias": {"7": -1.5}, "stop_token_ids": [9], "ignore_eos": True}
    assert body["sampling_params"].items() >= (named | others).items()
    with speaking() as fake, running(folder, fake) as run:
        for controls in (SamplingControls(top_k=5), SamplingControls(logit_bias=((7, 1.0),))):
            with pytest.raises(EngineError, match="processed log-probs are of what"):
                run.engine.submit(replace(ask(), controls=controls))
        run.engine.submit(replace(ask(temperature=0.0), controls=SamplingControls(top_k=5)))
    with speaking() as fake, pytest.raises(ConfigError, match="processed log-probs are of what"):
        attach(folder, fake, gconfig={"min_p": 0.1})


def test_a_continued_sample_requests_its_remaining_min_tokens(folder: Path) -> None:
    done = Done([5, 6], [-0.1, -0.2], [[0, 2]])
    least = SamplingControls(min_new_tokens=3)
    with speaking(RAW) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        run.engine.submit(replace(ask(), controls=least, done=done))
        run.engine.submit(replace(ask(1), controls=replace(least, presence_penalty=1.0), done=done))
        ended = run.all()
        rest, anew = sorted(fake.called("/generate"), key=lambda body: -len(body["input_ids"]))
    assert (rest["input_ids"], rest["sampling_params"]["min_tokens"]) == ([3, 4, 5, 6], 1)
    assert (anew["input_ids"], anew["sampling_params"]["min_tokens"]) == ([3, 4], 3)  # it counts the completion's
    assert [len(completion.ids) for completion in ended.values()] == [8, 8]


def test_a_stop_string_cuts_a_sample_that_the_server_went_on_with(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    with speaking() as fake, running(folder, fake) as run:
        n_before = len(fake.called("/abort_requests"))
        update(run.engine, 3)
        text = tokenizer.decode([(3 + i) % V for i in range(2, 12)])  # by the rule of the server
        request = replace(ask(n=40), controls=SamplingControls(stop=(text[5:7], text[8:9])))
        run.engine.submit(request)
        fake.allow(4)
        run.tokens(4)
        update(run.engine, 3, term=1)
        fake.allow(10)
        at_once = replace(request, key=ask(1).key)
        run.engine.submit(at_once)
        run.until(lambda: at_once.key in run.ended)
        assert run.engine.n_live == 1  # its versions are known only at the end of what the server has of it
        fake.allow(40)
        ended = run.all()
        with fake.changed:  # nobody waits for the answer to an abort
            assert fake.changed.wait_for(lambda: len(fake.called("/abort_requests")) == n_before + 1, 60)
    for completion in ended.values():
        assert tokenizer.decode(completion.ids) == text[:7]
        assert (completion.finish, completion.spans, len(completion.logps)) == ("stop", [[3, 7]], 7)


def test_a_finished_sample_is_reported_without_its_last_token(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    sample = begun(
        replace(ask(n=40), controls=SamplingControls(stop=(tokenizer.decode([7, 8]),))),
        stop_ids=frozenset({1}),
        tokenizer=tokenizer,
    )
    sample.piece("a", 2)
    sample.hear(PieceUpdate([6, 7, 8, 9], [-1.0] * 4))
    assert sample.find_end()
    assert sample.done() == Done([6, 7], [-1.0, -1.0], [[2, 2]])  # so that another engine finds it
    sample.settle([[2, 1], [5, 3]])
    sample.cut()
    assert (sample.ids, sample.spans) == ([6, 7, 8], [[2, 1], [5, 2]])
