"""The engine vllm against a server of the test's own: what it asks for, and what it does when that goes wrong."""

import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engines.protocol import Done, Request, SamplingControls
from actors.engines.servers import server_process, vllm
from actors.engines.servers import weight_transfer as handover
from actors.engines.servers.connect import open_engine
from actors.engines.servers.engine import ServerEngine
from actors.engines.servers.http_client import HttpClient
from actors.engines.servers.protocol import PieceUpdate
from actors.engines.servers.request import begun
from actors.engines.servers.server_process import installed
from actors.engines.servers.vllm import command, environment
from actors.engines.servers.vllm_probe import probe
from actors.engines.servers.weight_transfer import WeightFiles, sweep
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError, EngineLost
from tests.servers.engines import Running, context_of, model_folder
from tests.servers.speaks_sglang import V
from tests.servers.speaks_vllm import SpeaksVLLM, speaking


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("vllm") / "model")


def config(folder: Path, *, on_update: str = "recompute", gconfig: Any = None, **engine: Any) -> Config:
    return Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums"},
        "gconfig": gconfig or {},
        "rollout": {"engine": "vllm", "on_update": on_update},
        "engine": {"call_timeout_s": 10.0, **engine},
        "weights": {"timeout_s": 10.0},
    })  # fmt: skip


def attach(folder: Path, fake: SpeaksVLLM | str, *, incarnation: int = 0, **settings: Any) -> ServerEngine:
    settled = config(folder, urls=(fake if isinstance(fake, str) else fake.url,), **settings)
    return open_engine(context_of(folder, incarnation=incarnation), settled, load_tokenizer(str(folder)))


@contextmanager
def running(folder: Path, fake: SpeaksVLLM, **settings: Any) -> Iterator[Running]:
    engine = attach(folder, fake, **settings)
    try:
        yield Running(engine)
    finally:
        engine.close()


def update(engine: ServerEngine, version: int, *, term: int = 0) -> None:
    """Weights that are all the same number."""
    shapes = engine.parameters()
    engine.update(version, {name: torch.full(p.shape, float(version)) for name, p in shapes.items()}, term=term)


def ask(uid: int = 0, *, n: int = 8, temperature: float = 1.0, top_p: float = 1.0) -> Request:
    return Request(("", uid, 0, 0, 0), [3, 4], (uid,), n, temperature, top_p)


def test_a_sample_goes_on_over_two_updates_with_the_versions_that_made_it(folder: Path) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        for version, n_allowed in ((1, 3), (4, 5)):
            fake.allow(n_allowed)
            run.tokens(n_allowed - run.engine.n_tokens)
            update(run.engine, version)
        fake.allow(9)
        completion = run.all()[request.key]
    assert completion.spans == [[0, 3], [1, 2], [4, 4]]
    by = [0, 0, 0, 1, 1, 4, 4, 4, 4]
    assert completion.ids == [(w + i) % V for i, w in enumerate(by, 2)]
    assert completion.logps == pytest.approx([-(w + i / 1000) for i, w in enumerate(by, 2)])
    assert completion.finish == "length"


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


def test_recompute_drops_keys_and_prefixes_and_stamps_before_it_goes_on(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 3, term=1)
        assert steps(fake) == ["pause keep true", "weights", "flush", "stamp", "resume"]
        assert fake.label.endswith(".1.3")


def test_keep_drops_nothing_but_at_a_new_term(folder: Path) -> None:
    def no_prefixes(fake: SpeaksVLLM) -> None:
        fake.caches_prefixes = False

    with speaking(no_prefixes) as fake, running(folder, fake, on_update="keep") as run:
        update(run.engine, 0)
        update(run.engine, 1)
        assert steps(fake) == ["pause keep false", "weights", "stamp", "resume"]
        update(run.engine, 1, term=1)
        assert steps(fake) == ["pause keep true", "weights", "flush", "stamp", "resume"]


