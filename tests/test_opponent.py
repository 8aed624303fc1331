"""The frozen opponent of examples/self_play: which weights it has, and that its tokens are given text."""

import sys
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import Completion
from actors.models.loading import load_base, load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.runtime import context
from actors.runtime.context import Context
from actors.workflows.episode_runner import Asked, Awaited, EpisodeRun
from actors.workflows.protocol import Ask, Episode
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "self_play"
IDENTITY = ("role", "index", "incarnation", "rank", "job", "head", "address", "interface", "device")
COUNTS = ("n_generators", "n_rewards", "n_learners")


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Any, Any]:
    """The example's config, its tokenizer and module, in the process of a generator whose run is in `tmp_path`."""
    config = Config.model_validate(tomllib.loads((FOLDER / "nim.toml").read_text(encoding="utf-8")))
    assert config.model.scratch is not None
    write_scratch_folder(tmp_path / "scratch-model", config.model.scratch)
    model = str(tmp_path / "scratch-model")
    unknown: dict[str, Any] = dict.fromkeys((*IDENTITY, *COUNTS), "")
    here = Context(**unknown, run_folder=str(tmp_path), config_folder=str(tmp_path), model_folder=model)
    monkeypatch.setattr(context, "current", here)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    opponents = import_module("opponent")
    monkeypatch.setattr(opponents, "LOOK_S", 0.0)
    return config, load_tokenizer(model), opponents


class Duel:
    """The opponent answers first; `seen` has its version and tokens of each episode."""

    def __init__(self, opponent: Any) -> None:
        self.opponent, self.seen = opponent, list[tuple[int, list[int]]]()

    async def episode(self, row: Mapping[str, Any], ask: Ask) -> Episode:
        shown = ask.tokenizer.encode("5>")
        answer = await self.opponent.ask(ask)(shown)
        self.seen.append((self.opponent.version, answer.ids))
        await ask([*shown, *answer.ids, *ask.tokenizer.encode("3>")])
        return Episode(text="", roles=["first"])


def play(duel: Duel, tokenizer: Any, name: str) -> None:
    run = EpisodeRun(duel, {}, tokenizer, name=name, gconfig=GenerationConfig(max_new_tokens=1))  # type: ignore[arg-type]
    waits = run.start()
    assert isinstance(waits, Awaited)
    assert not waits.ready(), "other episodes may join"
    assert waits.ready()
    asked = run.go_on()
    assert isinstance(asked, Asked)
    assert run.answer(Completion(("", 0, 0, 0, 0), [4], [-0.5], [[0, 1]], "length")) is None
    assert run.segments == [[len(asked.ids), 1]], "the opponent's token is given"


def test_an_older_version_is_version_0_until_a_checkpoint_is_old_enough(
    game: tuple[Config, Any, Any], tmp_path: Path
) -> None:
    config, tokenizer, opponents = game
    duel = Duel(opponents.Opponent(config, "version - 10"))
    play(duel, tokenizer, "uid 3 sample 1 attempt 0")
    play(duel, tokenizer, "uid 3 sample 1 attempt 1")
    assert duel.seen[0] == duel.seen[1], "another attempt draws the same tokens"
    model = load_base(config, str(tmp_path / "scratch-model"), "cpu")
    for version in (5, 12, 15):
        model.save_pretrained(versioned_dirs.place(tmp_path / "checkpoints", version) / "model")
        play(duel, tokenizer, f"uid {version} sample 0 attempt 0")
    assert [version for version, _ in duel.seen] == [0, 0, 0, 0, 5]


def test_a_model_folder_that_is_missing_is_named(game: tuple[Config, Any, Any]) -> None:
    config, tokenizer, opponents = game
    with pytest.raises(ConfigError, match="the opponent must be a model folder"):
        EpisodeRun(Duel(opponents.Opponent(config, "models/none")), {}, tokenizer).start()  # type: ignore[arg-type]


def test_an_older_version_is_refused_outside_a_run(
    game: tuple[Config, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tokenizer, opponents = game
    monkeypatch.setattr(context, "current", None)
    with pytest.raises(ConfigError, match="missing run: the opponent 'version - 10'"):
        EpisodeRun(Duel(opponents.Opponent(config, "version - 10")), {}, tokenizer).start()  # type: ignore[arg-type]


def test_a_cancelled_turn_leaves_nothing_behind(game: tuple[Config, Any, Any]) -> None:
    config, tokenizer, opponents = game
    duel = Duel(opponents.Opponent(config, "version - 10"))
    run = EpisodeRun(duel, {}, tokenizer, gconfig=GenerationConfig(max_new_tokens=1))  # type: ignore[arg-type]
    run.start()
    run.close()
    engine = duel.opponent._engine
    assert engine is not None
    assert (engine.n_live, duel.opponent._new, duel.opponent._done) == (0, set(), {})
