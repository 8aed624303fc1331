"""The supervised warm-up teaches a task's own demonstrations."""

from pathlib import Path

import pytest

from actors.data.tasks import make_word
from actors.learner.model.startup import Demonstration, demonstrate, warm_up
from areal_bus.config.data import DataConfig
from areal_bus.config.learner import WarmupConfig
from areal_bus.errors import ConfigError, NonFinite
from tests.support.learner_setup import scratch_tokenizer, tiny_actor


def run(folder: Path, demonstrations: list[Demonstration], *, steps: int = 30, lr: float = 1e-2) -> list[float]:
    actor = tiny_actor(folder)
    return warm_up(
        actor.policy,
        demonstrations,
        WarmupConfig(steps=steps, lr=lr),
        seed=1,
        capacity=20,
        journal=actor._journal,
        heartbeat=actor._context.heartbeat,
    )


@pytest.mark.slow
def test_the_loss_of_demonstrations_falls(tmp_path: Path) -> None:
    losses = run(tmp_path, [Demonstration(prompt=[5, 6 + i], completion=[9 + i, 3, 1]) for i in range(6)])
    assert losses[-1] < 0.3 * losses[0]
    assert (tmp_path / "journal" / "learner-0.0.jsonl").read_text().count('"event":"warmup"') == 30


def test_a_demonstration_is_the_prompt_the_answer_and_the_end(tmp_path: Path) -> None:
    tokenizer = scratch_tokenizer(tmp_path)
    data = DataConfig(task="reverse", prompt="{question}>", chat_template=False)
    made, none = demonstrate([make_word("abc")], tokenizer, data), demonstrate([{"question": "a"}], tokenizer, data)
    assert [tokenizer.decode(made[0].prompt), tokenizer.decode(made[0].completion)] == ["abc>", "cba<eos>"]
    piece = made[0].piece()
    assert tokenizer.decode(piece.ids_T[piece.places_K]) == "cba<eos>"
    assert none == []
    (ended,) = demonstrate([{"question": "abc", "demonstration": "cba<eos>"}], tokenizer, data)
    assert tokenizer.decode(ended.completion) == "cba<eos>"  # it gets no second end
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = "{% for m in messages %}{{m['content']}}<end>{% endfor %}"
    (made,) = demonstrate([make_word("abc")], tokenizer, data.model_copy(update={"chat_template": True}))
    assert tokenizer.decode(made.completion) == "cba<end>"


def test_a_warm_up_without_demonstrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing demonstrations"):
        run(tmp_path, [])


def test_a_warm_up_that_explodes_stops(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match=r"lower learner\.warmup\.lr"):
        run(tmp_path, [Demonstration(prompt=[5], completion=[3, 1])], lr=1e30)