def test_weights_come_in_a_private_folder_of_memory_that_does_not_stay(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(vllm, "WeightFiles", partial(WeightFiles, tmp_path))
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 2)
        (taken,) = fake.taken
        assert {name: tensor.shape for name, tensor in taken.items() if name != "lm_head.weight"} == {
            name: form.shape for name, form in run.engine.parameters().items()
        }
        assert torch.equal(taken["lm_head.weight"], taken["model.embed_tokens.weight"])  # which is tied in the model
        assert fake.modes_of_folder == [0o700]
        (left,) = tmp_path.iterdir()
        assert list(left.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_tied_weight_is_not_sent_to_a_server_that_ties_it(folder: Path) -> None:
    def tied(fake: SpeaksVLLM) -> None:
        fake.model["hf_overrides"], fake.parallel["worker_cls"] = {}, "gpu_worker.Worker"

    with speaking(tied) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        assert set(fake.taken[0]) == set(run.engine.parameters())


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f"{handover.PREFIX}{name}" for name in ("dead", "alive"))
    for path in (dead, alive):
        path.mkdir()
        (path / handover.FILE).write_bytes(b"weights")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]
    os.close(lock)
    ours = WeightFiles(tmp_path)
    with ours.holding({"a": torch.zeros(3)}) as held:
        sweep(tmp_path)
        assert list(tmp_path.iterdir()) == [held]
    ours.close()


