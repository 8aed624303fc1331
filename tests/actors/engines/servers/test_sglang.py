"""The engine sglang against a server of the test's own: what it asks for, and what it does when that goes wrong."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.protocol import Request, SamplingControls
from actors.engines.servers import connect
from actors.engines.servers.connect import open_engine
from actors.engines.servers.engine import SENT_AGAIN, ServerEngine
from actors.engines.servers.model_spec import shape_of
from actors.engines.servers.server_process import free_port
from actors.engines.servers.sglang import split
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError, EngineError, EngineLost
from tests.servers.engines import EOS, POSITIONS, Running, context_of, model_folder
from tests.servers.speaks_sglang import OLD, SpeaksSGLang, V, speaking
from tests.servers.stand_alone import interpreter
from tests.support.polling import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("sglang") / "model")


def config(folder: Path, *, on_update: str = "recompute", bucket_mib: int = 64, **engine: Any) -> Config:
    return Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums"},
        "rollout": {"engine": "sglang", "on_update": on_update},
        "engine": {"call_timeout_s": 10.0, **engine},
        "weights": {"timeout_s": 10.0, "bucket_mib": bucket_mib},
    })  # fmt: skip


def attach(folder: Path, fake: SpeaksSGLang | str, *, incarnation: int = 0, **settings: Any) -> ServerEngine:
    url = fake if isinstance(fake, str) else fake.url
    settled = config(folder, urls=(url,), **settings)
    return open_engine(context_of(folder, incarnation=incarnation), settled, load_tokenizer(str(folder)))


@contextmanager
def running(folder: Path, fake: SpeaksSGLang, **settings: Any) -> Iterator[Running]:
    engine = attach(folder, fake, **settings)
    try:
        yield Running(engine)
    finally:
        engine.close()


def update(engine: ServerEngine, version: int, *, term: int = 0) -> None:
    """Weights that are all the same number."""
    shapes = engine.parameters()
    engine.update(version, {name: torch.full(p.shape, float(version)) for name, p in shapes.items()}, term=term)


def ask(uid: int = 0, *, n: int = 8, ids: list[int] | None = None, **more: Any) -> Request:
    return Request(("", uid, 0, 0, 0), ids or [3, 4], (uid,), n, more.get("temperature", 1.0), more.get("top_p", 1.0))


def expected(request: Request, spans: list[list[int]]) -> tuple[list[int], list[float]]:
    """What the server samples by its rule, given the versions."""
    weights = [version for version, n in spans for _ in range(n)]
    at = range(len(request.ids), len(request.ids) + len(weights))
    return [(w + i) % V for w, i in zip(weights, at, strict=True)], [
        -(w + i / 1000) for w, i in zip(weights, at, strict=True)
    ]


def old(fake: SpeaksSGLang) -> None:
    """A server that can neither pause nor stamp, and knows no sessions."""
    fake.version, fake.stamps, fake.incremental = "0.5.12", False, False
    fake.routes = [path for path in fake.routes if path not in OLD]


def plain(fake: SpeaksSGLang) -> None:
    """One that takes weights without a session (0.5.20)."""
    fake.routes = [path for path in fake.routes if "_weight_update" not in path]


def whole_events(fake: SpeaksSGLang) -> None:
    fake.incremental = False


@pytest.mark.parametrize("kind", [lambda fake: None, plain, whole_events, old])
def test_a_sample_goes_on_over_two_updates_with_the_versions_that_made_it(folder: Path, kind: Any) -> None:
    request = ask(n=9)
    with speaking(kind) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        fake.allow(3)
        run.tokens(3)
        if not fake.stamps:
            fake.allow(2)  # an older server is asked for the rest, in a stream of its own that begins with the update
        update(run.engine, 1)
        if fake.stamps:
            fake.allow(5)
        run.tokens(2)
        update(run.engine, 4)
        fake.allow(9)
        completion = run.all()[request.key]
    assert completion.spans == [[0, 3], [1, 2], [4, 4]]
    ids, logps = expected(request, completion.spans)
    assert (completion.ids, completion.logps, completion.finish) == (ids, pytest.approx(logps), "length")


def test_an_older_server_is_asked_for_the_rest_with_the_tokens_so_far_as_prompt(folder: Path) -> None:
    with speaking(old) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(ask(n=9))
        fake.allow(3)
        run.tokens(3)
        update(run.engine, 1)
        fake.allow(9)
        run.all()
    first, rest = (body for body in fake.called("/generate") if "rid" in body)
    assert (first["input_ids"], first["sampling_params"]["max_new_tokens"]) == ([3, 4], 9)
    assert (rest["input_ids"], rest["sampling_params"]["max_new_tokens"]) == ([3, 4, 2, 3, 4], 6)
    assert len(first["rid"]) == len(rest["rid"])
    assert all(body["flush_cache"] for body in fake.called("/update_weights_from_distributed"))


def steps(fake: SpeaksSGLang) -> list[str]:
    """Calls of the last update, in order."""
    short = {"/pause_generation": "pause", "/continue_generation": "resume", "/begin_weight_update": "begin",
             "/end_weight_update": "end", "/update_weights_from_distributed": "weights"}  # fmt: skip
    names = [
        f"pause {body['mode']}" if short[path] == "pause" else short[path] for path, body in fake.calls if path in short
    ]
    last = max(i for i, name in enumerate(names) if name.startswith("pause"))
    return names[last:]


def test_recompute_retracts_and_flushes_with_the_last_weights(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3, term=1)
        assert steps(fake) == ["pause retract", "begin", "weights", "end", "resume"]
        (body,) = fake.called("/update_weights_from_distributed")
        assert (body["flush_cache"], body["weight_version"], body["abort_all_requests"]) == (True, fake.label, False)
        assert fake.label.endswith(".1.3")


def test_keep_pauses_in_place_and_flushes_nothing_but_at_a_new_term(folder: Path) -> None:
    def no_prefixes(fake: SpeaksSGLang) -> None:
        fake.settings |= {"disable_radix_cache": True, "disable_overlap_schedule": True}

    with speaking(no_prefixes) as fake, running(folder, fake, on_update="keep") as run:
        update(run.engine, 0)
        update(run.engine, 1)
        assert steps(fake)[0] == "pause in_place"
        assert fake.called("/update_weights_from_distributed")[-1]["flush_cache"] is False
        update(run.engine, 1, term=1)
        assert steps(fake)[0] == "pause retract"
        assert fake.called("/update_weights_from_distributed")[-1]["flush_cache"] is True


def test_weights_go_in_parts_of_a_bucket_and_the_last_one_is_stamped(folder: Path) -> None:
    tensors = {name: torch.zeros(n) for name, n in (("a", 3), ("b", 2), ("c", 9), ("d", 1))}
    assert split(tensors, 24) == [["a", "b"], ["c"], ["d"]]
    with speaking() as fake, running(folder, fake) as run:
        run.engine._server._bucket_bytes = 1 << 16  # type: ignore[attr-defined]
        update(run.engine, 2)
        parts = fake.called("/update_weights_from_distributed")
        assert len(parts) > 1
        assert [name for part in parts for name in part["names"]] == list(run.engine.parameters())
        assert [part.get("weight_version") for part in parts] == [None] * (len(parts) - 1) + [fake.label]
        assert [part["flush_cache"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_request_sets_every_sampling_parameter_that_a_models_generation_config_could_change(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        run.engine.submit(ask(temperature=0.7, top_p=0.9))
        run.all()
    (body,) = (body for body in fake.called("/generate") if "rid" in body)
    said = body["sampling_params"]
    assert (said["temperature"], said["top_p"], said["top_k"], said["min_p"]) == (0.7, 0.9, -1, 0.0)
    assert (said["repetition_penalty"], said["frequency_penalty"], said["stop_token_ids"]) == (1.0, 0.0, [1])
    assert body["return_logprob"] is True


def test_requests_of_a_killed_generator_are_aborted_first(folder: Path) -> None:
    with speaking() as fake, running(folder, fake):
        paths = [path for path, _ in fake.calls]
        left = ["/end_weight_update", "/continue_generation", "/abort_request"]
        assert [path for path in paths if path in left] == left
        assert paths.index("/abort_request") < paths.index("/generate")


def test_no_connection_is_used_twice_for_the_server_may_be_closing_it(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        for version in range(2):
            update(run.engine, version)
            run.engine.submit(ask())
            fake.allow(8)
            run.all()
            run.ended.clear()
        assert len(fake.calls) > 10
        assert fake.most_on_one == 1


def test_no_proxy_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        assert run.engine.version == 0


# servers that cannot serve a run


def too_old(fake: SpeaksSGLang) -> None:
    fake.version = "0.5.9"


def without_route(fake: SpeaksSGLang) -> None:
    fake.routes.remove("/init_weights_update_group")


def other_model(fake: SpeaksSGLang) -> None:
    fake.architecture = "Qwen2ForCausalLM"


def with_replicas(fake: SpeaksSGLang) -> None:
    fake.settings = {"tp_size": 1, "dp_size": 2}


def of_more_layers(fake: SpeaksSGLang) -> None:
    fake.names.append("model.layers.2.mlp.down_proj.weight")


def of_a_short_context(fake: SpeaksSGLang) -> None:
    fake.settings |= {"context_length": POSITIONS, "max_total_num_tokens": 1 << 20}


def of_little_memory(fake: SpeaksSGLang) -> None:
    fake.settings |= {"context_length": None, "max_total_num_tokens": 100}


def of_another_kind(fake: SpeaksSGLang) -> None:
    fake.answers["/openapi.json"] = [(200, "<html>a printer</html>")]


def that_fails(fake: SpeaksSGLang) -> None:
    fake.answers["/generate"] = [(503, "no room")]


def of_bfloat16(fake: SpeaksSGLang) -> None:
    fake.settings |= {"dtype": "bfloat16", "kv_cache_dtype": "auto"}


def of_any_type(fake: SpeaksSGLang) -> None:
    fake.settings |= {"dtype": "auto"}


def quantized(fake: SpeaksSGLang) -> None:
    fake.settings |= {"dtype": "float32", "quantization": "w8a8_int8"}


def of_a_short_cache(fake: SpeaksSGLang) -> None:
    fake.settings |= {"dtype": "float32", "quantization": None, "kv_cache_dtype": "fp8_e4m3"}


UNFIT = [
    (of_bfloat16, "dtype mismatch: .* computes in bfloat16, and model.dtype is float32: start it with --dtype float32"),
    (of_any_type, "dtype mismatch: .* computes in auto, .*: start it with --dtype float32"),
    (quantized, "quantization mismatch: the weights of .* are in w8a8_int8, .* start it without --quantization"),
    (of_a_short_cache, "KV-cache dtype mismatch: .* are in fp8_e4m3, .* start it without --kv-cache-dtype"),
    (too_old, "0.5.10 or newer is needed, for safety: .* is 0.5.9; upgrade"),
    (without_route, "routes that .* has not: /init_weights_update_group; upgrade"),
    (other_model, "a LlamaForCausalLM: .* serves Qwen2ForCausalLM; start it with the folder of model.path"),
    (with_replicas, "without replicas or stages: .* has 2; start it with --tp-size alone"),
    (of_more_layers, r"differ in 'layers\.2'; start it with the folder of model\.path"),
    (of_a_short_context, "up to 256 tokens and SGLang needs 8 more, and .* holds 256: start .* --context-length 264"),
    (of_little_memory, "holds 100: start it with"),
    (of_another_kind, "engine.urls must name SGLang servers"),
    (that_fails, "refused to sample a token: it answers 503: no room"),
]


@pytest.mark.parametrize(("kind", "why"), UNFIT)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_remedy(folder: Path, kind: Any, why: str) -> None:
    with speaking(kind) as fake, pytest.raises(ConfigError, match=why):
        attach(folder, fake)


def test_in_a_running_job_such_a_server_is_a_dead_engine(folder: Path) -> None:
    with speaking(too_old) as fake, pytest.raises(EngineLost, match="upgrade"):
        attach(folder, fake, incarnation=1)
    with speaking() as fake, running(folder, fake, incarnation=1) as run:
        fake.answers["/update_weights_from_distributed"] = [(400, "no memory")]
        with pytest.raises(EngineLost, match=r"must take weights .*: it answers 400: no memory"):
            update(run.engine, 0)


def test_keep_is_refused_where_old_prefixes_or_no_stamps_are(folder: Path) -> None:
    with speaking() as fake, pytest.raises(ConfigError, match="--disable-radix-cache and --disable-overlap-schedule"):
        attach(folder, fake, on_update="keep")
    with speaking(old) as fake, pytest.raises(ConfigError, match=r'set rollout\.on_update = "recompute"'):
        attach(folder, fake, on_update="keep")


def test_a_server_that_times_out_ends_the_job_at_its_start_and_an_incarnation_later(folder: Path) -> None:
    why = r"not ready within engine\.start_timeout_s \(0\.1\): .* must answer /model_info: .*; start it, or correct"
    with pytest.raises(ConfigError, match=why):
        attach(folder, "http://127.0.0.1:9", start_timeout_s=0.1)
    with pytest.raises(EngineLost, match="start it"):
        attach(folder, "http://127.0.0.1:9", incarnation=1, start_timeout_s=0.1)


@pytest.mark.parametrize("incarnation", [0, 1])
def test_an_unreachable_server_is_awaited_and_the_wait_is_logged(
    folder: Path, incarnation: int, said: list[str]
) -> None:
    port = free_port()
    begun: list[SpeaksSGLang] = []

    def begin() -> None:
        wait_until(lambda: bool(said))
        begun.append(SpeaksSGLang(port))

    beginning = threading.Thread(target=begin)
    beginning.start()
    try:
        engine = attach(folder, f"http://127.0.0.1:{port}", incarnation=incarnation, start_timeout_s=60.0)
        engine.close()
    finally:
        beginning.join()
        begun[0].close()
    (sentence,) = said
    assert re.search(
        r"generator-0\.\d: .* must answer /model_info: .*; waiting for it up to 60 s \(engine\.start_t", sentence
    )


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings."""
    lines: list[str] = []
    number = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(number)


