"""A frozen opponent for self-play: an older version of the run, or a model folder. Its tokens are never trained.

It samples in the generator's process with an engine of its own. To the policy its answers are given text.
"""

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from actors.engines.protocol import Completion, Request, SamplingControls
from actors.models.loading import check_model_path, load_base, load_model, stop_ids
from actors.runtime import context
from actors.workflows.episode_runner import Awaited
from actors.workflows.protocol import Ask, Turn
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs

if TYPE_CHECKING:  # a reward in the same module needs neither
    from actors.engines.builtin.engine import BuiltinEngine

OLDER = re.compile(r"version - (\d+)")
LOOK_S = 5.0  # interval between two looks for a newer checkpoint
Key = tuple[str, int, int, int, int]


class Opponent:
    """One for all episodes of a workflow. Its first turn loads the model, and raises ConfigError if that fails."""

    def __init__(self, config: Config, which: str, *, device: str = "cpu") -> None:
        """`which`: a model folder, or "version - K": the newest checkpoint of the run that is at least K versions older
        than its last one; before there is one, version 0.
        """
        self._config, self._which, self._device = config, which, device
        self._lag = int(found[1]) if (found := OLDER.fullmatch(which)) else None
        self._engine: BuiltinEngine | None = None
        self._looked = -LOOK_S
        self._n_turns = 0
        self._new: set[Key] = set()  # submitted in this turn of the loop
        self._done: dict[Key, Completion] = {}

    @property
    def version(self) -> int:
        """The version of the run whose weights it has; 0 for a model folder."""
        return (self._engine and self._engine.version) or 0

    def ask(self, ask: Ask) -> "OpponentAsk":
        """An `Ask` for the opponent's turns in the episode of `ask`, also for a `Chat`."""
        return OpponentAsk(self, ask)

    async def turn(
        self, ask: Ask, ids: Sequence[int], seed: tuple[int, ...], most: int | None, controls: SamplingControls | None
    ) -> Turn:
        """One completion. Raises EngineError when it does not fit the model."""
        engine = self._engine = self._engine or self._load(ask.tokenizer)
        self._update(engine)
        own, self._n_turns = ask.gconfig, self._n_turns + 1
        key = ("opponent", self._n_turns, 0, 0, 0)
        controls = controls or SamplingControls(**own.controls())
        most = most or own.max_new_tokens
        engine.submit(Request(key, list(ids), seed, most, ask.temperature, own.top_p, None, controls))
        self._new.add(key)
        try:
            await Awaited(partial(self._is_done, engine, key))
            done = self._done[key]
        finally:
            engine.abort(key)
            self._new.discard(key)
            self._done.pop(key, None)
        text = ask.tokenizer.decode(done.ids, skip_special_tokens=True)
        return Turn(done.ids, text, done.finish, done.logps, done.spans)

    def _is_done(self, engine: "BuiltinEngine", key: Key) -> bool:
        """False at once, so that other episodes submit theirs; then all that wait are sampled together."""
        if key in self._new:
            self._new.remove(key)
            return False
        while key not in self._done:
            self._done |= {completion.key: completion for completion in engine.step()}
        return True

    def _load(self, tokenizer: Any) -> "BuiltinEngine":
        from actors.engines.builtin.engine import BuiltinEngine, EngineOptions

        here, dtype = context.current, self._config.model.dtype
        if self._lag is None:
            folder = check_model_path(self._which, Path(here.config_folder) if here else Path.cwd(), key="the opponent")
            model = load_model(folder, dtype, self._device)
        elif here is None:
            raise ConfigError(f"missing run: the opponent {self._which!r} is a checkpoint of one; name a model folder")
        else:
            model = load_base(self._config, here.model_folder, self._device)
        options = EngineOptions(n_slots=self._config.rollout.max_concurrent_rollouts)
        return BuiltinEngine(model, options, stop_ids=stop_ids(model, tokenizer), tokenizer=tokenizer, version=0)

    def _update(self, engine: "BuiltinEngine") -> None:
        """Take the weights of a newer checkpoint that is old enough."""
        if self._lag is None or context.current is None or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        known = versioned_dirs.versions(context.current.folder / "checkpoints")
        version = next((version for version in known if version <= max(known) - self._lag), 0)
        if version > self.version:
            try:
                model = load_model(str(known[version] / "model"), self._config.model.dtype, self._device)
            except ConfigError:
                if known[version].exists():
                    raise
                return  # deleted meanwhile
            engine.update(version, dict(model.named_parameters()))


class OpponentAsk:
    """The `Ask` of an opponent in one episode."""

    def __init__(self, opponent: Opponent, ask: Ask) -> None:
        self.tokenizer, self.name = ask.tokenizer, ask.name
        self.gconfig, self.temperature = ask.gconfig, ask.temperature
        self._opponent, self._n_turns = opponent, 0
        self._sample = crc32(re.sub(r" attempt \d+", "", ask.name).encode())  # each attempt draws the same

    async def __call__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        anew: bool = False,
        trajectory: int | None = None,
        controls: SamplingControls | None = None,
    ) -> Turn:
        """A completion of `ids`, which need not begin with earlier ones."""
        self._n_turns += 1
        return await self._opponent.turn(self, ids, (self._sample, self._n_turns), max_new_tokens, controls)
