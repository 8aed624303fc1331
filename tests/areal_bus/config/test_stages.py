"""How prompts and evaluations are sampled, for every key of [gconfig], also those that are added later."""

from typing import Any

import pytest
from pydantic.fields import FieldInfo

from areal_bus.config.data import OwnGeneration
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config
from areal_bus.config.stages import sampling_of

FIELDS = GenerationConfig.model_fields
OF_EVALUATE = ("n_samples", "temperature")  # keys of [evaluate]
OF_THE_TASK = ("max_new_tokens", "stop", "stop_token_ids")


def another(field: FieldInfo, n: int) -> Any:
    """A value other than the default, another one for each n from 1 to 4."""
    default: Any = field.get_default()
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + n
    if isinstance(default, float):
        return n / 8 if default == 0 else default - n / 8
    if isinstance(default, dict):
        return {n: 1.0}
    return ("x" * n,) if "str" in str(field.annotation) else (n,)


@pytest.mark.parametrize("key", FIELDS)
def test_an_evaluation_has_no_setting_of_training_but_what_ends_an_answer(key: str) -> None:
    of_run, of_source, of_set, of_evaluate = (another(FIELDS[key], n) for n in (1, 2, 3, 4))
    config = Config.model_validate({
        "gconfig": {key: of_run},
        "data": {"source": [
            {"name": "a", "task": "sums", "gconfig": {key: of_source}},
            {"name": "b", "task": "sums", "gconfig": {key: of_source}, "evaluate": {key: of_set}},
            {"name": "c", "task": "sums"},
        ]},
        "evaluate": {
            "sets": [{"name": "plain", "path": "p"}, {"name": "own", "path": "p", key: of_set}],
            **({key: of_evaluate} if key in OF_EVALUATE else {}),
        },
    })  # fmt: skip
    assert [getattr(sampling_of(config, one), key) for one in "abc"] == [of_source, of_source, of_run]
    default = of_evaluate if key in OF_EVALUATE else FIELDS[key].get_default()
    trained, trained_a = (of_run, of_source) if key in OF_THE_TASK else (default, default)
    expected = {"": trained, ":plain": trained, ":own": of_set, ":a": trained_a, ":b": of_set, ":c": trained}
    found = {name: getattr(sampling_of(config, "a", f"step-8{name}"), key) for name in expected}
    assert found == expected


def test_sources_and_sets_may_set_every_key_in_its_bounds() -> None:
    own = OwnGeneration.model_fields
    assert {name: field.metadata for name, field in own.items()} == {
        name: field.metadata for name, field in FIELDS.items()
    }
    assert OwnGeneration().own == {}