@pytest.mark.slow
def test_a_server_whose_port_another_program_takes_first_is_started_on_another_one(
    folder: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's server, which answers at once: it is not taken for ours."""
    python, free = interpreter(tmp_path), free_port()
    with speaking() as neighbour:
        taken = int(neighbour.url.rpartition(":")[2])
        ports = iter([taken, free])
        monkeypatch.setattr(connect, "free_port", lambda: next(ports))
        engine: Any = open_engine(context_of(folder), config(folder, python=python), load_tokenizer(str(folder)))
        try:
            assert engine._link.url == f"http://127.0.0.1:{free}"
            assert {path for path, _ in neighbour.calls} <= {"/model_info"}
        finally:
            engine.close()
    assert f"another program took the port of http://127.0.0.1:{taken}: starting the server again" in said[0]


@pytest.mark.slow
def test_a_server_that_never_gets_a_port_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speaking() as neighbour:
        taken = int(neighbour.url.rpartition(":")[2])
        monkeypatch.setattr(connect, "free_port", lambda: taken)
        monkeypatch.setattr(connect, "PORTS", 2)
        settled = config(folder, python=interpreter(tmp_path))
        with pytest.raises(ConfigError, match=r"has ended with code 1: OSError: \[Errno 98\] Address already in use"):
            open_engine(context_of(folder), settled, load_tokenizer(str(folder)))


def test_a_model_whose_parameters_have_other_names_than_its_files_is_refused() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        plain = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, num_key_value_heads=2, head_dim=8, **shape))
        experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=40, num_key_value_heads=2, head_dim=8, **shape))
    assert shape_of(plain).vocabulary == 40
    with pytest.raises(ConfigError, match=r"those of qwen3_moe; set rollout\.engine"):
        shape_of(experts)


