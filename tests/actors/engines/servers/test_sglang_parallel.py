"""A real SGLang server of two tensor-parallel ranks on CPU: both get every weight, and the samples are those of one."""

from pathlib import Path

import pytest

from actors.engines.protocol import Request
from actors.engines.servers.connect import open_engine
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from tests.servers.engines import Running, context_of, model, model_folder, sglang_python, weights, worst

pytestmark = pytest.mark.sglang


def test_two_ranks_sample_as_one_over_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
