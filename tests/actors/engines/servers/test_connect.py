"""How a server is reached, and which servers and settings are refused."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.servers import connect
from actors.engines.servers.connect import open_engine
from actors.engines.servers.http_client import HttpClient
from actors.engines.servers.model_spec import shape_of
from actors.engines.servers.server_process import free_port
from actors.engines.servers.vllm_probe import probe
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError, EngineLost
from tests.servers.attached import (
    SPEAKING,
    WEIGHTS,
    ask,
    attach,
    config,
    having,
    old,
    requests,
    running,
    update,
    without,
)
from tests.servers.engines import POSITIONS, context_of
from tests.servers.speaks_sglang import SpeaksSGLang, speaking
from tests.servers.stand_alone import interpreter
from tests.support.polling import wait_until

MORE_LAYERS = having(names=["model.layers.2.mlp.down_proj.weight"])
RULE_OF_NAMES = r"differ in 'layers\.2'; start it with the folder of model\.path"
DTYPE = "dtype mismatch: .* computes in {}, and model.dtype is float32: start it with --dtype float32"
ONCE = "weights in {} are refused .* would not quantize pushed weights again: use .* --load-format flash_rl, or none"
UNFIT: list[tuple[str, Any, str]] = [
    ("sglang", having(settings={"dtype": "bfloat16", "kv_cache_dtype": "auto"}), DTYPE.format("bfloat16")),
    ("sglang", having(settings={"dtype": "auto"}), DTYPE.format("auto")),
    ("sglang", having(settings={"dtype": "float32", "quantization": "w8a8_int8"}), ONCE.format("w8a8_int8")),
    ("sglang", having(settings={"dtype": "float32", "torchao_config": "int8wo"}), ONCE.format("int8wo")),
    ("sglang", having(version="0.5.9"), "0.5.10 or newer is needed, for safety: .* is 0.5.9; upgrade"),
    ("sglang", without("/init_weights_update_group"), "routes that .* has not: /init_weights_update_group; upgrade"),
    ("sglang", having(architecture="Qwen2ForCausalLM"), "a LlamaForCausalLM: .* serves Qwen2ForCausalLM; start it"),
    ("sglang", having(settings={"dp_size": 2}), "without replicas or stages: .* has 2; start it with --tp-size alone"),
    ("sglang", MORE_LAYERS, RULE_OF_NAMES),
    (
        "sglang",
        having(settings={"context_length": POSITIONS, "max_total_num_tokens": 1 << 20}),
        "up to 256 tokens and SGLang needs 8 more, and .* holds 256: start .* --context-length 264",
    ),
    ("sglang", having(settings={"context_length": None, "max_total_num_tokens": 100}), "holds 100: start it with"),
    ("sglang", having(answers={"/openapi.json": [(200, "a printer")]}), "engine.urls must name SGLang servers"),
    ("sglang", having(answers={"/generate": [(503, "no room")]}), "refused to sample a token: it answers 503: no room"),
    ("vllm", having(model={"dtype": "torch.bfloat16"}), DTYPE.format("bfloat16")),
    ("vllm", having(version="0.31.2"), r"0\.32 or newer is needed: .* is 0\.31\.2; upgrade"),
    ("vllm", without("/collective_rpc"), "has not: /collective_rpc; start it with VLLM_SERVER_DEV_MODE=1"),
    ("vllm", having(scale_out=False), "has not: start it with --enable-scale-out"),
    (
        "vllm",
        having(parallel={"data_parallel_size": 2}),
        "replicas or stages: .* has 2; .* --tensor-parallel-size alone",
    ),
    ("vllm", having(model={"logprobs_mode": "raw_logits"}), "gives raw_logits; .* --logprobs-mode processed_logprobs"),
    ("vllm", having(model={"hf_overrides": {}}), "never reloads a tied output layer: start .* with --hf-overrides"),
    ("vllm", MORE_LAYERS, RULE_OF_NAMES),
    ("vllm", having(names=["model.layers.1.self_attn.qkv_proj.bias"]), r"differ in 'bias'; start it with the folder"),
    ("vllm", having(model={"max_model_len": 255}), "up to 256 tokens, and .* holds 255: .* --max-model-len 256"),
    ("vllm", having(answers={"/version": [(200, "a printer")]}), "engine.urls must name vLLM servers"),
]


@pytest.mark.parametrize(("kind", "change", "why"), UNFIT)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_remedy(
    folder: Path, kind: str, change: Any, why: str
) -> None:
    with SPEAKING[kind](change) as fake, pytest.raises(ConfigError, match=why):
        attach(folder, fake)


@pytest.mark.parametrize(
    ("kind", "change", "flag"),
    [
        ("sglang", having(salts=False), "--disable-radix-cache and --disable-overlap-schedule"),
        ("sglang", None, "start .* with --disable-overlap-schedule"),
        ("sglang", old, r'set rollout\.on_update = "recompute"'),
        ("vllm", having(salts=False), "takes no cache_salt: start it with --no-enable-prefix-caching"),
    ],
)
def test_keep_is_refused_where_old_prefixes_or_no_stamps_are(folder: Path, kind: str, change: Any, flag: str) -> None:
    with SPEAKING[kind](change) as fake, pytest.raises(ConfigError, match=flag):
        attach(folder, fake, on_update="keep")


@pytest.mark.parametrize(("kind", "field"), [("sglang", "extra_key"), ("vllm", "cache_salt")])
@pytest.mark.parametrize("salts", [True, False])
def test_requests_are_salted_with_their_weights_where_the_server_can(
    folder: Path, kind: str, field: str, salts: bool
) -> None:
    """With "keep" its prefix cache stays on then: running samples and new ones never share a prefix."""
    change = having(salts=salts, settings={"disable_overlap_schedule": True, "disable_radix_cache": not salts})
    change = change if kind == "sglang" else having(salts=salts, caches_prefixes=salts)
    with SPEAKING[kind](change) as fake, running(folder, fake, on_update="keep") as run:
        labels = list[str]()
        for version in range(3):
            update(run.engine, version)
            run.engine.submit(ask(version))
            labels.append(fake.label)
            wait_until(lambda: len(requests(fake)) == len(labels))
        assert [body.get(field) for body in requests(fake)] == (labels if salts else [None] * 3)
        assert len(set(labels)) == 3


FP8_CACHE = ("keys and values in fp8_e4m3", having(settings={"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}))
FLASH = {"dtype": "float32", "quantization": "fp8", "load_format": "flash_rl"}
ROUNDED: list[tuple[str, str, Any]] = [
    ("sglang", *FP8_CACHE),
    ("sglang", "weights in fp8", having(settings=FLASH)),
    ("vllm", "weights in fp8", having(model={"dtype": "torch.float32", "quantization": "fp8"})),
    ("vllm", "keys and values in fp8", having(model={"dtype": "torch.float32"}, cache={"cache_dtype": "fp8"})),
]


@pytest.mark.parametrize(("kind", "what", "change"), ROUNDED)
def test_a_server_of_fewer_bits_is_taken_with_a_correction_only(
    folder: Path, kind: str, what: str, change: Any
) -> None:
    with SPEAKING[kind](change) as fake, running(folder, fake) as run:
        update(run.engine, 0)
    with SPEAKING[kind](change) as fake, pytest.raises(ConfigError, match=f"missing correction with {what} .*http"):
        attach(folder, fake, actor={"correction": "none"})


def test_an_attached_server_of_the_runs_formats_is_taken(folder: Path) -> None:
    same = having(model={"dtype": "torch.float32", "quantization": None}, cache={"cache_dtype": "auto"})
    with SPEAKING["vllm"](same) as fake, running(folder, fake) as run:
        update(run.engine, 0)


@pytest.mark.parametrize(("kind", "version"), [("sglang", "0.5.9"), ("vllm", "0.31.2")])
def test_in_a_running_job_such_a_server_is_a_dead_engine(folder: Path, kind: str, version: str) -> None:
    with SPEAKING[kind](having(version=version)) as fake, pytest.raises(EngineLost, match="upgrade"):
        attach(folder, fake, incarnation=1)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("incarnation", "version", "error", "why"),
    [
        (0, 0, ConfigError, r"no room.*start it with the folder of model\.path"),
        (0, 1, EngineLost, r"must take weights .*\.0\.1: it answers 500: no room"),
        (1, 0, EngineLost, r"must take weights .*\.0\.0: it answers 500: no room"),
    ],
)
def test_refused_weights_are_an_error_of_the_config_at_the_first_push_and_lose_the_server_later(
    folder: Path, kind: str, incarnation: int, version: int, error: type[Exception], why: str
) -> None:
    with SPEAKING[kind]() as fake, running(folder, fake, incarnation=incarnation) as run:
        for earlier in range(version):
            update(run.engine, earlier)
        fake.answers[WEIGHTS[kind]] = [(500, "no room")] * 9
        with pytest.raises(error, match=why):
            update(run.engine, version)


def test_a_server_that_times_out_ends_the_job_at_its_start_and_an_incarnation_later(folder: Path) -> None:
    why = r"not ready within engine\.start_timeout_s \(0\.1\): .* must answer /model_info: .*; start it, or correct"
    with pytest.raises(ConfigError, match=why):
        attach(folder, "http://127.0.0.1:9", start_timeout_s=0.1)
    with pytest.raises(EngineLost, match="start it"):
        attach(folder, "http://127.0.0.1:9", incarnation=1, start_timeout_s=0.1)


def test_a_vllm_server_of_another_machine_is_refused() -> None:
    link = HttpClient("http://127.0.0.2:9")
    with pytest.raises(ConfigError, match=r"its server is on this machine, not 127\.0\.0\.2"):
        probe(link, names=None, config=Config(), is_tied=False, longest=9)
    link.close()


def test_an_unreachable_server_is_awaited_and_the_wait_is_logged(folder: Path, warned: list[str]) -> None:
    port = free_port()
    begun: list[SpeaksSGLang] = []

    def begin() -> None:
        wait_until(lambda: bool(warned))
        begun.append(SpeaksSGLang(port))

    beginning = threading.Thread(target=begin)
    beginning.start()
    try:
        attach(folder, f"http://127.0.0.1:{port}", incarnation=1, start_timeout_s=60.0).close()
    finally:
        beginning.join()
        begun[0].close()
    (sentence,) = warned
    assert re.search(r"generator-0\.1: .* must answer /model_info: .*; waiting for it up to 60 s \(engine\.s", sentence)


@pytest.mark.slow
def test_a_server_whose_port_another_program_takes_first_is_started_on_another_one(
    folder: Path, tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's server, which answers at once: it is not taken for ours. Without a free port it is given up."""
    settled, free = config(folder, "sglang", python=interpreter(tmp_path)), free_port()
    with speaking() as neighbour:
        taken = int(neighbour.url.rpartition(":")[2])
        ports = iter([taken, free, taken])
        monkeypatch.setattr(connect, "free_port", lambda: next(ports))
        engine: Any = open_engine(context_of(folder), settled, load_tokenizer(str(folder)))
        try:
            assert engine._link.url == f"http://127.0.0.1:{free}"
            assert {path for path, _ in neighbour.calls} <= {"/model_info"}
        finally:
            engine.close()
        assert f"another program took the port of http://127.0.0.1:{taken}: starting the server again" in warned[0]
        monkeypatch.setattr(connect, "PORTS", 1)
        with pytest.raises(ConfigError, match=r"has ended with code 1: OSError: \[Errno 98\] Address already in use"):
            open_engine(context_of(folder), settled, load_tokenizer(str(folder)))