def test_a_generator_without_an_address_of_its_own_is_refused(folder: Path) -> None:
    settled = config(folder, urls=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match="1 for generator 1"):
        open_engine(context_of(folder, index=1), settled, load_tokenizer(str(folder)))


def test_a_server_that_does_not_come_to_its_group_is_given_up(folder: Path) -> None:
    def hangs(fake: SpeaksSGLang) -> None:
        fake.hangs.add("/init_weights_update_group")

    with speaking(hangs) as fake, pytest.raises(ConfigError, match=re.escape("0.3 s")):
        attach(folder, fake, call_timeout_s=0.3)


def test_a_vocabulary_mismatch_of_the_server_is_refused_at_the_first_weights(folder: Path) -> None:
    def refuses(fake: SpeaksSGLang) -> None:
        fake.answers["/update_weights_from_distributed"] = [(400, "shape [32, 64], not [31, 64]")]

    why = r"shape \[32, 64\].*start it with the folder of model\.path"
    with speaking(refuses) as fake, running(folder, fake) as run, pytest.raises(ConfigError, match=why):
        update(run.engine, 0)


# servers that are lost


def lost(run: Running, why: str) -> None:
    with pytest.raises(EngineLost, match=why):
        run.all()


def test_weights_that_are_refused_later_lose_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.answers["/update_weights_from_distributed"] = [(400, "no memory")]
        with pytest.raises(EngineLost, match=r"must take weights .*\.0\.1: it answers 400: no memory"):
            update(run.engine, 1)


