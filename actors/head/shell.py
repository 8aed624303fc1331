"""The head actor: runs `areal_bus.core.head` and carries out its effects. No torch, so that it stays responsive."""

import json
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from actors.data.loading import load_sets
from actors.data.source import make_source
from actors.head.alerts import Alerts
from actors.head.checkpoint_writer import HeadCheckpointWriter, newest_checkpoint
from actors.head.console import Console, clock, comparison
from actors.head.sample_log import SampleLog
from actors.head.stall_monitor import StallMonitor
from actors.models.model_config import sample_limits
from actors.runtime import process
from actors.runtime.context import Context, HeartbeatState, LoopTicker, collect_seldom, dump, journal_rejections
from actors.runtime.stages import stages_of
from areal_bus import messages as m
from areal_bus.config.capacity import capacity, slots
from areal_bus.config.sections import Config
from areal_bus.config.stages import own_of_set, sampling_of
from areal_bus.core.effects import Discard, Divide, Effect, End, EvictForGood, Keep, Mark, Progress, Record, Save, Send
from areal_bus.core.evaluation import EvaluationSet, best, history, name_of
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.split import RankPool
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.split_planner import PlannerRules
from areal_bus.core.rules import HeadRules
from areal_bus.core.state import HeadState, Phase
from areal_bus.errors import ActorFailed, ConfigError, EndpointTaken
from areal_bus.process.commands import as_here
from areal_bus.storage import run_files
from areal_bus.storage.atomic_file import write_atomic
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus, BusOptions, Heartbeats


def rules_of(context: Context, config: Config, sets: Mapping[str, list[dict[str, Any]]]) -> HeadRules:
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
        max_refill=config.data.max_refill,
        drop_last=config.data.drop_last,
        drop_long_prompts=config.data.long_prompts == "drop",
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_keep=config.checkpoint.keep,
        evaluate_before=config.evaluate.before,
        evaluate_after=config.evaluate.after,
        evaluate_every=config.evaluate.every_steps,
        evaluate_share=EVALUATE_SHARE,
        evaluate_metric=config.evaluate.metric,
        evaluate_metric_set=config.evaluate.metric_set,
        evaluate_patience=config.evaluate.early_stop_patience,
        on_collapse=config.watch.on_collapse,
        evaluation_sets=evaluation_sets(config, sets),
        lease_secret=context.lease_secret.encode(),
        on_timeout=declared(config.reward.on_timeout),
        on_error=declared(config.reward.on_error),
        partial_groups=config.reward.partial_groups,
        compares=bool(config.reward.group),
        stages=stages_of(config),
        max_restarts=config.launch.max_restarts,
        capacity=capacity(config),
        limits=sample_limits(config, context.model_folder),
        context_parallel=config.actor.context_parallel,
        schedule=config.topology.adapt.schedule,
    )


def with_split(rules: HeadRules, run: Path) -> HeadRules:
    """The rules with the split that holds now, where it may change. Raises CheckpointError."""
    found = run_files.read_split(run)
    if found is None:
        return rules
    pool, split = found
    return replace(rules.in_split(split), pool=pool)


def planner_rules(config: Config, pool: RankPool | None) -> PlannerRules | None:
    """Rules of the head's planner; None where it is off. `pool`: the ranks that may change; None: the split stays."""
    adapt = config.topology.adapt
    if not adapt.every_steps:
        return None
    generators_at: dict[int, int] = {}
    if pool is not None:
        generators_at = {n: pool.generators_at(n) for n in pool.choices()}
    return PlannerRules(
        every_steps=adapt.every_steps,
        total_steps=config.run.total_train_steps,
        eta=config.rollout.max_head_offpolicyness,
        generators_at=generators_at,
        slots=slots(config),
    )


def evaluation_sets(config: Config, sets: Mapping[str, list[dict[str, Any]]]) -> tuple[EvaluationSet, ...]:
    """`sets`: the problems of each set by its name."""
    found = []
    for name, rows in sets.items():
        own = own_of_set(config, name).get("max_new_tokens")
        n_samples = sampling_of(config, "", f"before:{name}").n_samples
        found.append(EvaluationSet(name, n_samples, tuple(map(dump, rows)), own))
    return tuple(found)


