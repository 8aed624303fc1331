"""The learner actor: consumes its share of each batch, produces an update and, on rank 0, the snapshot to push."""

import os
import socket
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from actors.learner.batching import build
from actors.learner.checkpoint.checkpoint_manager import CheckpointHooks, CheckpointManager, StartPoint
from actors.learner.checkpoint.memory_copy import MemoryCopies
from actors.learner.link.inbox import LearnerInbox, StopRun
from actors.learner.link.rendezvous import LearnerRanks, Rendezvous, lost_peer, meet, part
from actors.learner.link.rollout import HeadFailover, Rollout
from actors.learner.link.weight_pusher import WeightPusher
from actors.learner.loop import find_loop
from actors.learner.model.frozen_model import FrozenModels, load_frozen_models
from actors.learner.model.policy import model_settings
from actors.learner.model.startup import load_critic, load_policy, warm
from actors.learner.update.ppo import PPOActor, UpdateContext, UpdateStandIn
from actors.models.loading import load_tokenizer
from actors.runtime.context import COPY_FD, Context, HeartbeatState, journal_rejections, open_bus, take_descriptor
from actors.runtime.process import leave
from actors.runtime.stages import stages_of, temperatures_of
from actors.runtime.torch_profiler import TorchProfiler
from actors.runtime.user_code import load_function, place_of
from actors.runtime.user_failures import Fault, keep_fault
from areal_bus import messages as m
from areal_bus.config.capacity import BUCKET_BYTES, DELTA_VERSIONS
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.core.parts.stages import stage_at
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import CheckpointError, ConfigError, PushFailed, Restart
from areal_bus.storage.journal import Journal
from areal_bus.storage.run_files import BestRule, read_rollback
from areal_bus.weights.delta import ChangeHistory
from areal_bus.weights.process_group import brief, print_numeric_peers, serve_store
from areal_bus.weights.route import home
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.shared_memory import refusal
from areal_bus.weights.snapshot import Snapshot, take_snapshot

SIMULATED = "areal_lab.ring.update:simulated_update"  # by name: a ring imports no laboratory
COLLECTIVE_TIMEOUT_S = 1800.0  # limit of a collective; a checkpoint of rank 0 fits in
ORDER_S = 1.0  # an ordered stop of one rank breaks the collectives of the others; their order arrives within this time


def run(context: Context) -> None:
    """One learner rank, from start to Stop."""
    print_numeric_peers()
    config = context.config()
    journal = context.journal(config)
    learner = Learner(context, config, journal)
    try:
        learner.run()
    except Exception as error:  # noqa: BLE001 (`fail` raises it unless the head ordered the stop)
        learner.fail(error)
    finally:
        learner.close()


def stand_in(config: Config) -> UpdateStandIn | None:
    """The update of [learner.simulated]; None if updates compute."""
    if config.learner.simulated is None:
        return None
    found: UpdateStandIn = load_function("learner.simulated", SIMULATED)(config)
    return found