def test_a_server_that_stops_in_the_middle_of_weights_is_given_up(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.hangs.add("/update_weights_from_distributed")
        run.engine._server._load_timeout_s = 0.3  # type: ignore[attr-defined]
        why = "did not receive the weights within|must answer /update_weights_from_distributed within"
        with pytest.raises(EngineLost, match=why):
            update(run.engine, 1)


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update", "/continue_generation"])
def test_a_call_without_an_answer_ends_by_its_deadline(folder: Path, path: str) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.hangs.add(path)
        run.engine._server._call_timeout_s = 0.3  # type: ignore[attr-defined]
        with pytest.raises(EngineLost, match=r"must answer /[a-z_]+ within 0\.3 s"):
            update(run.engine, 1)
        assert fake.called(path)


@pytest.mark.parametrize("text", ["<html>a printer</html>", '{"success": false, "message": "no"}'])
@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update", "/end_weight_update"])
def test_a_call_whose_answer_is_no_yes_loses_the_server(folder: Path, path: str, text: str) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.answers[path] = [(200, text)]
        with pytest.raises(EngineLost, match=r"it answers 200: .*(printer|no)"):
            update(run.engine, 1)


def test_a_call_that_fails_loses_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        fake.answers["/pause_generation"] = [(500, "internal error")]
        with pytest.raises(EngineLost, match="must do /pause_generation: it answers 500: internal error"):
            update(run.engine, 0)


def test_a_server_that_is_silent_with_work_is_lost(folder: Path) -> None:
    with speaking() as fake, running(folder, fake, silent_s=0.3) as run:
        update(run.engine, 0)
        run.engine.submit(ask())
        fake.allow(2)
        lost(run, "every 0.3 s .*has 1 samples and sent nothing")


def test_a_server_without_work_may_be_silent(folder: Path) -> None:
    with speaking() as fake, running(folder, fake, silent_s=1e-3) as run:
        update(run.engine, 0)
        assert [run.engine.step() for _ in range(3)] == [[]] * 3


def test_a_sample_whose_stream_breaks_off_goes_on_where_the_server_still_answers(folder: Path) -> None:
    """0.5.23 breaks a stream by its own fault when it aborts a retracted sample."""
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.break_after = [3]
        request = ask(n=9)
        run.engine.submit(request)
        fake.allow(9)
        completion = run.all()[request.key]
        first, rest = (body for body in fake.called("/generate") if "rid" in body)
    assert (completion.ids, completion.logps) == expected(request, [[0, 9]])
    assert (completion.spans, completion.finish) == ([[0, 9]], "length")
    assert rest["input_ids"] == [*first["input_ids"], *completion.ids[:3]]
    assert rest["sampling_params"]["max_new_tokens"] == 6


@pytest.mark.parametrize("how", ["broken stream", "error event"])
def test_of_a_broken_stream_only_tokens_of_known_versions_are_kept(folder: Path, how: str) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        request = ask(n=9)
        run.engine.submit(request)
        fake.allow(3)
        run.tokens(3)
        update(run.engine, 1)
        fake.break_after, fake.says_why = [5], how == "error event"
        fake.allow(9)
        completion = run.all()[request.key]
    assert completion.spans == [[0, 3], [1, 6]]
    ids, logps = expected(request, completion.spans)
    assert (completion.ids, completion.logps) == (ids, pytest.approx(logps))


def test_a_stream_that_breaks_off_at_its_last_token_ends_the_sample(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.break_after = [8]
        fake.allow(8)
        request = ask(n=8)
        run.engine.submit(request)
        assert run.all()[request.key].spans == [[0, 8]]
        assert len([body for body in fake.called("/generate") if "rid" in body]) == 1


def test_a_server_is_lost_when_a_stream_breaks_off_and_it_does_not_answer(folder: Path) -> None:
    with speaking() as fake, running(folder, fake, call_timeout_s=0.5) as run:
        update(run.engine, 0)
        fake.break_after = [3]
        fake.hangs.add("/model_info")
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, r"the stream broke off: .*; the server at .* must answer /model_info within 0\.5 s")


def test_a_sample_whose_streams_always_break_off_is_not_sent_for_ever(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.breaks = True
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, f"has ended a sample {SENT_AGAIN + 1} times: the stream broke off")


@pytest.mark.parametrize("kind", [None, old])
def test_a_server_that_was_restarted_is_lost_and_none_of_its_tokens_is_kept(folder: Path, kind: Any) -> None:
    with speaking(kind) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.label = "default"
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, "'default'.*restarted, or another client updates it")