def declared(policy: float | str) -> float | None:
    """The reward that the config declares for a failed score; None for "refund"."""
    return None if isinstance(policy, str) else policy


TICK_S = (0.1, 0.5)  # shortest and longest interval of the checks of silences and deadlines
TICKS = 40  # of them in bus.silent_s: each wakes the head, whatever it has to do
MAX_EFFECTS = 256  # effects, or messages, that are decided before they are carried out
CHECKPOINTS_S = 60.0  # longest wait for pending head checkpoints
EVALUATE_SHARE = 0.25  # of each generator's slots, for an evaluation in training (eta > 0); at least one problem's
BIND_S = 1.0  # between two tries of a restarted head to listen
SUMMARY_S, RETRY_S = 5.0, 1.0  # longest wait for room for the summary, and the time between two tries
EVICTED_FILE = "evicted.json"


def run(context: Context) -> None:
    """Serve until the run ends. Raises ActorFailed when the run failed."""
    config = context.config()
    journal = context.journal(config)
    shell = Shell(context, config, journal)
    bus = open_bus(context, config, shell)
    collect_seldom()
    try:
        shell.serve(bus)
    finally:
        bus.close(linger_s=2.0)
        journal.close(**({} if shell.end is None else {"code": shell.end.code, "reason": shell.end.sentence}))
    if shell.end is not None and shell.end.code:
        raise ActorFailed(shell.end.sentence)


def open_bus(context: Context, config: Config, shell: "Shell") -> Bus:
    """The head's bus. A taken port is tried for launch.timeout_s, then ConfigError; after a restart EndpointTaken."""
    deadline = time.monotonic() + (config.launch.timeout_s if context.incarnation else 0.0)
    while True:
        try:
            return Bus(
                "head",
                job=context.job,
                listen=context.head,
                heartbeats=Heartbeats(shell.heartbeat, every_s=config.bus.heartbeat_s),
                keys=context.keyring(),
                options=BusOptions(reports_disconnects=True),
            )
        except EndpointTaken as error:
            if not context.incarnation:
                raise ConfigError(str(error)) from None
            if time.monotonic() > deadline:
                raise
            logger.warning("{}: tries again", error)
            time.sleep(BIND_S)
            shell.ticker.tick()


