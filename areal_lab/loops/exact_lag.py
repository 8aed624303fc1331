"""Training with a given lag: a loop in one process in which version c - k samples the batch of version c.

In a ring, lag follows from timing. Here it is a setting (`rollout.exact_lag`), so that its effect can be measured alone
and repeated bit for bit. Batches 0 to k are sampled by version 0. With several lags each prompt draws one, by its
uid and the run's seed. Problems are evaluated as [evaluate] says.

python -m areal_lab.loops.exact_lag CONFIG --out FOLDER

writes FOLDER/config.json, FOLDER/journal (the events `update` and `evaluation`) and FOLDER/summary.json.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from actors.runtime.process import leave
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import Prompt
from areal_lab.loops.evaluated_loop import EvaluatedLoop, run_command
from areal_lab.settings import LabConfig
from tools.offline.synchronous_reference import check_loop


class ExactLagLoop(EvaluatedLoop):
    """One engine for each lag; each holds the weights of version c - lag."""

    def __init__(self, config: LabConfig, config_folder: Path, folder: Path, *, warm_ups: Path | None = None) -> None:
        """As EvaluatedLoop. Raises ConfigError for a config without exact_lag."""
        self._draws = config.lags
        self._lags = sorted(set(config.lags))
        self._kept: dict[int, Mapping[str, Tensor]] = {}  # version -> weights, of the versions that are still sampled
        super().__init__(config, config_folder, folder, warm_ups=warm_ups)

    # which engine samples a prompt, and with which weights

    def _check(self, config: Config, n_generators: int) -> None:
        if not self._draws:
            raise ConfigError("the lag must be given: set rollout.exact_lag, for example --set rollout.exact_lag=4")
        check_loop(config, n_generators)

    def _n_engines(self, n_generators: int) -> int:
        return len(self._lags)

    def _engine_of(self, prompt: Prompt) -> int:
        draw = random.Random(f"{self.config.run.seed}/{prompt.uid}")
        return self._lags.index(draw.choice(self._draws))

    def _update_engines(self) -> None:
        """Give each engine the weights of version c - lag, or of version 0 before there is one."""
        clock = self._actor.version
        self._kept[clock] = self._weights()
        for lag, engine in zip(self._lags, self._engines, strict=True):
            version = max(clock - lag, 0)
            if engine.version != version:
                engine.update(version, self._kept[version])
        for version in [version for version in self._kept if version < clock - self._lags[-1]]:
            del self._kept[version]


def main() -> int:
    """The command line. Exit code."""
    return run_command(ExactLagLoop, module="areal_lab.loops.exact_lag", description=__doc__ or "")


if __name__ == "__main__":
    leave(main())