def test_a_refused_sample_is_sent_again_and_not_for_ever(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        fake.answers["/generate"] = [(503, "busy")] * SENT_AGAIN
        run.engine.submit(ask())
        assert [completion.spans for completion in run.all().values()] == [[[0, 8]]]
        fake.answers["/generate"] = [(503, "busy")] * (SENT_AGAIN + 1)
        run.engine.submit(ask(1))
        lost(run, f"{SENT_AGAIN + 1} times: it answers 503: busy")


def test_a_sample_that_the_server_ends_by_itself_goes_on_from_its_tokens(folder: Path) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        fake.allow(4)
        run.tokens(4)
        (stream,) = fake.streams.values()
        with fake.changed:
            stream.finish = {"type": "abort", "message": "out of memory"}
            fake.changed.notify_all()
        fake.allow(9)
        completion = run.all()[request.key]
    assert completion.spans == [[0, 9]]
    assert (completion.ids, completion.logps) == (
        expected(request, [[0, 9]])[0],
        pytest.approx(expected(request, [[0, 9]])[1]),
    )


def test_a_piece_that_was_ended_just_after_its_stop_token_is_no_longer_asked_for(folder: Path) -> None:
    request = ask(n=9)
    with speaking(old) as fake, running(folder, fake) as run:
        update(run.engine, 30)  # its first token is the end of text
        run.engine.submit(request)
        fake.allow(1)
        run.tokens(1)
        update(run.engine, 31)
        fake.allow(9)
        completion = run.all()[request.key]
    assert (completion.ids, completion.spans, completion.finish) == ([EOS], [[30, 1]], "stop")


def test_a_request_cut_short_continues_with_its_remaining_token_budget(folder: Path) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.most_new_tokens = 4  # SGLang's SGLANG_MAX_NEW_TOKENS_LIMIT, and where its memory is short
        fake.allow(9)
        run.engine.submit(request)
        completion = run.all()[request.key]
        assert [body["sampling_params"]["max_new_tokens"] for body in fake.called("/generate")[1:]] == [9, 5, 1]
        assert (completion.ids, completion.finish) == (expected(request, [[0, 9]])[0], "length")
        fake.most_new_tokens = 0
        run.engine.submit(ask(1))
        lost(run, "has ended a sample 4 times: .* 0 of 8 tokens")


def test_a_sample_aborted_in_the_waiting_queue_has_its_last_token_once(folder: Path) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        fake.allow(4)
        run.tokens(4)
        (stream,) = fake.streams.values()
        with fake.changed:
            stream.finish, stream.ends_in_queue = {"type": "abort", "message": "Abort in waiting queue"}, True
            fake.changed.notify_all()
        fake.allow(9)
        completion = run.all()[request.key]
    assert (completion.ids, completion.spans) == (expected(request, [[0, 9]])[0], [[0, 9]])
    assert completion.logps == pytest.approx(expected(request, [[0, 9]])[1])


RUBBISH: list[Any] = [
    [1],
    "text",
    {"meta_info": "text"},
    {"meta_info": {}, "output_ids": [V + 1000]},
    *(
        {"output_ids": [3], "meta_info": {"output_token_logprobs": [[logp, 3, None]], "finish_reason": None}}
        for logp in (None, float("nan"), float("-inf"), 0.5)
    ),
    {"output_ids": [9999], "meta_info": {"output_token_logprobs": [[-1.0, 9999, None]], "finish_reason": None}},
    {"output_ids": [-1], "meta_info": {"output_token_logprobs": [[-1.0, -1, None]], "finish_reason": None}},
    {"output_ids": [3], "meta_info": {"output_token_logprobs": [[-1.0, 3, None]],
                                      "finish_reason": {"type": "stop", "matched": "NaN happened"},
                                      "weight_versions": [{"version": "0", "start": 0, "end": 1}]}},
    {"output_ids": [3], "meta_info": {"output_token_logprobs": [[-1.0, 3, None]], "finish_reason": {"type": "stop"},
                                      "weight_versions": [{"version": "0", "start": 3, "end": 1},
                                                          {"version": "0", "start": 0, "end": 3}]}},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("event", RUBBISH)
def test_an_event_that_is_none_loses_the_server_with_a_sentence(folder: Path, event: Any) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.answers["/generate"] = [(200, f"data: {json.dumps(event)}\n\n")]
        run.engine.submit(ask())
        lost(
            run, "must answer as SGLang does|a log-prob is|samples token ids below|report weight versions in the order"
        )


def test_a_line_of_a_stream_ends_with_a_newline_only(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.text = "a\u2028b\u0085c\u2029d"  # as orjson writes it
        fake.allow(8)
        run.engine.submit(ask())
        assert [completion.spans for completion in run.all().values()] == [[[0, 8]]]


def test_server_silence_is_not_counted_while_responses_are_not_read(folder: Path) -> None:
    with speaking() as fake, running(folder, fake, silent_s=0.3) as run:
        update(run.engine, 0)
        run.engine.submit(ask())
        fake.allow(8)
        wait_until(lambda: not fake.streams and bool(fake.called("/generate")[1:]))
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 0.5)
        assert [completion.spans for completion in run.all().values()] == [[[0, 8]]]


def test_two_generators_that_update_one_server_both_fail(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run, running(folder, fake) as other:
        update(run.engine, 0)
        update(other.engine, 0)  # perhaps of another run: other weights by the same number
        fake.allow(8)
        run.engine.submit(ask())
        lost(run, "restarted, or another client updates it")


def test_an_aborted_sample_is_ended_at_the_server_by_a_name_that_begins_no_other(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        for uid in range(12):
            run.engine.submit(ask(uid))
        fake.allow(1)
        run.tokens(12)
        aborted = run.engine.abort(ask(0).key)
        fake.allow(8)
        assert len(run.all()) == 11
        assert aborted is not None
        assert aborted.spans == [[0, 1]]
        wait_until(lambda: fake.called("/abort_request")[-1]["rid"].endswith("-000000000001"))


def test_tokens_after_an_update_are_held_back_until_their_version_is_known(folder: Path) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        fake.allow(3)
        run.tokens(3)
        update(run.engine, 1)
        fake.allow(6)
        run.tokens(3)
        done = run.engine.so_far(request.key)
        assert done is not None
        assert (done.spans, len(done.ids), len(done.logps)) == ([[0, 3]], 3, 3)
        assert run.engine.newest(request.key) == 1
        fake.allow(9)
        assert run.all()[request.key].spans == [[0, 3], [1, 6]]


def test_nothing_is_sent_while_it_rests(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 5)
        fake.allow(8)
        run.engine.pause()
        assert fake.is_paused
        run.engine.submit(ask())
        assert [run.engine.step() for _ in range(3)] == [[]] * 3
        assert not [body for body in fake.called("/generate") if "rid" in body]
        update(run.engine, 2, term=1)
        assert [completion.spans for completion in run.all().values()] == [[[2, 8]]]


def test_weights_of_another_model_are_refused_before_they_reach_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        with pytest.raises(EngineError, match="every weight"):
            run.engine.update(0, {"a": torch.zeros(1)})
        assert not fake.called("/pause_generation")
        assert run.engine.version is None


RULES = [
    ({"rollout": {"engine": "builtin"}, "engine": {"silent_s": 3.0}}, "the builtin engine has no server"),
    ({"engine": {"urls": ["127.0.0.1:30000"]}}, "engine.urls are like"),
    ({"engine": {"urls": ["http://a:1"]}, "topology": {"generators": 2}}, "1 for 2"),
    ({"engine": {"urls": ["http://a:1", "http://a:1/"]}, "topology": {"generators": 2}}, "a server of its own"),
    ({"engine": {"urls": ["http://a:1"], "python": "python3"}}, "runs already"),
    ({"engine": {"start_timeout_s": 900}}, "set launch.timeout_s .300. to more than engine.start_timeout_s .900."),
]


@pytest.mark.parametrize(("changes", "why"), RULES)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], why: str) -> None:
    base = {"model": {"path": "m"}, "data": {"task": "sums"}, "rollout": {"engine": "sglang"}}
    with pytest.raises(ConfigError, match=why):
        check(Config.model_validate(base | changes))


# generation settings


def test_controls_go_to_the_server_under_its_names(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        run.engine.submit(replace(ask(), controls=SamplingControls(top_k=5, min_p=0.1, stop_token_ids=(30,))))
        run.all()
        (body,) = (body for body in fake.called("/generate") if "rid" in body)
        said = body["sampling_params"]
        assert (said["top_k"], said["min_p"], said["stop_token_ids"]) == (5, 0.1, [1, 30])
        assert "ignore_eos" not in said


def test_with_ignore_eos_the_server_ends_at_no_token_so_the_engine_does(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3)
        run.engine.submit(replace(ask(n=30), controls=SamplingControls(ignore_eos=True, stop_token_ids=(8,))))
        fake.allow(6)
        (completion,) = run.all().values()
        (body,) = (body for body in fake.called("/generate") if "rid" in body)
    assert body["sampling_params"]["ignore_eos"] is True
    assert (completion.ids, completion.finish, completion.spans) == ([5, 6, 7, 8], "stop", [[3, 4]])


@pytest.mark.parametrize(
    "controls",
    [
        SamplingControls(repetition_penalty=1.1),
        SamplingControls(presence_penalty=0.1),
        SamplingControls(frequency_penalty=0.1),
        SamplingControls(logit_bias=((3, 1.0),)),
        SamplingControls(min_new_tokens=2),
    ],
)
def test_controls_that_change_log_probs_are_refused(folder: Path, controls: SamplingControls) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        with pytest.raises(EngineError, match="log-probs are of logits after penalties"):
            run.engine.submit(replace(ask(), controls=controls))