class Shell:
    """The head's loop: receives messages, lets the head decide, carries out the effects."""

    def __init__(self, context: Context, config: Config, journal: Journal) -> None:
        self.config = config
        self.folder, self.job = Path(context.run_folder), context.job
        self.journal = journal
        self.heartbeat_state = HeartbeatState()
        self.ticker = LoopTicker()
        self.end: End | None = None
        self.began = time.monotonic()
        self.sample_log = SampleLog(self.folder, tokens=config.journal.tokens) if config.journal.samples else None
        self.console = Console(
            total_steps=config.run.total_train_steps, sources=[one.label for one in config.data.source]
        )
        self.alerts = Alerts(config)
        source = make_source(config, context.config_folder)
        sets = load_sets(config, context.config_folder)
        self._save_problems(sets)
        self.checkpoints = HeadCheckpointWriter(self.folder / "frontiers")
        rules = with_split(rules_of(context, config, sets), self.folder)
        rules = replace(rules, planner=planner_rules(config, rules.pool))
        self.pool = rules.pool
        self.state = HeadState(
            rules if rules.lease_secret else replace(rules, lease_secret=secrets.token_bytes(16)),
            source,
            incarnation=context.incarnation,
            term=run_files.next_term(self.folder),
            checkpoints=self.checkpoints.load(),
            savepoints=self.checkpoints.waypoints(),
        )
        self.state.remember(run_files.read_rollback(self.folder))
        self.state.evicted.update(evicted_for_good(self.folder, context.job))
        self.head = Head(self.state, now=time.monotonic())
        self.stall_monitor = StallMonitor(config.watchdog, heartbeat_s=config.bus.heartbeat_s)

    def heartbeat(self) -> m.HeadHeartbeat:
        """The published version, sent to every member. Called on the bus thread."""
        return m.HeadHeartbeat(term=self.state.terms.term, version=self.state.gate.v, life=self.state.incarnation)

    def serve(self, bus: Bus) -> None:
        """Handle messages and ticks until the head ends the run."""
        next_tick = time.monotonic()
        tick_s = min(max(self.config.bus.silent_s / TICKS, TICK_S[0]), TICK_S[1])
        while self.end is None:
            self.ticker.tick()
            self.journal.mark("wait")
            got = bus.receive(max(0.001, next_tick - time.monotonic()))
            self.journal.mark("decide")
            if got is not None:
                self._carry_out(bus, self._decide(bus, got))
            now = time.monotonic()
            if now >= next_tick:
                journal_rejections(bus, self.journal)
                for checkpoint in self.checkpoints.saved():
                    self.state.terms.saved(checkpoint)
                self._carry_out(bus, self.head.tick(now, until=bus.until))
                self._carry_out(bus, self.stall_monitor.look(self.head, now))
                if process.drain_requested():
                    self._carry_out(bus, self.head.drain(now))
                next_tick = now + tick_s
        self._print_report()

    def _decide(self, bus: Bus, first: tuple[str, m.Message]) -> list[Effect]:
        """Decide on `first` and the messages behind it, until an effect needs more than a send or a journal line."""
        effects: list[Effect] = []
        got: tuple[str, m.Message] | None = first
        n_left = MAX_EFFECTS  # a bound for messages without effects, too: deadlines must not wait
        while got is not None:
            decided = self.head.on(*got, time.monotonic())
            if isinstance(got[1], m.Checkpointed):  # of a version that may have been evaluated meanwhile
                self._note_best()
            effects += decided
            n_left -= max(1, len(decided))
            goes_on = n_left > 0 and all(isinstance(effect, Send | Record | Keep) for effect in decided)
            got = bus.receive(0) if goes_on else None
        return effects

    def _carry_out(self, bus: Bus, effects: list[Effect]) -> None:
        """Carry out effects in order, except that journal lines are flushed before the messages decided with them are
        sent, and the summary is on disk before any Stop is sent. A head that dies in between finds the run over.
        """
        ends = any(isinstance(effect, End) for effect in effects)
        pending: list[Send] = []
        stops: list[Send] = []
        for effect in effects:
            if isinstance(effect, Send):
                (stops if ends and isinstance(effect.message, m.Stop) else pending).append(effect)
            elif isinstance(effect, Save | Discard):
                self._send_pending(bus, pending)
                self.checkpoints.do(effect)
            elif isinstance(effect, Mark):
                self._send_pending(bus, pending)
                self.checkpoints.mark(effect.savepoint)
            elif isinstance(effect, Divide):
                self._send_pending(bus, pending)
                self._divide(effect)
            elif isinstance(effect, EvictForGood):
                self._send_pending(bus, pending)
                self._evict(effect)
            elif isinstance(effect, Record):
                if effect.event is Event.TERM:
                    self._send_pending(bus, pending)
                    self._begin_term(effect.fields["term"], effect.fields["version"])
                if effect.event is Event.COLLAPSE and effect.fields["action"] == "rollback" and self.state.rollback:
                    self._send_pending(bus, pending)
                    run_files.write_rollback(self.folder, self.state.rollback)
                self.journal.keep(effect.event, **effect.fields)
                if effect.event is Event.UPDATE or (effect.event is Event.EVALUATION and self._keeps_figures):
                    self.heartbeat_state.report_progress()
            elif isinstance(effect, Keep):
                self.alerts.keep(effect)
                if self.sample_log is not None:
                    self.sample_log.keep(effect)
            elif isinstance(effect, Progress):
                self.console.on(effect.kind, effect.fields)
                if effect.kind == "evaluation":
                    self._note_best()
                if effect.kind == "step":
                    for alert in self.alerts.step(effect.fields):
                        self.console.on("alert", {"level": alert.level, "text": alert.text})
                        self.journal.keep(Event.NOTE, level=alert.level, text=alert.text)
            else:
                self.end = effect
        self._send_pending(bus, pending)
        if ends:
            self.checkpoints.close(CHECKPOINTS_S)
            self._summarize()
        for stop in stops:
            bus.send(stop.to, stop.message)

    @property
    def _keeps_figures(self) -> bool:
        """Whether the next head knows the evaluations of this one. Verdicts of open prompts and problems are lost."""
        return self.state.phase in (Phase.BEFORE, Phase.TRAINING)

    def _send_pending(self, bus: Bus, pending: list[Send]) -> None:
        """Send the pending messages, after the journal lines decided with them."""
        self.journal.flush()
        if self.sample_log is not None:
            self.sample_log.flush()
        if pending:
            bus.send_all((send.to, send.message) for send in pending)
        pending.clear()

    def _begin_term(self, term: int, version: int) -> None:
        """Write the term to disk before it is announced: two heads must never begin the same term."""
        self.checkpoints.settle(CHECKPOINTS_S, version=version)
        write_atomic(self.folder / run_files.TERM_FILE, json.dumps({"term": term}) + "\n")
        self.journal.term = term
        self._note_best()  # evaluations after `version` do not count any more

    def _divide(self, effect: Divide) -> None:
        """The checkpoint that the next learners begin from, then the split that supervisors and the next head read."""
        self.checkpoints.save_now(effect.checkpoint)
        if self.pool is not None:
            run_files.write_split(self.folder, self.pool, effect.split)

    def _evict(self, effect: EvictForGood) -> None:
        """The next head of this start awaits the others only. A later start has all generators again."""
        text = json.dumps({"job": self.job, "generators": list(effect.generators)}) + "\n"
        try:
            write_atomic(self.folder / EVICTED_FILE, text)
        except OSError as error:
            logger.warning("a restarted head will await the generators that are evicted for good: {}", error)

    def _note_best(self) -> None:
        """Write RUN/best.json, and RUN/best, for checkpoint.keep_best."""
        if self.config.checkpoint.keep_best:
            metric, name = self.config.evaluate.metric, self.config.evaluate.metric_set
            try:
                run_files.write_best(self.folder, metric, history(name, metric, self.state.figures, with_ends=True))
            except OSError as error:
                logger.warning("checkpoint.keep_best: {} was not written: {}", self.folder / "best.json", error)

    def _save_problems(self, sets: Mapping[str, list[dict[str, Any]]]) -> None:
        """Save each set's problems in order, so that tools.evaluate can use the same ones."""
        for name, problems in sets.items():
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            lines = "".join(dump(row) + "\n" for row in problems)
            file = folder / (f"problems-{name}.jsonl" if name else "problems.jsonl")
            try:
                file.write_text(lines, encoding="utf-8")
            except OSError as error:
                logger.warning("tools.evaluate will not have the problems of this run: {}", error)

    def _summarize(self) -> None:
        """Write RUN/summary.json for tools and supervisors: no actor is restarted after this."""
        if self.end is None:
            return
        finished = self.state.terms.finished.get(0)
        summary = {
            "job": self.job,  # supervisors may still see the summary of the last start
            "code": self.end.code,
            "sentence": self.end.sentence,
            "versions": self.state.version,
            "eta": self.state.gate.eta,
            "seconds": round(time.monotonic() - self.began, 3),
            "max_trained_token_lag": self.state.max_lag,
            "batches_without_signal": self.alerts.n_without_signal,
            "evaluations": self.state.figures,
            "scores": self.state.score_failures.n,
            "scores_failed": self.state.score_failures.n_failed,
            "drained": self.state.is_draining,
            "term": self.state.terms.term,
            "checkpoint": self._checkpoint(),
            "model": finished.model if finished else "",
        }
        self._keep_summary(json.dumps(summary, indent=2) + "\n")

    def _keep_summary(self, text: str) -> None:
        """Write it, trying again for SUMMARY_S. Without it, the supervisors end with the head's exit code."""
        path, deadline = self.folder / "summary.json", time.monotonic() + SUMMARY_S
        while True:
            try:
                write_atomic(path, text)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    logger.warning("the summary was not written: the run ends without it: {}", error)
                    return
                logger.warning("cannot write the summary, trying again: {}: {}", path, error)
            self.checkpoints.drop_waypoints()  # a run that is over needs none, and a full disk needs their space
            time.sleep(RETRY_S)

    def _checkpoint(self) -> str:
        """The checkpoint from which a drained run resumes, else the last one written; "" if there is none."""
        finished = self.state.terms.finished.get(0)
        if self.end is not None and not self.end.code and (self.state.is_draining or finished is None):
            return newest_checkpoint(self.folder, self.state.version)
        return finished.checkpoint if finished else ""

    def _print_report(self) -> None:
        """Print the report of a successful run. A failed run ends with this process's error instead."""
        if self.sample_log is not None:
            self.sample_log.close()
        if self.end is not None and not self.end.code:
            for line in self._report():
                self.console.print(line)

    def _report(self) -> list[str]:
        state, results, seconds = self.state, self.state.results, time.monotonic() - self.began
        age = f"oldest trained token {state.max_lag} behind" if state.max_lag is not None else "no token was trained"
        what = "drained" if state.is_draining else "done"
        took = f", {clock(seconds)} since the head restarted" if state.incarnation else f" in {clock(seconds)}"
        if self.end is not None and self.end.sentence.startswith("stopped"):
            what = self.end.sentence
        lines = ["", f"{what}: {state.version} versions{took}, {age} (eta {state.gate.eta})"]
        lines.extend(accuracy_lines(state))
        lines.extend(best_lines(state))
        if "before" in results and "after" in results:
            lines.extend(comparison(results["before"], results["after"]))
        finished = state.terms.finished.get(0)
        if finished is not None and finished.model:
            lines.append(f"model: {finished.model}")
        if self.config.checkpoint.keep_best and (best_model := self.folder / run_files.BEST_LINK).exists():
            lines.append(f"best model: {best_model}")
        if state.is_draining:
            if not (found := self._checkpoint()).endswith(f"-{state.version:06d}") and state.version:
                base = found or "the beginning"
                lines.append(
                    f"version {state.version} has no complete checkpoint on disk: a resumed run starts at {base}"
                )
            lines.append(f"to resume: the same command line with --resume {shlex.quote(str(self.folder))}")
        lines.extend(f"{alert.level}: {alert.text}" for alert in self.alerts.end())
        show = as_here(f"python -m tools.samples {shlex.quote(str(self.folder))}")
        lines.append(f"run: {self.folder}   ({show} shows what the model wrote)")
        return lines


