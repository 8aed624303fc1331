"""A learner in this process, from version 0 or a checkpoint: policy, frozen models, critic, optimizer."""

from pathlib import Path

import torch
from torch import Tensor

from actors.data.loading import load_rows
from actors.learner.checkpoint import checkpoint as checkpoints
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.frozen_model import load_frozen_models
from actors.learner.model.policy import Policy, model_settings
from actors.learner.model.startup import demonstrate, load_critic, load_policy, warm_up
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import check_model_path, load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.runtime.context import HeartbeatState
from actors.runtime.stages import stages_of
from actors.runtime.user_code import add_user_folder
from areal_bus.config.sections import Config
from areal_bus.core.parts.stages import stage_at
from areal_bus.errors import ConfigError
from areal_bus.storage.journal import Journal
from areal_bus.weights.snapshot import digest_of


class OfflineLearner:
    """On the first GPU with topology.gpus_per_host, else on the CPU."""

    def __init__(
        self, config: Config, config_folder: Path, folder: Path, *, journal_role: str, checkpoint: str = ""
    ) -> None:
        """`folder`: of its output. `checkpoint`: a folder of RUN/checkpoints. Raises ConfigError, CheckpointError."""
        self._device = find_device(config)
        add_user_folder(config_folder)
        self.config, self._config_folder = config, config_folder
        self.journal = Journal(folder / "journal", role=journal_role, index=0, incarnation=0)
        self._model_folder = find_model(config, config_folder, folder)
        self._tokenizer = load_tokenizer(self._model_folder)
        self._stages = stages_of(config)
        self._settings = model_settings(config, LearnerRanks(), self._device)
        self._policy = self._make_policy(checkpoint)
        self._actor = PPOActor(
            self._policy,
            config,
            UpdateContext(self.journal, HeartbeatState(), folder),
            frozen=load_frozen_models(
                config, self._policy, model=self._model_folder, config_folder=config_folder, checkpoint=checkpoint
            ),
            critic=load_critic(config, self._model_folder, self._settings, config_folder=config_folder),
        )
        if checkpoint:
            self._restore(Path(checkpoint))

    @property
    def version(self) -> int:
        """Number of finished updates."""
        return self._actor.version

    @property
    def digest(self) -> str:
        """Digest of the current weights in the engines' dtype."""
        return digest_of(self._weights())

    def _restore(self, checkpoint: Path) -> None:
        state = checkpoints.read(checkpoint)
        checkpoints.restore(state, policy=self._policy, optimizer=self._actor.optimizer)
        if self._actor.critic is not None:
            checkpoints.restore_critic(checkpoint, self._actor.critic)
        self._actor.version = state.version

    def _make_policy(self, checkpoint: str) -> Policy:
        """The policy of the checkpoint; without one of version 0, after the configured warm-up."""
        policy = load_policy(self.config, self._model_folder, self._settings, checkpoint=checkpoint)
        if self.config.learner.warmup.steps and not checkpoint:
            self._warm_up(policy)
        return policy

    def _warm_up(self, policy: Policy) -> None:
        config = self.config
        demonstrations = demonstrate(load_rows(config, self._config_folder), self._tokenizer, config.data)
        warm_up(
            policy,
            demonstrations,
            config.learner.warmup,
            seed=config.run.seed,
            capacity=stage_at(self._stages, 0).max_tokens_per_mb,
            journal=self.journal,
            heartbeat=HeartbeatState(),
            tick=lambda: None,
        )

    def _weights(self) -> dict[str, Tensor]:
        to = self._policy.push_dtype
        return {
            name: weight.detach().to(to if weight.is_floating_point() else weight.dtype, copy=True)
            for name, weight in self._policy.pushed().items()
        }


def find_device(config: Config) -> str:
    """Raises ConfigError for a config with GPUs where torch finds none."""
    if not config.topology.gpus_per_host:
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"topology.gpus_per_host = {config.topology.gpus_per_host} needs a GPU, and torch ({torch.__version__}) "
            "finds none: run on a machine that has one, or compute on the CPU (--set topology.gpus_per_host=0)"
        )
    return "cuda"


def find_model(config: Config, config_folder: Path, folder: Path) -> str:
    """The model's folder or id. For a model from scratch, writes its description into `folder`."""
    if config.model.scratch is None:
        return check_model_path(config.model.path, config_folder)
    write_scratch_folder(folder / "scratch-model", config.model.scratch)
    return str(folder / "scratch-model")
