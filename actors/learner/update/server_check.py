"""Tests on the first batch whether a server, or a user's engine, computes the log-probs that the learner computes."""

from actors.learner.update.metrics import StepMetrics
from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

MOST_KL = {"float32": 1e-3}  # mean over the trained tokens
ROUGH = 0.1  # for bfloat16 and float16, in which server and learner round differently


class ServerCheck:
    """One comparison, of the first update whose tokens were all sampled by the version that the learner holds."""

    def __init__(self, config: Config) -> None:
        lora, kind = config.actor.lora, kind_of(config.rollout.engine)
        is_checked = not kind.is_probed and not kind.makes_up_tokens
        self._is_due = is_checked and (lora is None or not lora.dropout)
        self._engine, self._family = config.rollout.engine, config.model.path
        self._most = MOST_KL.get(config.model.dtype, ROUGH)

    def look(self, metrics: StepMetrics) -> None:
        """`metrics` of an update, over all ranks. Raises ConfigError."""
        measured = metrics.sums.measured
        if not self._is_due or not measured or metrics.lag_max:
            return
        self._is_due = False
        kl = metrics.sums.kl / measured
        if not kl <= self._most:  # NaN differs, too
            raise ConfigError(
                f"model family refused: log-probs of the engine {self._engine} differ from the learner's at the same "
                f"weights, {self._family}: a KL of {kl:.2g} over {measured:g} tokens (at most {self._most:g}), largest "
                f"difference {metrics.mismatch_max:.2g}; nothing was published; choose another model or engine, "
                "or upgrade the server"
            )