def test_a_server_that_does_not_start_ends_the_job_with_its_last_output(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "python"  # has a package of that name, and no server
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *metadata*) echo 0.5.23;; *) exec {sys.executable} -c "raise OSError(28)";; esac\n'
    )
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="the server has ended with code 1: OSError: 28"):
        open_engine(context_of(folder), config(folder, "sglang", python=str(broken)), load_tokenizer(str(folder)))


def test_a_model_whose_parameters_have_other_names_than_its_files_is_refused() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        plain = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, num_key_value_heads=2, head_dim=8, **shape))
        experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=40, num_key_value_heads=2, head_dim=8, **shape))
    assert shape_of(plain).vocabulary == 40
    with pytest.raises(ConfigError, match=r"those of qwen3_moe; set rollout\.engine"):
        shape_of(experts)


def test_a_generator_without_an_address_of_its_own_is_refused(folder: Path) -> None:
    settled = config(folder, "sglang", urls=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match="1 for generator 1"):
        open_engine(context_of(folder, index=1), settled, load_tokenizer(str(folder)))


def test_a_server_that_does_not_come_to_its_group_is_given_up(folder: Path) -> None:
    with speaking(having(hangs={"/init_weights_update_group"})) as fake, pytest.raises(ConfigError, match=r"0\.3 s"):
        attach(folder, fake, call_timeout_s=0.3)


RULES = [
    ({"rollout": {"engine": "builtin"}, "engine": {"silent_s": 3.0}}, "the builtin engine has no server"),
    ({"engine": {"urls": ["127.0.0.1:30000"]}}, "invalid URL in engine.urls"),
    ({"engine": {"urls": ["http://a:1"]}, "topology": {"generators": 2}}, "1 for 2"),
    (
        {"engine": {"urls": ["http://a:1", "http://a:1/"]}, "topology": {"generators": 2}},
        "duplicate server in engine.urls",
    ),
    ({"engine": {"urls": ["http://a:1"], "python": "python3"}}, "runs already"),
    ({"engine": {"start_timeout_s": 900}}, "set launch.timeout_s .300. to more than engine.start_timeout_s .900."),
]


@pytest.mark.parametrize(("changes", "why"), RULES)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], why: str) -> None:
    base = {"model": {"path": "m"}, "data": {"task": "sums"}, "rollout": {"engine": "sglang"}}
    with pytest.raises(ConfigError, match=why):
        check(Config.model_validate(base | changes))
