"""The learner actor: batches in, versions out; knows no rule of the ring, only what the head tells it.

Consumes its share of each batch; waits for that share; is unblocked by the head; produces an update, and on rank 0 the
snapshot that a side thread pushes while the next update is computed.
"""

import os
import socket
import time
from pathlib import Path

from loguru import logger

from actors.context import Context, Pulse, open_bus
from actors.data.loading import load_rows
from actors.models.loading import load_model, load_tokenizer
from actors.training import checkpoint
from actors.training.actor import PPOActor
from actors.training.letterbox import Letterbox, StopRun
from actors.training.loop import find_loop
from actors.training.policy import Policy
from actors.training.pushing import Pusher
from actors.training.ranks import Ranks, lost_peer, meet, part
from actors.training.rollout import Rollout
from actors.training.warmup import demonstrate, warm_up
from areal_bus.collective import brief
from areal_bus.config import Config
from areal_bus.errors import ActorFailed, ConfigError, PushFailed
from areal_bus.journal import Event, Journal
from areal_bus.messages import Directory, Failure, Finished, Join, Message, PushBegin, PushDone, Ready, UpdateDone
from areal_bus.staleness import StalenessPolicy
from areal_bus.weights import Root, Snapshot, join_store, serve_store, take_snapshot

COLLECTIVE_TIMEOUT_S = 1800.0  # ranks wait for each other at most so long, a checkpoint of rank 0 included


def run(context: Context) -> None:
    """One learner rank, from start to Stop."""
    config = context.config()
    journal = context.journal(config)
    learner = Learner(context, config, journal)
    try:
        learner.run()
    except StopRun as stop:
        logger.debug("learner {} stops: {}", context.index, stop)
    except Exception as error:
        told = broken_off(context, error) if lost_peer(error) else error
        journal.write(Event.FAILED, error=str(told))
        learner.send(Failure(str(told)))
        if told is not error:
            raise told from error
        raise
    finally:
        learner.close()


def broken_off(context: Context, error: Exception) -> ActorFailed:
    """What a collective's error means here, in a sentence for its page."""
    return ActorFailed(
        f"learners compute together: learner-{context.index} lost touch with another one, whose own error says why "
        f"({brief(error)})"
    )


