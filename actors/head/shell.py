"""The head actor: a bus, a clock, a journal and a terminal around the pure state machine of `areal_bus.core.head`.

Consumes scored trajectories and finished updates; waits for messages; produces prompts, batch shards and versions.
It imports no torch: it answers while the learner computes.
"""

import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.data.loading import load_problems, load_rows
from actors.data.source import RowOrder, RowSource
from actors.head.alerts import Alert, Alerts
from actors.head.checkpoint_writer import HeadCheckpointWriter, newest_checkpoint
from actors.head.console import Console, clock, comparison
from actors.head.sample_log import SampleLog
from actors.head.stall_monitor import StallMonitor
from actors.runtime import process as draining
from actors.runtime.context import Context, HeartbeatState, LoopTicker, collect_seldom, dump, note_refusals
from areal_bus import messages as m
from areal_bus.config.sections import Config
from areal_bus.core.effects import Discard, Effect, End, Keep, Mark, Record, Save, Send
from areal_bus.core.effects import Progress as Shown
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.staleness import StalenessPolicy
from areal_bus.core.state import HeadRules
from areal_bus.errors import ActorFailed, CheckpointError, ConfigError
from areal_bus.journal import Journal
from areal_bus.storage.head_checkpoints import sync_folder
from areal_bus.transport.bus import Bus


def rules_of(context: Context, config: Config, problems: list[dict[str, Any]]) -> HeadRules:
    return HeadRules(
        batch_size=config.data.batch_size,
        eta=config.rollout.max_head_offpolicyness,
        policy=StalenessPolicy(config.rollout.staleness_policy),
        n_samples=config.gconfig.n_samples,
        total_steps=config.run.total_train_steps,
        n_generators=context.n_generators,
        n_rewards=context.n_rewards,
        n_learners=context.n_learners,
        silent_s=config.bus.silent_s,
        assemble_s=config.launch.timeout_s,
        push_timeout_s=config.weights.timeout_s,
        drop_last=config.data.drop_last,
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_keep=config.checkpoint.keep,
        evaluate_before=config.evaluate.before,
        evaluate_after=config.evaluate.after,
        evaluate_samples=config.evaluate.n_samples,
        partial_bytes=config.rollout.report_mib << 20,
        lease_secret=context.lease_secret.encode(),
        problems=tuple(dump(row) for row in problems),
        on_timeout=declared(config.reward.on_timeout),
        on_error=declared(config.reward.on_error),
        partial_groups=config.reward.partial_groups,
    )


def declared(policy: float | str) -> float | None:
    """The reward of a score that failed; None for "refund"."""
    return None if isinstance(policy, str) else policy


TICK_S = 0.1
AT_ONCE = 256  # effects, or messages, from which on no further one is looked at before they are carried out
FRONTIERS_S = 60.0  # at the end, for what is not on disk yet
TERM_FILE = "term.json"


def run(context: Context) -> None:
    """Serve until the run has ended. Raises ActorFailed when it ended badly."""
    config = context.config()
    journal = context.journal(config)
    shell = Shell(context, config, journal)
    bus = Bus(
        "head",
        job=context.job,
        listen=context.head,
        heartbeat=shell.beat,
        heartbeat_s=config.bus.heartbeat_s,
        inbox_bytes=config.bus.inbox_mib << 20,
        tells_gone=True,
        keys=context.keyring(),
    )
    collect_seldom()
    try:
        shell.serve(bus)
    finally:
        bus.close(linger_s=2.0)
        journal.close(**({} if shell.end is None else {"code": shell.end.code, "reason": shell.end.sentence}))
    if shell.end is not None and shell.end.code:
        raise ActorFailed(shell.end.sentence)


