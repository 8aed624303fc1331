"""Tests on the first batch whether an inference server computes the log-probs that the learner computes."""

from actors.learner.update.metrics import StepMetrics
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

SERVERS = ("sglang", "vllm")  # the builtin engine tests itself with its first weights; the simulated one makes them up
MOST_KL = {"float32": 1e-3}  # mean over the trained tokens
ROUGH = 0.1  # for bfloat16 and float16, in which server and learner round differently


class ServerCheck:
    """One comparison, of the first update whose tokens were all sampled by the version that the learner holds."""

    def __init__(self, config: Config) -> None:
        lora = config.actor.lora
        self._is_due = config.rollout.engine in SERVERS and (lora is None or not lora.dropout)
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
                f"model family refused: log-probs of the server ({self._engine}) differ from the learner's at the same "
                f"weights, {self._family}: a KL of {kl:.2g} over {measured:g} tokens (at most {self._most:g}), largest "
                f"difference {metrics.mismatch_max:.2g}; nothing was published; choose another model or engine, "
                "or upgrade the server"
            )