class Learner:
    """Holds what lives as long as the process; `run` is its life in order."""

    def __init__(self, context: Context, config: Config, journal: Journal) -> None:
        self.context = context
        self.config = config
        self.journal = journal
        self.pulse = Pulse()
        self.is_root = context.index == 0
        self.root: Root | None = None
        self.endpoint = ""  # of the store at rank 0
        if self.is_root:
            store, self.endpoint = serve_store(context.address)
            self.root = Root(store, interface=context.interface, address=context.address)
        self.bus = open_bus(context, config, self.pulse)
        self.pusher = Pusher(self._push, send=self.send, failed=lambda error: self.letterbox.fail(error))
        self.letterbox = Letterbox(self.bus, push_begun=self.pusher.begin)
        self.saved = -1, ""  # version and folder of the last checkpoint
        self.send(self._join())

    def send(self, message: Message) -> None:
        self.bus.send("head", message)

    def run(self) -> None:
        """Raises StopRun when the head says Stop, which is how every orderly life ends."""
        loop = find_loop(self.config.learner.loop)
        self._load(self._meet())
        self._announce()
        rollout = Rollout(
            self.send,
            self.letterbox,
            journal=self.journal,
            pulse=self.pulse,
            eta=self.config.rollout.max_head_offpolicyness,
            n_samples=self.config.gconfig.n_samples,
            version=lambda: self.actor.version,
            policy=StalenessPolicy(self.config.rollout.staleness_policy),
            look=lambda: self.pusher.record(self.journal),
        )
        self.journal.mark("loop")
        loop(rollout, self.actor)
        rollout.check_trained()
        if not rollout.ended:
            raise ConfigError(
                f"learner.loop takes batches until there are none: {self.config.learner.loop!r} returned at version "
                f"{self.actor.version} while the run goes on"
            )
        self._finish()
        self._serve()

    def close(self) -> None:
        """End the threads; the journal's last line is written."""
        if self.root is not None:
            self.root.cancel()
        self.pusher.close(timeout_s=1.0)
        self.pusher.record(self.journal)
        self.letterbox.close()
        self.bus.close()
        self.journal.close()
        part()

    def _join(self) -> Join:
        context = self.context
        return Join(
            name=context.name,
            role=context.role,
            index=context.index,
            incarnation=context.incarnation,
            endpoint=self.endpoint,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _meet(self) -> Ranks:
        """One learner needs nobody; several build their process group at the store of rank 0."""
        if self.context.n_learners == 1:
            return Ranks()
        with self.journal.span("load"):
            self.pulse.note = "meets the other learners"
            return meet(
                join_store(self.endpoint or self._find_store(), self.config.launch.timeout_s),
                index=self.context.index,
                size=self.context.n_learners,
                interface=self.context.interface,
                device=self.context.device,
                timeout_s=COLLECTIVE_TIMEOUT_S,
            )

    def _find_store(self) -> str:
        while True:
            message = self.letterbox.take(look=lambda: self.journal.mark("load"))
            if isinstance(message, Directory):
                for name, endpoint in zip(message.names, message.endpoints, strict=True):
                    if name.startswith("learner-0."):
                        return endpoint

    def _load(self, ranks: Ranks) -> None:
        """Tokenizer, model, warm-up: afterwards the actor holds version 0."""
        config, context = self.config, self.context
        with self.journal.span("load"):
            self.pulse.note = "loads the model"
            self.tokenizer = load_tokenizer(context.model_folder)
            seed = config.run.seed if config.model.scratch is not None else None
            model = load_model(context.model_folder, "float32", context.device, random_seed=seed)
            self.policy = Policy(
                model,
                ranks=ranks,
                device=context.device,
                temperature=config.gconfig.temperature,
                dtype=config.model.dtype,
                gradient_checkpointing=config.learner.gradient_checkpointing,
            )
        if config.learner.warmup.steps:
            with self.journal.span("warmup"):
                self._warm_up()
        self.actor = PPOActor(
            self.policy,
            config,
            journal=self.journal,
            pulse=self.pulse,
            folder=context.folder,
            publish=self._publish,
            tick=self.letterbox.check,
        )

    def _warm_up(self) -> None:
        rows = load_rows(self.config, self.context.config_folder)
        warm_up(
            self.policy,
            demonstrate(rows, self.tokenizer, self.config.data),
            self.config.learner.warmup,
            seed=self.config.run.seed,
            capacity=self.config.learner.max_tokens_per_mb,
            journal=self.journal,
            pulse=self.pulse,
            tick=self.letterbox.check,
        )

    def _announce(self) -> None:
        """Version 0 is here."""
        digest = self._snapshot(0)
        if self.config.checkpoint.every_steps == 1:  # every version is kept, this one too
            self._checkpoint(0)
        self.send(Ready(capacity=0))
        if self.is_root:
            self.send(UpdateDone(version=0, stats={}, digest=digest))

    def _publish(self, version: int, stats: dict[str, float]) -> None:
        """Called by the actor at the end of every update, on every rank."""
        digest = self._snapshot(version)
        if self.is_root:
            self.send(UpdateDone(version=version, stats=stats, digest=digest))
            self.journal.write(Event.STEP, version=version, **stats)
        self.pusher.record(self.journal)
        every = self.config.checkpoint.every_steps
        if every and version % every == 0:
            self._checkpoint(version)

    def _push(self, snapshot: Snapshot, begin: PushBegin) -> PushDone:
        """Runs on the push thread. Only rank 0 is ever asked."""
        if self.root is None:
            raise PushFailed(f"learner 0 is the root of every push; {self.context.name} was asked for {begin.push}")
        return self.root.push(snapshot, begin)

    def _snapshot(self, version: int) -> str:
        """Copy the weights to the host, on this thread, before the next optimizer step; a collective when sharded."""
        self.actor.check_whole()
        with self.journal.span("snapshot"):
            snapshot = take_snapshot(
                version,
                self.policy.parameters(),
                is_root=self.is_root,
                previous=self.pusher.spare(),
                bucket_bytes=self.config.weights.bucket_mib << 20,
                dtype=self.policy.dtype,
            )
        self.pulse.version = version
        if snapshot is None:
            return ""
        self.pusher.keep(snapshot)
        return snapshot.digest

    def _checkpoint(self, version: int) -> None:
        self.actor.check_whole()
        began = time.monotonic()
        with self.journal.span("checkpoint"):
            folder = checkpoint.save(
                self.context.folder / "checkpoints",
                policy=self.policy,
                optimizer=self.actor.optimizer,
                version=version,
                tokenizer=self.tokenizer,
                keep=self.config.checkpoint.keep,
            )
        self.saved = version, str(folder)
        if self.is_root:
            seconds = round(time.monotonic() - began, 6)
            self.journal.write(Event.CHECKPOINT, step=version, folder=str(folder), seconds=seconds)

    def _finish(self) -> None:
        """The last checkpoint and RUN/model, a link to the transformers folder in it."""
        model = ""
        if self.config.checkpoint.at_end:
            self.pulse.note = "writes the last checkpoint"
            if self.saved[0] != self.actor.version:
                self._checkpoint(self.actor.version)
            model = str(self.context.folder / "model")
            if self.is_root:
                checkpoint.link(Path(model), Path(self.saved[1]) / "model")
                self.journal.write(Event.EXPORT, folder=model)
        self.send(Finished(checkpoint=self.saved[1], model=model))

    def _serve(self) -> None:
        """Only pushes are left to do, on their thread."""
        self.pulse.note = "serves pushes"
        self.journal.mark("serve")
        while True:
            self.letterbox.take(look=self._look)

    def _look(self) -> None:
        self.pusher.record(self.journal)
        self.journal.mark("serve")