class Shell:
    """Carries out what the head decides."""

    def __init__(self, context: Context, config: Config, journal: Journal) -> None:
        self.config = config
        self.folder = Path(context.run_folder)
        self.journal = journal
        self.pulse = HeartbeatState()  # for the supervisor alone: a head that moves on is not dying in a row
        self.turns = LoopTicker()
        self.end: End | None = None
        self.began = time.monotonic()
        self.samples = SampleLog(self.folder, tokens=config.journal.tokens) if config.journal.samples else None
        self.progress = Console(total_steps=config.run.total_train_steps)
        self.alerts = Alerts(config)
        rows = load_rows(config, context.config_folder)
        evaluates = config.evaluate.before or config.evaluate.after
        problems = load_problems(config, context.config_folder) if evaluates else []
        self._save_problems(problems)
        order = RowOrder(
            len(rows), seed=config.run.seed, shuffle=config.data.shuffle, passes=config.data.total_train_epochs
        )
        check_data(config, order)
        self.frontiers = HeadCheckpointWriter(self.folder / "frontiers")
        rules = rules_of(context, config, problems)
        self.head = Head(
            rules if rules.lease_secret else replace(rules, lease_secret=secrets.token_bytes(16)),
            RowSource(rows, order),
            now=time.monotonic(),
            life=context.incarnation,
            term=next_term(self.folder),
            frontiers=self.frontiers.load(),
            waypoints=self.frontiers.waypoints(),
        )
        self.watchdog = StallMonitor(config.watchdog, heartbeat_s=config.bus.heartbeat_s)

    def beat(self) -> m.HeadHeartbeat:
        """The published clock, repeated to everybody; called on the bus thread."""
        return m.HeadHeartbeat(term=self.head.terms.term, version=self.head.gate.v, life=self.head.life)

    def serve(self, bus: Bus) -> None:
        """Messages in, effects out, until the end."""
        next_tick = time.monotonic()
        while self.end is None:
            self.turns.tell()
            self.journal.mark("wait")
            got = bus.receive(max(0.001, next_tick - time.monotonic()))
            self.journal.mark("decide")
            if got is not None:
                self._carry_out(bus, self._decide(bus, got))
            now = time.monotonic()
            if now >= next_tick:
                note_refusals(bus, self.journal)
                for frontier in self.frontiers.saved():
                    self.head.terms.saved(frontier)
                self._carry_out(bus, self.head.tick(now, until=bus.until))
                self._carry_out(bus, self.watchdog.look(self.head, now))
                if draining.asked():
                    self._carry_out(bus, self.head.drain(now))
                next_tick = now + TICK_S
        self._say_how_it_ended()

    def _decide(self, bus: Bus, first: tuple[str, m.Message]) -> list[Effect]:
        """On `first` and on what else is there, until more is to be done than to write and to tell."""
        effects: list[Effect] = []
        got: tuple[str, m.Message] | None = first
        n_left = AT_ONCE  # most messages have no effects, and deadlines do not wait until there are no more of them
        while got is not None:
            follows = self.head.on(*got, time.monotonic())
            effects += follows
            n_left -= max(1, len(follows))
            goes_on = n_left > 0 and all(isinstance(effect, Send | Record | Keep) for effect in follows)
            got = bus.receive(0) if goes_on else None
        return effects

    def _carry_out(self, bus: Bus, effects: list[Effect]) -> None:
        """In order; but all lines are written before what was decided with them is told, with one write, and the end is
        on disk before anybody is told to stop: a head that dies between the two is over.
        """
        ends = any(isinstance(effect, End) for effect in effects)
        letters: list[Send] = []
        goodbyes: list[Send] = []
        for effect in effects:
            if isinstance(effect, Send):
                (goodbyes if ends and isinstance(effect.message, m.Stop) else letters).append(effect)
            elif isinstance(effect, Save | Discard):
                self._tell(bus, letters)
                self.frontiers.do(effect)
            elif isinstance(effect, Mark):
                self._tell(bus, letters)
                self.frontiers.mark(effect.waypoint)
            elif isinstance(effect, Record):
                if effect.event is Event.TERM:
                    self._tell(bus, letters)
                    self._begin_term(effect.fields["term"], effect.fields["version"])
                self.journal.keep(effect.event, **effect.fields)
                self.pulse.progress += effect.event in (Event.SCORED, Event.UPDATE)
                if effect.event is Event.FAILED:  # the actor names itself; what follows from it is no news
                    self.progress.mute()
            elif isinstance(effect, Keep):
                self.alerts.keep(effect)
                if self.samples is not None:
                    self.samples.keep(effect)
            elif isinstance(effect, Shown):
                self.progress.on(effect.kind, effect.fields)
                if effect.kind == "step":
                    self._alert(self.alerts.step(effect.fields))
            else:
                self.end = effect
        self._tell(bus, letters)
        if ends:
            self.frontiers.close(FRONTIERS_S)
            self._summarize()
        for goodbye in goodbyes:
            bus.send(goodbye.to, goodbye.message)

    def _alert(self, alerts: list[Alert]) -> None:
        """For people, and the journal."""
        for alert in alerts:
            self.progress.on("alert", {"level": alert.level, "text": alert.text})
            self.journal.keep(Event.NOTE, level=alert.level, text=alert.text)

    def _tell(self, bus: Bus, letters: list[Send]) -> None:
        """What is to be told so far, after the lines that were decided with it."""
        self.journal.flush()
        if self.samples is not None:
            self.samples.flush()
        if letters:
            bus.send_all((letter.to, letter.message) for letter in letters)
        letters.clear()

    def _begin_term(self, term: int, version: int) -> None:
        """On disk before anybody hears of it: no two heads begin the same term, or go back to what it undoes."""
        self.frontiers.settle(FRONTIERS_S, version=version)
        write_whole(self.folder / TERM_FILE, json.dumps({"term": term}) + "\n")
        self.journal.term = term

    def _save_problems(self, problems: list[dict[str, Any]]) -> None:
        """The evaluation's problems in their order, so that tools.evaluate can ask the same."""
        if problems:
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            lines = "".join(dump(row) + "\n" for row in problems)
            (folder / "problems.jsonl").write_text(lines, encoding="utf-8")

    def _summarize(self) -> None:
        """The end, for tools and for supervisors: from now on nobody brings an actor back."""
        if self.end is None:
            return
        finished = self.head.finished.get(0)
        summary = {
            "code": self.end.code,
            "sentence": self.end.sentence,
            "versions": self.head.version,
            "eta": self.head.gate.eta,
            "seconds": round(time.monotonic() - self.began, 3),
            "max_trained_token_lag": self.head.max_lag,
            "batches_without_signal": self.alerts.n_without_signal,
            "evaluations": self.head.figures,
            "scores": self.head.rollouts.failures.n,
            "scores_failed": self.head.rollouts.failures.n_failed,
            "drained": self.head.is_draining,
            "term": self.head.terms.term,
            "checkpoint": self._checkpoint(),
            "model": finished.model if finished else "",
        }
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _checkpoint(self) -> str:
        """That a later start of a drained run goes on from, by what is on disk; else the last written. "": none."""
        finished = self.head.finished.get(0)
        if self.end is not None and not self.end.code and (self.head.is_draining or finished is None):
            return newest_checkpoint(self.folder, self.head.version)
        return finished.checkpoint if finished else ""

    def _say_how_it_ended(self) -> None:
        """For people; a bad end is said by the error that this process ends with."""
        if self.samples is not None:
            self.samples.close()
        if self.end is not None and not self.end.code:
            for line in self._report():
                self.progress.say(line)

    def _report(self) -> list[str]:
        head, results, seconds = self.head, self.head.results, time.monotonic() - self.began
        age = f"oldest trained token {head.max_lag} behind" if head.max_lag is not None else "no token was trained"
        what = "drained" if head.is_draining else "done"
        took = f", {clock(seconds)} since the head came back" if head.life else f" in {clock(seconds)}"
        lines = ["", f"{what}: {head.version} versions{took}, {age} (eta {head.gate.eta})"]
        for name in ("before", "after"):
            accuracy = head.figures.get(name, {}).get("accuracy")
            if accuracy is not None:
                lines.append(f"held-out accuracy {name}: {accuracy:.3f}")
        if "before" in results and "after" in results:
            lines.extend(comparison(results["before"], results["after"]))
        finished = head.finished.get(0)
        if finished is not None and finished.model:
            lines.append(f"model: {finished.model}")
        if head.is_draining:
            if not (found := self._checkpoint()).endswith(f"-{head.version:06d}") and head.version:
                base = found or "the beginning"
                lines.append(f"version {head.version} has no frontier or no checkpoint on disk: goes on from {base}")
            lines.append(f"to go on: the same command line with --resume {self.folder}")
        lines.extend(f"{alert.level}: {alert.text}" for alert in self.alerts.end())
        lines.append(f"run: {self.folder}   (python -m tools.samples {self.folder} shows what the model wrote)")
        return lines


def next_term(folder: Path) -> int:
    """The number of the first term of this head's life: 0, or one more than any that a head of this run began.

    Raises CheckpointError for a file that does not say it: a guess that is too small would bring a lost term back.
    """
    path = folder / TERM_FILE
    try:
        newest = json.loads(path.read_text())["term"]
        if type(newest) is int and newest >= 0:
            return newest + 1
        why = f"its term is {newest!r}"
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise CheckpointError(
        f'{path} must say {{"term": N}}, the newest term of this run: {why}; write it anew with the largest "term" in '
        "the head's journal (head-*.jsonl), or a larger one, and resume"
    )


def write_whole(path: Path, text: str) -> None:
    """The old file or the new one, whatever happens; the new one for good once this returns."""
    fresh = path.with_name(f".{path.name}.tmp")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def check_data(config: Config, order: RowOrder) -> None:
    """Raises ConfigError when no batch can ever be full, and short ones are not wanted."""
    data = config.data
    if data.drop_last and order.total is not None and order.total < data.batch_size:
        raise ConfigError(
            f"no batch can ever be full: data.batch_size is {data.batch_size}, and data.total_train_epochs passes give "
            f"{order.total} prompts; lower data.batch_size or set data.drop_last = false"
        )
