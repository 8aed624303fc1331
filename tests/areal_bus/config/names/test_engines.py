from typing import Any

import pytest

from actors.generator.actor import make_engine
from actors.runtime.context import Context
from actors.runtime.user_code import load_function
from areal_bus.config.algorithms import LOSSES
from areal_bus.config.names.engines import ENGINES, EngineKind, NumberFormats, kind_of
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError

OWN = "tests.support.own_engine"
RUN = {"model": {"path": "m"}, "data": {"task": "sums"}}


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(Config.model_validate(RUN | sections))
    return str(caught.value)


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_has_an_opener(name: str) -> None:
    assert callable(load_function("rollout.engine", ENGINES[name].opener))


def test_an_engine_of_the_users_gets_weights_in_host_memory_and_no_adapters() -> None:
    assert kind_of(f"{OWN}:open_it") == EngineKind(f"{OWN}:open_it", takes_adapters=False)
    check(Config.model_validate(RUN | {"rollout": {"engine": f"{OWN}:open_it"}}))
    assert "takes no adapters" in refusal(rollout={"engine": f"{OWN}:open_it"}, actor={"lora": {}})


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    assert refusal(rollout={"engine": "vlm"}).startswith("unknown rollout.engine 'vlm': it is \"builtin\", ")
    assert "; the nearest is vllm" in refusal(rollout={"engine": "vlm"})
    assert "unknown rollout.engine 'mine:'" in refusal(rollout={"engine": "mine:"})


def test_several_gpus_are_refused_for_an_engine_that_computes_on_one() -> None:
    for name in [f"{OWN}:open_it", *(name for name, kind in ENGINES.items() if not kind.tensor_parallel)]:
        said = refusal(rollout={"engine": name}, topology={"tensor_parallel": 2})
        assert said.startswith(
            f'rollout.engine = "{name}" computes on one GPU: topology.tensor_parallel is 2; set it to'
        )


def test_engines_of_one_version_refuse_to_finish_samples_at_older_ones() -> None:
    for name in [f"{OWN}:open_it", *(name for name, kind in ENGINES.items() if not kind.holds_versions)]:
        said = refusal(rollout={"engine": name, "on_update": "finish_old"})
        assert f'rollout.engine = "{name}" holds one; set rollout.engine = "builtin", or rollout.on_update' in said


def test_an_object_that_is_not_an_engine_is_refused_with_its_missing_methods() -> None:
    context = Context("generator", 0, 0, 0, "job", "", "", "", "cpu", 1, 1, 1, "", "", "")
    config = Config.model_validate({"rollout": {"engine": f"{OWN}:open_nothing"}})
    with pytest.raises(
        ConfigError,
        match=r"^methods missing in the engine of .*: abort, check, close, .*, version; see actors/engines/protocol.py",
    ):
        make_engine(context, config, None)
    missing = Config.model_validate({"rollout": {"engine": f"{OWN}:open_none"}})
    with pytest.raises(ConfigError, match=r"missing function 'open_none' in module .* \(rollout.engine\)"):
        make_engine(context, missing, None)


@pytest.mark.parametrize(
    ("arguments", "rounded"),
    [
        ("--quantization fp8", "weights in fp8"),
        ("--quantization=int8_per_channel --kv-cache-dtype fp8", "weights in int8_per_channel"),
        ("-q fp8 --quantization none --kv_cache_dtype=fp8_e5m2", "keys and values in fp8_e5m2"),
        ("--dtype bfloat16", "weights in bfloat16"),
        ("--dtype float", ""),
        ("--dtype float32 --kv-cache-dtype auto --gpu-memory-utilization 0.8 --quantization", ""),
    ],
)
def test_a_servers_arguments_say_what_it_rounds_and_the_last_one_counts(arguments: str, rounded: str) -> None:
    assert NumberFormats.of_arguments(arguments.split()).rounded("float32") == rounded


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("source", ["nf4", "fp8"])
def test_numbers_of_fewer_bits_need_the_ratio_to_the_sampler_and_the_remedy_is_accepted(
    source: str, loss: str, recompute: bool
) -> None:
    more: dict[str, Any] = {"actor": {"lora": {"variant": ["nf4"]}}}
    if source == "fp8":
        more = {"rollout": {"engine": "vllm"}, "engine": {"arguments": ["--quantization", "fp8"]}}
    actor = more.get("actor", {}) | {"loss": loss, "correction": "none", "recompute_logprobs": recompute}
    if loss == "oapl" or (loss != "reinforce" and not recompute):
        check(Config.model_validate(RUN | more | {"actor": actor}))
        return
    said = refusal(**(more | {"actor": actor}))
    assert said.startswith("missing correction with ")
    remedies = {
        'set actor.correction = "decoupled" or "tis"': {"correction": "tis"},
        'set actor.correction = "decoupled" or "tis", and actor.recompute_logprobs = true': {
            "correction": "tis",
            "recompute_logprobs": True,
        },
        "set actor.recompute_logprobs = false": {"recompute_logprobs": False},
    }
    check(Config.model_validate(RUN | more | {"actor": actor | remedies[said.partition("; ")[2]]}))


def test_the_remedy_for_fewer_bits_names_no_correction_that_other_settings_contradict() -> None:
    actor: dict[str, Any] = {"use_decoupled_loss": False}
    more = {"rollout": {"engine": "vllm"}, "engine": {"arguments": ["-q", "fp8"]}}
    assert refusal(**(more | {"actor": actor})).endswith('set actor.correction = "tis"')
    check(Config.model_validate(RUN | more | {"actor": actor | {"correction": "tis"}}))


def test_sglang_quantizes_pushed_weights_with_one_loader_only() -> None:
    def arguments(*words: str) -> dict[str, Any]:
        return {"rollout": {"engine": "sglang"}, "engine": {"arguments": ["--quantization", "fp8", *words]}}

    assert "use --quantization fp8 and --load-format flash_rl, or none" in refusal(**arguments())
    check(Config.model_validate(RUN | arguments("--load-format", "flash_rl")))
