"""When checkpoints are written and pruned, and which one a learner resumes from."""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from actors.learner.checkpoint import checkpoint
from actors.learner.checkpoint.checkpoint import PendingCheckpoint
from actors.learner.checkpoint.upload import Uploads, push_to_hub
from actors.learner.update.ppo import PPOActor
from areal_bus.config.sections import CheckpointConfig
from areal_bus.core.events import Event
from areal_bus.core.parts.collapse import kept_for_rollback
from areal_bus.errors import CheckpointError
from areal_bus.storage import head_checkpoints, run_files, versioned_dirs
from areal_bus.storage.journal import Journal
from areal_bus.storage.run_files import BestRule


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A version and its checkpoint folder; "" for version 0 from the model folder, and for a copy in memory."""

    version: int
    folder: str
    is_held: bool = False  # from the copies in memory of all ranks
    newest: str = ""  # then: the newest checkpoint on disk


def choose(run: Path, *, every_steps: int, warn: Callable[[str], None]) -> StartPoint:
    """The newest version whose checkpoint and head checkpoint verify; `warn` receives the reason for each that does
    not.

    Newer versions than an open rollback goes back to are left out. Version 0 needs neither. A complete checkpoint
    without a head checkpoint is one that was never finished: when it is the first of a run (not above `every_steps`;
    without those, the only one of a run without any head checkpoint), the run begins at version 0 again. Raises
    CheckpointError if there are checkpoints and none is usable.
    """
    folder = run / "checkpoints"
    versioned_dirs.tidy(folder)
    refused: dict[int, str] = {}
    order = run_files.open_rollback(run)
    for version, path in versioned_dirs.versions(folder).items():
        if order is not None and version > order.to:
            continue
        try:
            _check(run, version, path)
        except CheckpointError as error:
            refused[version] = str(error)
            warn(f"version {version} cannot be gone back to, an older one is used: {error}")
        else:
            return StartPoint(version, str(path))
    if not _is_first(run, [version for version in refused if version], every_steps):
        reasons = "; ".join(refused.values())
        raise CheckpointError(
            f"a run goes on from a checkpoint whose files are whole: none in {folder} is ({reasons}); remove that "
            "folder to begin at version 0 again"
        )
    return StartPoint(0, "")


def _is_first(run: Path, sealed: list[int], every_steps: int) -> bool:
    """Whether the only checkpoint is the first of a run and the head has written none yet."""
    if every_steps:
        return not any(version > every_steps or has_frontier(run, version) for version in sealed)
    return not sealed or (len(sealed) == 1 and not any(head_checkpoints.versions(run / "frontiers")))


def has_frontier(run: Path, version: int) -> bool:
    """Whether a head checkpoint of this version exists."""
    return head_checkpoints.path_of(run / "frontiers", version).is_file()


def _check(run: Path, version: int, path: Path) -> None:
    """Raises CheckpointError unless a run can resume from this version."""
    checkpoint.verify(path)
    checkpoint.version_of(path)
    if version:
        frontier = head_checkpoints.load(head_checkpoints.path_of(run / "frontiers", version))
        if frontier.version != version:
            raise CheckpointError(f"version mismatch of a head checkpoint: that of {version} holds {frontier.version}")


def age_s(run: Path) -> float:
    """Seconds since the newest checkpoint, without one since the start of the run: its schedule survives a learner."""
    newest = next(iter(versioned_dirs.versions(run / "checkpoints").values()), run / "config.json")
    try:
        return max(0.0, time.time() - newest.stat().st_mtime)
    except OSError:
        return 0.0


NO_BEST = BestRule(0, 0)
SHARE = 0.02  # of the time that checkpoints by time may take, as long as checkpoint.every_s permits
MOST_WAITED = 0.05  # of the time that training may wait for them, whatever checkpoint.every_s is
LEAST_S = 5.0  # between two checkpoints by time, however short they are: the head writes its part as often
FIRST_S = 60.0  # the first checkpoint by time, before the duration of one is known
WAIT_S = 0.05  # between two looks at a write that training waits for


class BackgroundWrite:
    """Writes a staged checkpoint on a thread."""

    def __init__(self, pending: PendingCheckpoint, *, began: float, now: Callable[[], float]) -> None:
        self.version = pending.version
        self.began = began
        self.ended = began
        self.staged_s = now() - began  # training waited
        self._pending: PendingCheckpoint | None = pending
        self._now = now
        self._folder = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self, timeout_s: float = 0.0) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> str:
        """The folder. Raises what the thread raised: CheckpointError when a disk did not take it."""
        if self._error is not None:
            raise self._error
        return self._folder

    def _run(self) -> None:
        pending, self._pending = self._pending, None  # its memory is freed as it is written
        try:
            if pending is not None:
                self._folder = str(pending.write())
        except BaseException as error:  # noqa: BLE001 (`result` raises it)
            self._error = error
        self.ended = self._now()


@dataclass(frozen=True, slots=True)
class CheckpointHooks:
    """What a `CheckpointManager` calls."""

    sealed: Callable[[int, str], None]  # (version, folder) of each complete checkpoint
    tick: Callable[[], None] = lambda: None  # while training waits for a write; an exception ends the wait
    now: Callable[[], float] = time.monotonic  # a clock in seconds


class CheckpointManager:
    """When this rank checkpoints and where it resumes; rank 0 chooses. Training waits for the copy, not its writing."""

    def __init__(
        self,
        run: Path,
        settings: CheckpointConfig,
        *,
        journal: Journal,
        is_root: bool,
        hooks: CheckpointHooks,
        best: BestRule = NO_BEST,
    ) -> None:
        """`best`: which checkpoints stay for their evaluation."""
        self.folder = ""  # of the newest known checkpoint; "" if none
        self._version: int | None = None  # its version
        self._run = run
        self._settings = settings
        self._journal = journal
        self._is_root = is_root
        self._hooks = hooks
        self._best = best
        self.keeps_good = False  # one that a rollback goes back to stays, too
        self._now = hooks.now
        self._uploads = Uploads(settings.upload) if settings.upload and is_root else None
        self._write: BackgroundWrite | None = None
        self._tried = hooks.now() - age_s(run)  # time of the last checkpoint or failure, also of an earlier process
        self._took_s: float | None = None  # duration of the last checkpoint; None: this process has written none
        self._waited_s = 0.0  # the part of it in which training waited

    def choose(self, held: Collection[int] = ()) -> StartPoint:
        """Choose the start version and remove newer checkpoints. Raises CheckpointError.

        `held`: versions of which all ranks have a copy in memory; after the order of a rollback they do not count.
        """
        sealed = versioned_dirs.versions(self._run / "checkpoints")
        if held and max(held) >= max(sealed, default=0) and run_files.open_rollback(self._run) is None:
            newest = str(sealed[max(sealed)]) if sealed else ""
            beginning = StartPoint(max(held), "", is_held=True, newest=newest)
            versioned_dirs.tidy(self._run / "checkpoints")
        else:
            beginning = choose(self._run, every_steps=self._settings.every_steps, warn=self._warn)
        for path in versioned_dirs.discard_above(self._run / "checkpoints", beginning.version):
            self._warn(f"{path.name} is removed: this term begins at version {beginning.version}, before it")
        if self._uploads is not None:  # what an earlier process had not uploaded
            for _, path in sorted(versioned_dirs.versions(self._run / "checkpoints").items()):
                self._uploads.add(path)
        return beginning

    def know(self, newest: str) -> None:
        """The newest checkpoint on disk, on every rank: whether a version is missing is the same answer on all."""
        if newest:
            self._version, self.folder = versioned_dirs.version_of(Path(newest)), newest

    def restore(self, actor: PPOActor, beginning: StartPoint) -> None:
        """Restore optimizer, RNG, version and rounded parameters into an actor that has the weights."""
        folder = Path(beginning.folder)
        state = checkpoint.read(folder)
        checkpoint.restore(state, policy=actor.policy, optimizer=actor.optimizer)
        if actor.critic is not None:
            checkpoint.restore_critic(folder, actor.critic)
        actor.rest()
        actor.version = state.version
        self._version, self.folder = state.version, str(folder)
        if self._is_root:
            sentence = f"begins at version {state.version} from checkpoint {folder}"
            logger.info("learner-0 {}", sentence)
            self._journal.write(Event.NOTE, text=sentence)

    def is_due(self, actor: PPOActor) -> bool:
        """Whether a checkpoint is due, by version or by the clock of rank 0. A collective when sharded."""
        every, version = self._settings.every_steps, actor.version
        if every and version % every == 0:
            return version > 0 or every == 1
        if self._best.is_due(version) or (version and self._is_kept(version)):
            return True
        if not (version and self._settings.every_s):
            return False
        is_late = self._is_root and self._write is None and self._now() - self._tried >= self.interval_s
        return bool(actor.policy.ranks.max([float(is_late)])[0])

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints by time: such that they take SHARE of the time, at most checkpoint.every_s."""
        if self._took_s is None:
            return min(self._settings.every_s, FIRST_S)
        interval_s = max(LEAST_S, self._took_s / SHARE)
        return max(min(interval_s, self._settings.every_s), self._waited_s / MOST_WAITED)

    def describe(self) -> str:
        """When checkpoints are written, for the start of a run."""
        settings, times = self._settings, []
        if settings.every_steps:
            times.append(f"every {settings.every_steps} steps")
        if settings.every_s:
            first = f"after {min(FIRST_S, settings.every_s):g} s, then as often as takes under {SHARE:.0%} of the time"
            times.append(f"{first}, at least every {settings.every_s:g} s")
        return f"checkpoints: {' and '.join(times) or 'none before the end'}"

    def keep(self, actor: PPOActor, tokenizer: Any) -> None:
        """Write a due checkpoint once the last one is written; disk errors only warn. A collective when sharded."""
        try:
            self.settle()
            if actor.version != self._version:
                self._begin(actor, tokenizer, copies=self._settings.async_save)
        except CheckpointError as error:
            self._skip(error)
        self._tried = self._now()
        if not self._settings.async_save:
            self.settle()

    def finish(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint the current version unless that is done, and wait. Raises CheckpointError on a disk error."""
        self.settle()
        is_missing = actor.version != self._version
        if actor.policy.ranks.max([float(is_missing)])[0]:
            self._begin(actor, tokenizer, copies=False)
            self._conclude(self._await())

    def record(self) -> None:
        """Report a checkpoint that has been written since the last call. Raises an error that is not of the disk."""
        if self._write is not None and self._write.is_done():
            self.settle()
        for note in [] if self._uploads is None else self._uploads.take_notes():
            if note.startswith("uploaded"):
                self._journal.write(Event.NOTE, text=note)
            else:
                self._warn(note)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written. A disk error skips it with a warning."""
        if self._write is None:
            return
        try:
            self._conclude(self._await())
        except CheckpointError as error:
            self._skip(error)
        self._tried = self._now()

    def _begin(self, actor: PPOActor, tokenizer: Any, *, copies: bool) -> None:
        actor.check_whole()
        began, values = self._now(), run_files.read_best(self._run)
        with self._journal.span("checkpoint"):
            pending = checkpoint.stage(
                self._run / "checkpoints",
                policy=actor.policy,
                optimizer=actor.optimizer,
                version=actor.version,
                tokenizer=tokenizer,
                keep=self._settings.keep,
                counts=lambda other: has_frontier(self._run, other),
                is_best=lambda other: (
                    self._best.keeps(other, values)
                    or self._is_kept(other)
                    or self._is_leaving(other)
                    or self._is_good(other, actor.version)
                ),
                reference=actor.kept_reference,
                critic=actor.critic,
                copies=copies,
            )
        self._write = BackgroundWrite(pending, began=began, now=self._now)

    def _await(self) -> BackgroundWrite:
        """The write that has ended; none is in progress afterwards."""
        write = self._write
        assert write is not None
        with self._journal.span("checkpoint"):
            while not write.is_done(WAIT_S):
                self._hooks.tick()
        self._write = None
        return write

    def _conclude(self, write: BackgroundWrite) -> None:
        """Raises CheckpointError on a disk error."""
        folder = write.result()
        self._version, self.folder = write.version, folder
        self._took_s = write.ended - write.began
        self._waited_s = write.staged_s if self._settings.async_save else self._took_s
        if self._is_root:
            times = {"seconds": round(self._took_s, 6), "staged_s": round(write.staged_s, 6)}
            self._journal.write(Event.CHECKPOINT, step=write.version, folder=folder, **times)
        if self._uploads is not None:
            self._uploads.add(Path(folder))
        self._hooks.sealed(write.version, folder)

    def _skip(self, error: CheckpointError) -> None:
        if self._is_root:
            self._warn(f"training goes on, and could come back from an older checkpoint only: {error}")

    def _is_kept(self, version: int) -> bool:
        """Whether its checkpoint stays for ever."""
        return self._settings.keep_every > 0 and version % self._settings.keep_every == 0

    def _is_good(self, other: int, version: int) -> bool:
        """Whether a forecast of a collapse after `version` may go back to `other`."""
        there = [v for v in versioned_dirs.versions(self._run / "checkpoints") if has_frontier(self._run, v)]
        return self.keeps_good and other in kept_for_rollback(there, version)

    def _is_leaving(self, version: int) -> bool:
        """Whether its upload needs the folder."""
        return self._uploads is not None and self._uploads.holds(versioned_dirs.place(self._run, version).name)

    def upload_rest(self, *, has_model: bool) -> None:
        """Wait for uploads, and push the exported model to the hub. A failure is a warning."""
        if self._uploads is not None:
            self._uploads.finish(self._hooks.tick)
        if self._is_root and has_model and self._settings.push_to_hub:
            repository = self._settings.push_to_hub
            try:
                push_to_hub(self._run / "model", repository)
            except Exception as error:  # noqa: BLE001 (of the hub's client, of the network)
                self._warn(f"model not pushed to {repository}: {error}; it is in {self._run / 'model'}")
            else:
                self._journal.write(Event.NOTE, text=f"pushed the model to {repository}")
        self.record()

    def sealed(self) -> list[int]:
        return sorted(versioned_dirs.versions(self._run / "checkpoints"))

    def export(self) -> str:
        """Link RUN/model to the newest checkpoint's model; returns that folder if the name is taken."""
        link, model = self._run / "model", Path(self.folder) / "model"
        try:
            if self._is_root:
                checkpoint.link(link, model)
            model = link
        except OSError as error:
            self._warn(f"{link} cannot point to the model: {error.strerror}; it is in {model}")
        if self._is_root:
            self._journal.write(Event.EXPORT, folder=str(model))
        return str(model)

    def _warn(self, sentence: str) -> None:
        logger.warning(sentence)
        self._journal.write(Event.NOTE, text=sentence)