def test_a_folder_is_not_removed_by_those_that_begin_at_the_same_time(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweeps() -> None:
        while not ended.is_set():
            sweep(tmp_path)

    thread = threading.Thread(target=sweeps)
    thread.start()
    try:
        for _ in range(200):
            mine = WeightFiles(tmp_path)
            with mine.holding({"a": torch.zeros(3)}) as folder:
                assert (folder / "model.safetensors").exists()
            mine.close()
    finally:
        ended.set()
        thread.join()
    assert not list(tmp_path.iterdir())


def test_weights_that_find_no_room_after_all_lose_the_server(tmp_path: Path) -> None:
    mine = WeightFiles(tmp_path)
    with mine.holding({"a": torch.zeros(3)}) as folder:
        pass
    folder.rmdir()
    why = "weights need 1 MiB in .* on their way to the server"
    with pytest.raises(EngineLost, match=why), mine.holding({"a": torch.zeros(3)}):
        pass
    mine.close()


def test_without_room_in_memory_weights_go_through_the_temporary_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = WeightFiles(tmp_path / "none")
    with ours.holding({"a": torch.zeros(3)}) as held:
        assert held.parent == tmp_path
    ours.close()


def test_a_request_sets_every_sampling_parameter_that_a_models_generation_config_could_change(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        run.engine.submit(ask(temperature=0.7))
        run.all()
    (body,) = fake.called("/generate")
    said = body["sampling_params"]
    assert (said["temperature"], said["top_p"], said["top_k"], said["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert (said["repetition_penalty"], said["ignore_eos"], said["stop_token_ids"]) == (1.0, True, [1])
    assert said["logprobs"] == 0


def test_requests_of_a_killed_generator_are_aborted_first(folder: Path) -> None:
    with speaking() as fake, running(folder, fake):
        paths = [path for path, _ in fake.calls]
        assert [path for path in paths if path in ("/abort_requests", "/resume")] == ["/abort_requests", "/resume"]


def test_an_aborted_sample_is_ended_at_the_server_by_its_name_there(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(ask())
        fake.allow(2)
        run.tokens(2)
        (rid,) = fake.streams
        aborted = run.engine.abort(ask().key)
        assert aborted is not None
        assert aborted.spans == [[0, 2]]
        run.engine.submit(ask(1, n=3))
        fake.allow(3)
        assert set(run.all()) == {ask(1).key}
        assert fake.called("/abort_requests")[-1] == {"request_ids": [rid]}


def test_a_nucleus_needs_raw_log_probs_and_those_need_temperature_1(folder: Path) -> None:
    def raw(fake: SpeaksVLLM) -> None:
        fake.model["logprobs_mode"] = "raw_logprobs"

    with speaking() as fake, running(folder, fake) as run:
        with pytest.raises(EngineError, match=r"of the nucleus: top_p 0\.9"):
            run.engine.submit(ask(top_p=0.9))
        with pytest.raises(EngineError, match=r"temperatures are 0, or 0\.01 and more"):
            run.engine.submit(ask(temperature=0.001))
    with speaking(raw) as fake, running(folder, fake) as run:
        run.engine.submit(ask(top_p=0.9))
        with pytest.raises(EngineError, match=r"those at temperature 1, and 0\.7"):
            run.engine.submit(ask(1, temperature=0.7))
    with speaking(raw) as fake, pytest.raises(ConfigError, match=r"those at temperature 1, and 0\.5"):
        attach(folder, fake, gconfig={"temperature": 0.5})
    with speaking() as fake, pytest.raises(ConfigError, match=r"of the nucleus: top_p 0\.8"):
        attach(folder, fake, gconfig={"top_p": 0.8})


# servers that cannot serve a run


def too_old(fake: SpeaksVLLM) -> None:
    fake.version = "0.31.2"


def without_dev_mode(fake: SpeaksVLLM) -> None:
    fake.routes.remove("/collective_rpc")


def without_tokens(fake: SpeaksVLLM) -> None:
    fake.scale_out = False


def with_replicas(fake: SpeaksVLLM) -> None:
    fake.parallel["data_parallel_size"] = 2


def with_logits(fake: SpeaksVLLM) -> None:
    fake.model["logprobs_mode"] = "raw_logits"


def that_ties_on_cpu(fake: SpeaksVLLM) -> None:
    fake.model["hf_overrides"] = {}


def of_more_layers(fake: SpeaksVLLM) -> None:
    fake.names.append("model.layers.2.mlp.down_proj.weight")


def with_biases(fake: SpeaksVLLM) -> None:
    fake.names.append("model.layers.1.self_attn.qkv_proj.bias")


def of_a_short_context(fake: SpeaksVLLM) -> None:
    fake.model["max_model_len"] = 255


def of_another_kind(fake: SpeaksVLLM) -> None:
    fake.answers["/version"] = [(200, "<html>a printer</html>")]


UNFIT = [
    (too_old, r"0\.32 or newer is needed: .* is 0\.31\.2; upgrade"),
    (without_dev_mode, "has not: /collective_rpc; start it with VLLM_SERVER_DEV_MODE=1"),
    (without_tokens, "has not: start it with --enable-scale-out"),
    (with_replicas, "without replicas or stages: .* has 2; start it with --tensor-parallel-size alone"),
    (with_logits, "gives raw_logits; start it with --logprobs-mode processed_logprobs"),
    (that_ties_on_cpu, "never reloads a tied output layer: start .* with --hf-overrides"),
    (of_more_layers, r"differ in 'layers\.2'; start it with the folder of model\.path"),
    (with_biases, r"differ in 'bias'; start it with the folder of model\.path"),
    (of_a_short_context, "up to 256 tokens, and .* holds 255: start it with --max-model-len 256"),
    (of_another_kind, "engine.urls must name vLLM servers"),
]


@pytest.mark.parametrize(("kind", "why"), UNFIT)
def test_a_server_that_cannot_serve_the_run_is_refused_with_the_remedy(folder: Path, kind: Any, why: str) -> None:
    with speaking(kind) as fake, pytest.raises(ConfigError, match=why):
        attach(folder, fake)


def test_in_a_running_job_such_a_server_is_a_dead_engine(folder: Path) -> None:
    with speaking(too_old) as fake, pytest.raises(EngineLost, match="upgrade"):
        attach(folder, fake, incarnation=1)
    with speaking() as fake, running(folder, fake, incarnation=1) as run:
        fake.answers["/collective_rpc"] = [(400, "no memory")] * 9
        with pytest.raises(EngineLost, match=r"must take weights .*: it answers 400: no memory"):
            update(run.engine, 0)


def of_bfloat16(fake: SpeaksVLLM) -> None:
    fake.model["dtype"] = "torch.bfloat16"


def quantized(fake: SpeaksVLLM) -> None:
    fake.model |= {"dtype": "torch.float32", "quantization": "fp8"}


def of_a_short_cache(fake: SpeaksVLLM) -> None:
    fake.model["dtype"] = "torch.float32"
    fake.cache["cache_dtype"] = "fp8_e5m2"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            of_bfloat16,
            "dtype mismatch: .* computes in bfloat16, and model.dtype is float32: start it with --dtype float32",
        ),
        (quantized, "quantization mismatch: the weights of .* are in fp8, .* start it without --quantization"),
        (of_a_short_cache, "KV-cache dtype mismatch: .* are in fp8_e5m2, .* without --kv-cache-dtype"),
    ],
)
def test_an_attached_server_that_computes_in_other_formats_is_refused_with_the_flag(
    folder: Path, kind: Any, why: str
) -> None:
    with speaking(kind) as fake, pytest.raises(ConfigError, match=why):
        attach(folder, fake)


def test_an_attached_server_of_the_runs_formats_is_taken(folder: Path) -> None:
    def same(fake: SpeaksVLLM) -> None:
        fake.model |= {"dtype": "torch.float32", "quantization": None}
        fake.cache["cache_dtype"] = "auto"

    with speaking(same) as fake, running(folder, fake) as run:
        update(run.engine, 0)


def test_keep_is_refused_where_old_prefixes_are(folder: Path) -> None:
    with speaking() as fake, pytest.raises(ConfigError, match=r"start .* with --no-enable-prefix-caching"):
        attach(folder, fake, on_update="keep")


def test_a_server_that_is_not_there_or_elsewhere_ends_a_job_at_its_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"must answer /health: .*; start it, or correct engine\.urls"):
        attach(folder, "http://127.0.0.1:9", start_timeout_s=0.1)
    link = HttpClient("http://127.0.0.2:9")
    with pytest.raises(ConfigError, match=r"its server is on this machine, not 127\.0\.0\.2"):
        probe(link, names=None, dtype="float32", is_tied=False, keep=False, longest=9, timeout_s=5.0)
    link.close()


def test_a_vocabulary_mismatch_of_the_server_is_refused_at_the_first_weights(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        fake.answers["/collective_rpc"] = [(500, "size mismatch")]
        with pytest.raises(ConfigError, match=r"size mismatch.*start it with the folder of model\.path"):
            update(run.engine, 0)


# servers that are lost


def test_weights_that_are_refused_later_lose_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.answers["/collective_rpc"] = [(500, "no memory")]
        with pytest.raises(EngineLost, match=r"must take weights .*\.0\.1: it answers 500: no memory"):
            update(run.engine, 1)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"])
def test_a_call_whose_answer_is_no_yes_loses_the_server(folder: Path, path: str) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.answers[path] = [(200, "<html>a printer</html>")]
        with pytest.raises(EngineLost, match=r"it answers 200: .*printer"):
            update(run.engine, 1)


def test_a_server_that_keeps_its_prefixes_is_lost(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        fake.forgets = False
        with pytest.raises(EngineLost, match="must do /reset_prefix_cache: it answers 200"):
            update(run.engine, 0)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_a_call_without_an_answer_ends_by_its_deadline(folder: Path, path: str) -> None:
    with speaking() as fake, running(folder, fake) as run:
        server: Any = run.engine._server  # type: ignore[attr-defined]
        server._call_timeout_s = server._load_timeout_s = 0.3
        fake.hangs.add(path)
        with pytest.raises(EngineLost, match=f"must answer {path}.* within 0.3 s|must answer {path}.* within 0.2"):
            update(run.engine, 0)


def test_a_restarted_server_is_detected_by_its_stamps(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.label = "default"
        run.engine.submit(ask())
        fake.allow(8)
        with pytest.raises(EngineLost, match="tokens are of 'default', which this generator never sent"):
            run.all()


def test_a_log_prob_that_is_not_a_number_loses_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.weight = 9999
        run.engine.submit(ask())
        fake.allow(8)
        with pytest.raises(EngineLost, match="a log-prob is not a number"):
            run.all()


# how it is started


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
    on_gpu, kept, on_cpu = (
        words(tmp_path, device="cuda", gconfig={"top_p": 0.9}),
        words(tmp_path, device="cuda", on_update="keep"),
        words(tmp_path),
    )
    for line in (on_gpu, kept, on_cpu):
        given = dict(pairwise(line))
        assert (given["--model"], given["--port"], given["--dtype"]) == (str(tmp_path), "30007", "bfloat16")
        assert (given["--tensor-parallel-size"], given["--host"], given["--load-format"]) == ("2", "127.0.0.1", "dummy")
        assert line[-2:] == ["--gpu-memory-utilization", "0.7"]
    modes = [dict(pairwise(line))["--logprobs-mode"] for line in (on_gpu, kept)]
    assert modes == ["raw_logprobs", "processed_logprobs"]
    assert ["--no-enable-prefix-caching" in line for line in (on_gpu, kept)] == [False, True]
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


def shared_memory(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    monkeypatch.setattr(handover.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=total))


def test_shared_memory_that_cannot_hold_the_weights_is_refused_with_the_flag_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_memory(monkeypatch, 64 << 20)
    with pytest.raises(ConfigError, match=r"has 64 MiB, .* needs 14664 MiB there \(14536 MiB .* --shm-size=15g"):
        handover.check_shared_memory(14536 << 20, 128 << 20)
    handover.check_shared_memory(1 << 40, 1, Path("/no/such/folder"))
    shared_memory(monkeypatch, 100)
    with speaking() as fake, pytest.raises(ConfigError, match="shared memory too small: /dev/shm has 0 MiB"):
        attach(folder, fake)


def test_a_server_is_not_started_in_the_shared_memory_of_a_container_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB at docker: too little also without weights."""
    shared_memory(monkeypatch, 64 << 20)
    settled = config(folder, python=sys.executable)
    with pytest.raises(ConfigError, match=r"/dev/shm has 64 MiB, .*: start the container with --shm-size=1g"):
        open_engine(context_of(folder), settled, load_tokenizer(str(folder)))


def test_a_package_is_found_under_any_of_its_names() -> None:
    assert installed(sys.executable, "no-such-package", "pytest") == pytest.__version__
    with pytest.raises(ConfigError, match="needs no-such-package"):
        installed(sys.executable, "no-such-package", "nor-this")


# generation settings


CONTROLS = SamplingControls(
    top_k=5,
    min_p=0.1,
    min_new_tokens=3,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias=((7, -1.5),),
    stop_token_ids=(9,),
    ignore_eos=True,
)


def raw(fake: SpeaksVLLM) -> None:
    fake.model["logprobs_mode"] = "raw_logprobs"


def test_controls_go_to_the_server_under_its_names_and_need_raw_log_probs(folder: Path) -> None:
    request = replace(ask(), controls=CONTROLS)
    with speaking(raw) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(8)
        run.engine.submit(request)
        run.all()
        (body,) = fake.called("/generate")
        said = body["sampling_params"]
        assert (said["top_k"], said["min_p"], said["min_tokens"], said["logit_bias"]) == (5, 0.1, 3, {"7": -1.5})
        assert (said["repetition_penalty"], said["presence_penalty"], said["frequency_penalty"]) == (1.2, 0.5, 0.25)
        assert (said["stop_token_ids"], said["ignore_eos"]) == ([9], True)
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
    with speaking(raw) as fake, running(folder, fake) as run:
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