class Learner:
    """State of a learner process; `run` goes through its phases in order."""

    def __init__(self, context: Context, config: Config, journal: Journal) -> None:
        self.context = context
        self.config = config
        self.journal = journal
        self.heartbeat = HeartbeatState()
        self.is_root = context.index == 0
        self.root: WeightSender | None = None
        self.endpoint = ""  # of the store at rank 0
        self.has_met = False  # it is in a process group with other ranks
        self.digest = ""  # of the newest version; rank 0 only
        self.max_lag: int | None = None  # of the tokens trained by this process; None before the first
        self.began_at = 0  # the version at the start of this process
        self.is_restored = False  # it began from the copy in memory
        n_learners = context.n_learners
        self.copies = MemoryCopies(
            take_descriptor(COPY_FD),
            owner=f"{context.job} {context.split} {context.index}/{n_learners}",
            journal=journal,
            n_here=min(n_learners, config.topology.gpus_per_host or n_learners),
        )
        sends_deltas = self.is_root and config.weights.delta_push == "auto" and config.actor.lora is None
        self.changes = ChangeHistory(DELTA_VERSIONS) if sends_deltas else None
        if self.is_root:
            store, self.endpoint = serve_store(context.address, n_members=context.n_generators)
            self.root = WeightSender(
                store,
                interface=context.interface,
                address=context.address,
                route=config.weights.route,
                changes=self.changes,
            )
        self.bus = open_bus(context, config, self.heartbeat)
        self.pusher = WeightPusher(
            self._push, send=self.send, failed=lambda error: self.inbox.fail(error), changes=self.changes
        )
        self.inbox = LearnerInbox(self.bus, push_begun=self.pusher.begin, push_broken=self._call_off, overdue=leave)
        self.checkpoints = CheckpointManager(
            context.folder,
            config.checkpoint,
            journal=journal,
            is_root=self.is_root,
            hooks=CheckpointHooks(self._sealed, tick=self.inbox.check),
            best=BestRule(config.checkpoint.keep_best, config.evaluate.every_steps),
        )
        self.checkpoints.keeps_good = config.watch.on_collapse != "warn"
        self.send(self._join())

    def send(self, message: m.Message) -> None:
        self.bus.send("head", message)

    def run(self) -> None:
        """Raises StopRun when the head sends Stop, the normal end."""
        loop = find_loop(self.config.learner.loop)
        stages = stages_of(self.config)
        ranks, start = self._meet()
        self._load(ranks, start)
        self.failover = HeadFailover(self.inbox, self.send, most=ranks.max, begin=self._begin, look=self._record)
        self._announce()
        profiler = TorchProfiler(
            self.context.name, self.context.folder, self.config.profile, self.journal, bounds_s=False
        )
        rollout = Rollout(
            self.failover,
            build=partial(
                build,
                eta=self.config.rollout.max_head_offpolicyness,
                policy=StalenessPolicy(self.config.rollout.staleness_policy),
                n_samples=lambda born, source: stage_at(stages, born, source).n_samples,
                partial_groups=self.config.reward.partial_groups,
                temperatures=temperatures_of(self.config),
            ),
            journal=self.journal,
            heartbeat=self.heartbeat,
            version=lambda: self.actor.version,
            turn=profiler.turn,
        )
        self.journal.mark("loop")
        loop(rollout, self.actor)
        profiler.close(self.actor.version)
        rollout.check_ended(self.config.learner.loop)
        self._finish(drained=rollout.drained)
        self._serve(rollout)

    def fail(self, error: Exception) -> None:
        """Report the error and raise its meaning; return if the head ordered the stop."""
        meaning = self._meaning(error)
        self._note_place(error)
        if isinstance(meaning, StopRun):
            logger.debug("{} stops: {}", self.context.name, meaning)
            return
        if isinstance(meaning, Restart):
            self.journal.write(Event.NOTE, text=f"comes back from its checkpoint: {meaning}")
            if self.inbox.undoes:
                self.copies.clear()
        else:
            self.journal.write(Event.FAILED, error=str(meaning))
            self.send(m.Failure(str(meaning)))
        if meaning is error:
            raise error
        raise meaning from error

    def _note_place(self, error: Exception) -> None:
        """Record where user code failed: the supervisor gives up if a restart fails at the same place."""
        place = place_of(error)
        if place and not isinstance(error, StopRun | Restart):
            reached = self.actor.version if hasattr(self, "actor") else 0
            keep_fault(self.context.folder / "logs", self.context.name, Fault(place, reached))

    def _meaning(self, error: Exception) -> Exception:
        """The cause of an error. A broken collective means that another rank stopped, by order or by its own error."""
        if not (self.has_met and lost_peer(error)):
            return error
        try:
            self.inbox.await_order(ORDER_S)
        except (StopRun, Restart) as order:
            return order
        return Restart(
            f"learners compute together: {self.context.name} lost touch with another one, whose own error says why "
            f"({brief(error)})"
        )

    def close(self) -> None:
        """Stop the threads and close the journal."""
        if self.root is not None:
            self.root.cancel()
        self.pusher.close(timeout_s=1.0)
        self.pusher.record(self.journal)
        self.inbox.close()
        self.bus.close()
        self.journal.close()
        part()

    def _join(self) -> m.Join:
        context = self.context
        return m.Join(
            name=context.name,
            role=context.role,
            index=context.index,
            incarnation=context.incarnation,
            endpoint=self.endpoint,
            pid=os.getpid(),
            host=socket.gethostname(),
            split=context.split,
        )

    def _meet(self) -> tuple[LearnerRanks, StartPoint]:
        """Build the process group of the learner ranks and choose the start point, both led by rank 0."""
        context = self.context
        with self.journal.span("load"):
            if context.n_learners == 1:
                self.inbox.bind()
                return LearnerRanks(), self.checkpoints.choose(self.copies.versions)
            self.heartbeat.note = "waits for the other learners"
            meeting = Rendezvous(
                self.inbox,
                name=context.name,
                join_again=lambda: self.send(self._join()),
                look=lambda: self.journal.mark("load"),
            )
            if self.is_root:
                store = meeting.host(self.endpoint, self._choose, size=context.n_learners)
                start = self._start
            else:
                store, word = meeting.visit(context.index, self.copies.versions)
                start = StartPoint(**word)
            ranks = meet(
                store,
                index=context.index,
                size=context.n_learners,
                interface=context.interface,
                device=context.device,
                timeout_s=COLLECTIVE_TIMEOUT_S,
                replicas=self.config.topology.replicas,
                context_parallel=self.config.actor.context_parallel,
            )
            self.has_met = True
            return ranks, start

    def _choose(self, copies: list[list[int]]) -> dict[str, Any]:
        """The start point of all ranks. `copies`: the versions that each other rank has a copy of."""
        self._start = self.checkpoints.choose(set(self.copies.versions).intersection(*copies))
        return asdict(self._start)

    def _load(self, ranks: LearnerRanks, start: StartPoint) -> None:
        """Load tokenizer and model; afterwards the actor holds the start version."""
        config, context = self.config, self.context
        self.is_restored = start.is_held
        if not start.is_held:
            self.copies.clear()
        with self.journal.span("load"):
            self.heartbeat.note = "loads the model"
            self.tokenizer = load_tokenizer(context.model_folder, date=context.run_date())
            model, settings = context.model_folder, model_settings(config, ranks, context.device)
            self.policy = load_policy(config, model, settings, checkpoint=start.folder)
            critic = load_critic(config, model, settings, config_folder=Path(context.config_folder))
        self._record_model()
        if config.learner.warmup.steps and not (start.folder or start.is_held):
            with self.journal.span("warmup"):
                warm(
                    self.policy,
                    config,
                    context,
                    tokenizer=self.tokenizer,
                    journal=self.journal,
                    heartbeat=self.heartbeat,
                    tick=self.inbox.check,
                )
        self.actor = PPOActor(
            self.policy,
            config,
            UpdateContext(self.journal, self.heartbeat, context.folder, publish=self._publish, tick=self.inbox.check),
            critic=critic,
            frozen=self._load_frozen(start),
            stand_in=stand_in(config),
        )
        self.actor.rollback = read_rollback(context.folder)
        if start.folder:
            with self.journal.span("load"):
                self.checkpoints.restore(self.actor, start)
        if start.is_held:
            self.checkpoints.know(start.newest)
            with self.journal.span("load"):
                self._restore_copy(start.version)

    def _restore_copy(self, version: int) -> None:
        """Raises Restart, from the checkpoint on disk, if the copy does not fit the model."""
        try:
            self.max_lag = self.copies.restore(self.actor, version)
        except CheckpointError as error:
            self.copies.clear()
            raise Restart(f"unusable copy in memory: {error}") from error

    def _record_model(self) -> None:
        """Write the size of the model and its device, from which readers compute FLOPs."""
        device = self.policy.device
        self.journal.write(
            Event.MODEL,
            n_params=sum(parameter.numel() for parameter in self.policy.model.parameters()),
            n_trained=sum(parameter.numel() for parameter in self.policy.parameters().values()),
            dtype=str(self.policy.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )

    def _load_frozen(self, start: StartPoint) -> FrozenModels:
        with self.journal.span("load"):
            return load_frozen_models(
                self.config,
                self.policy,
                model=self.context.model_folder,
                config_folder=Path(self.context.config_folder),
                checkpoint=start.folder,
            )

    def _announce(self) -> None:
        """Snapshot and report the start version."""
        self.began_at = self.actor.version
        self.shared_on = self._shared_on()
        self.digest = self._snapshot(self.began_at)
        self.copies.begin(self.actor)
        if not self.is_restored:
            self.copies.keep(self.actor, self.max_lag)
        self.inbox.live_on(lambda life: self.send(replace(self._join(), again=life)))
        self.failover.confirm(False)
        if self.is_root:
            logger.info("learner-0 {}", self.checkpoints.describe())
        if self.checkpoints.is_due(self.actor):
            self.checkpoints.keep(self.actor, self.tokenizer)

    def _begin(self, life: int, lives_on: bool) -> None:
        """Report the version of this rank to a head of this incarnation."""
        version = self.actor.version
        if lives_on:
            self.journal.write(Event.NOTE, text=f"survived a head: continues at version {version} with the next one")
            for push in self.pusher.drop():
                if self.root is not None:
                    self.root.cancel(push)
        self.send(m.Ready(capacity=0))
        if self.is_root:
            has_more = lives_on and version > self.began_at  # than a restarted learner would have
            is_copy, sealed = self.is_restored and not has_more, self.checkpoints.sealed()
            self.send(m.BeginTerm(version, self.digest, life, has_more, sealed, self.max_lag, is_copy))

    def _publish(self, version: int, stats: dict[str, float]) -> None:
        """Runs at the end of every update, on every rank."""
        self.digest = self._snapshot(version)
        self._record()
        is_kept = self.checkpoints.is_due(self.actor)
        if "lag_max" in stats:
            self.max_lag = max(self.max_lag or 0, int(stats["lag_max"]))
        if self.is_root:  # before the copy, after which a head may continue at this version
            self.journal.write(Event.STEP, version=version, digest=self.digest, **stats)
        is_held = self.copies.keep(self.actor, self.max_lag)
        if is_held:  # its updates survive this process
            self.heartbeat.report_progress()
        if self.is_root and not self.failover.has_new_head:  # else the next head receives the version in BeginTerm
            self.send(m.UpdateDone(version=version, stats=stats, digest=self.digest, kept=is_kept, held=is_held))
        if is_kept:
            self.checkpoints.keep(self.actor, self.tokenizer)

    def _sealed(self, version: int, folder: str) -> None:
        """Runs on every rank when a checkpoint is complete: its updates survive this process."""
        if version > self.began_at:
            self.heartbeat.report_progress()
        if self.is_root and not self.failover.has_new_head:
            self.send(m.Checkpointed(version, folder))

    def _call_off(self, message: m.PushBroken) -> None:
        """Cancel a push whose member died."""
        if self.root is not None:
            self.root.cancel(message.push)

    def _push(self, snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        """Runs on the push thread of rank 0."""
        if self.root is None:
            raise PushFailed(f"learner 0 is the root of every push; {self.context.name} was asked for {begin.push}")
        return self.root.push(snapshot, begin)

    def _shared_on(self) -> torch.device | None:
        """The device of snapshots that other processes open. Raises ConfigError: sharing required and impossible."""
        at = self.policy.shared_on(home(self.config, on_gpu=self.policy.device.type == "cuda"))
        refused = refusal(self._n_bytes()) if at is not None and at.type == "cpu" and self.is_root else ""
        if not refused:
            return at
        if self.config.weights.route == "shared":
            raise ConfigError(f'weights.route = "shared" needs memory that others can open: {refused}; set "gloo"')
        logger.warning("{}: weights will be sent, its memory cannot be shared: {}", self.context.name, refused)
        return None

    def _n_bytes(self) -> int:
        """Size of the weights in the dtype of a push."""
        return sum(tensor.numel() for tensor in self.policy.pushed().values()) * self.policy.push_dtype.itemsize

    def _snapshot(self, version: int) -> str:
        """Copy the weights before the next optimizer step; a collective when sharded."""
        self.actor.check_whole()
        with self.journal.span("snapshot"):
            snapshot = take_snapshot(
                version,
                self.policy.pushed(),
                is_root=self.is_root,
                previous=self.pusher.spare(),
                bucket_bytes=BUCKET_BYTES,
                dtype=self.policy.push_dtype,
                shared_on=self.shared_on,
            )
        self.heartbeat.version = version
        if snapshot is None:
            return ""
        self.pusher.keep(snapshot)
        return snapshot.digest

    def _finish(self, *, drained: bool) -> None:
        """Write the last checkpoint and, unless the run drained, export the model."""
        model = ""
        at_end = self.config.checkpoint.at_end
        if at_end or drained:
            self.heartbeat.note = "writes the last checkpoint"
            self.checkpoints.finish(self.actor, self.tokenizer)
        self.checkpoints.settle()
        if at_end and not drained:
            model = self.checkpoints.export()
        self.heartbeat.note = "uploads the last checkpoint"
        self.checkpoints.upload_rest(has_model=bool(model))
        self._finished = m.Finished(checkpoint=self.checkpoints.folder, model=model)
        self.send(self._finished)

    def _serve(self, rollout: Rollout) -> None:
        """Serve pushes until the head sends Stop; report the end again to a restarted head."""
        self.heartbeat.note = "serves pushes"
        self.journal.mark("serve")
        while True:
            self.inbox.take(look=self._look)
            if self.failover.has_new_head:
                rollout.report_end_again()
                self.send(self._finished)

    def _look(self) -> None:
        self._record()
        self.journal.mark("serve")

    def _record(self) -> None:
        """Write the events of other threads to the journal."""
        self.journal.term = self.inbox.term
        self.pusher.record(self.journal)
        self.checkpoints.record()
        journal_rejections(self.bus, self.journal)
