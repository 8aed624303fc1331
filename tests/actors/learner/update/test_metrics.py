"""The first batch from a server is compared with the learner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.learner.update.metrics import MetricSums, ServerCheck, StepMetrics
from areal_bus.errors import ConfigError
from tests.support.learner_setup import random_shard, settings, tiny_actor, update


def metrics(kl: float, *, lag_max: float = 0, measured: float = 100) -> StepMetrics:
    return StepMetrics(MetricSums(measured=measured, kl=kl * measured), lag_max=lag_max, mismatch_max=0.5)


def config_of(**sections: Any) -> Any:
    return settings(rollout={"engine": "vllm"}, **sections)


def test_a_server_that_computes_otherwise_is_refused() -> None:
    check = ServerCheck(config_of())
    check.look(metrics(0.5, lag_max=2))  # older samples differ by right
    check.look(metrics(0.0, measured=0))
    with pytest.raises(ConfigError, match=r"log-probs of the engine vllm differ"):
        check.look(metrics(0.02))
    with pytest.raises(ConfigError, match="model family refused"):
        ServerCheck(config_of()).look(metrics(float("nan")))


def test_a_server_is_compared_once_and_rounds_as_its_type_does() -> None:
    check = ServerCheck(config_of())
    check.look(metrics(1e-6))
    check.look(metrics(0.5))  # later versions have their own figures and alarms
    ServerCheck(config_of(model={"scratch": {}, "dtype": "bfloat16"})).look(metrics(0.02))
    ServerCheck(settings()).look(metrics(0.5))  # the builtin engine tests itself


def test_an_update_on_samples_of_another_model_is_refused(tmp_path: Path) -> None:
    shard = random_shard(3)
    wrong = [replace(item, logps=(np.frombuffer(item.logps, "<f4") - 1).astype("<f4").tobytes()) for item in shard]
    actor = tiny_actor(tmp_path, config_of())
    with pytest.raises(ConfigError, match="nothing was published"):
        update(actor, wrong)
    assert actor.version == 0