def accuracy_lines(state: HeadState) -> list[str]:
    """The accuracy of each set before and after the run, with the standard error where a set has a name."""
    lines = []
    for problems in state.rules.evaluation_sets:
        for when in ("before", "after"):
            figures = state.figures.get(name_of(when, problems), {})
            if (accuracy := figures.get("accuracy")) is None:
                continue
            of = f" of {problems.name}" if problems.name else ""
            error = figures.get("avg_at_k_se") if problems.name else None
            bound = "" if error is None else f" (standard error {error:.3f})"
            lines.append(f"held-out accuracy{of} {when}: {accuracy:.3f}{bound}")
    return lines


def best_lines(state: HeadState) -> list[str]:
    """The best evaluation of each set, by evaluate.metric."""
    lines, metric = [], state.rules.evaluate_metric
    for problems in state.rules.evaluation_sets:
        values = history(problems.name, metric, state.figures, with_ends=True)
        if (found := best(values)) is not None:
            of = f" of {problems.name}" if problems.name else ""
            lines.append(f"best {metric}{of} in {len(values)} evaluations: {found[1]:.4f} at version {found[0]}")
    return lines


def evicted_for_good(folder: Path, job: str) -> list[int]:
    """Generators, by index, that an earlier head of this start has evicted for good."""
    try:
        found = json.loads((folder / EVICTED_FILE).read_text(encoding="utf-8"))
        return [int(index) for index in found["generators"]] if found["job"] == job else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
