"""Runs the samples of leased prompts: drives each episode on the engine and builds its trajectory."""

import hashlib
import json
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from actors.data.fields import SOURCE, UNREAD
from actors.engines.protocol import Done, Engine, Request, SamplingControls
from actors.runtime.context import dump
from actors.runtime.user_code import describe, known_fields, place_of, trace_of
from actors.runtime.user_failures import Failures
from actors.workflows.episode_runner import Asked, Awaited, EpisodeRun, Wish, roles_of
from actors.workflows.protocol import Workflow
from areal_bus.config.rollout import GenerationConfig
from areal_bus.config.sections import Config
from areal_bus.config.stages import has_one_limit, sampling_of, settings_by_stage
from areal_bus.core.events import Event
from areal_bus.core.parts.stages import in_force
from areal_bus.errors import ConfigError, EngineError, PromptTooLong, SettingRefused, WorkflowError
from areal_bus.foreign_text import text_of
from areal_bus.messages import ATTEMPTS, Partial, Prompt, Refund, SampleFailed, Trajectory
from areal_bus.sample_fields import packed
from areal_bus.storage.journal import Journal
from areal_bus.wire import codec

Key = tuple[str, int, int, int]  # evaluation, uid, attempt, sample
Group = tuple[str, int, int]  # evaluation, uid, attempt
Outcome = Trajectory | SampleFailed


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of a stage and source, or of an evaluation, are drawn."""

    gconfig: GenerationConfig
    controls: SamplingControls


@dataclass(slots=True)
class LiveSample:
    """One sample in progress."""

    run: EpisodeRun
    row: dict[str, Any]
    seed: tuple[int, ...]
    lease: str  # id of its lease
    sampling: Sampling
    began: float  # monotonic
    begun: Partial | None = None  # its first tokens, from another generator
    n_reported: int = 0  # tokens reported to the head
    awaits: Awaited | None = None  # an event outside the engine
    n_prompt: int = 0  # tokens of the prompts of its turns so far
    n_reused: int | None = None  # of these the engine computed no keys; None: it does not say


@dataclass(frozen=True, slots=True)
class RolloutLog:
    """The name of a generator, its journal and its failures."""

    name: str  # of the generator, in each trajectory
    journal: Journal
    failures: Failures | None = None  # records failures and successes of the workflow


class RolloutRunner:
    """Owns the live episodes of one generator."""

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        tokenizer: Any,
        config: Config,
        log: RolloutLog,
    ) -> None:
        self._engine, self._workflow, self._tokenizer = engine, workflow, tokenizer
        self._config, self._name, self._journal, self._failures = config, log.name, log.journal, log.failures
        self._by_stage = settings_by_stage(config)
        self._sampling: dict[tuple[int, str, str], Sampling] = {}  # by stage, source, evaluation
        self._is_one = has_one_limit(config)
        self._live: dict[Key, LiveSample] = {}
        self._begun: dict[Key, Partial] = {}  # partial rollouts whose prompt follows
        self._forget = getattr(engine, "forget", lambda episode: None)  # several versions: the episode has ended
        self._continues = getattr(engine, "continues", lambda spans: True)
        self.term = 0  # stamped on every complete trajectory

    @property
    def n_live(self) -> int:
        return len(self._live)

    def begin(self, prompt: Prompt) -> Iterator[Outcome]:
        """Start the samples of a group. Yields samples that end at once; a failed group yields one SampleFailed."""
        begun, self._begun = self._begun, {}
        for sample in prompt.samples:
            key = (prompt.evaluation, prompt.uid, prompt.attempt, sample)
            if key in self._live:  # a repeated prompt
                continue
            row = json.loads(prompt.row)  # of its own: a workflow may change it
            sampling = self._sampling_of(prompt, row)
            run = self._run(key, row, sampling.gconfig)
            seed = (self._config.run.seed, evaluation_number(prompt.evaluation), prompt.uid, sample)
            live = LiveSample(run, row, seed, prompt.lease, sampling, time.monotonic(), begun=begun.get(key))
            self._live[key] = live
            evaluation = {"evaluation": prompt.evaluation} if prompt.evaluation else {}
            outcome = self._advance(key, run.start)
            done = {"n_done": live.n_reported} if live.n_reported else {}
            ids = {"uid": prompt.uid, "sample": sample, "attempt": prompt.attempt}
            self._journal.write(Event.REQUEST, **ids, **evaluation, **done)
            if outcome is not None:
                yield outcome
            if isinstance(outcome, SampleFailed):
                return

    def _sampling_of(self, prompt: Prompt, row: dict[str, Any]) -> Sampling:
        begun = list(self._by_stage)[in_force(list(self._by_stage), prompt.born)]
        key = begun, str(row.get(SOURCE, "")), prompt.evaluation
        if key not in self._sampling:
            gconfig = sampling_of(self._by_stage[begun], *key[1:])
            self._sampling[key] = Sampling(gconfig, SamplingControls(**gconfig.controls()))
        return self._sampling[key]

    def _run(self, key: Key, row: dict[str, Any], gconfig: GenerationConfig) -> EpisodeRun:
        evaluation, uid, attempt, sample = key
        of = f" of evaluation {evaluation!r}" if evaluation else ""
        name = f"uid {uid} sample {sample} attempt {attempt}{of}"
        return EpisodeRun(self._workflow, row, self._tokenizer, name=name, gconfig=gconfig)

    def add_partial(self, partial: Partial) -> None:
        """Add the first tokens of a sample whose prompt follows."""
        self._begun["", partial.uid, partial.attempt, partial.sample] = partial

    def clear_partials(self) -> None:
        """Drop the added partial rollouts: their prompt does not follow."""
        self._begun.clear()

    def partials(self, *, at_least: int, anew: bool = False) -> Iterator[Partial]:
        """Yield training samples in their first turn with at least this many unreported tokens (`anew`: tokens)."""
        for key, live in self._live.items():
            if key[0] or live.run.n_turns != 1:
                continue
            done = self._engine.so_far((*key, 0))
            if done is not None and len(done.ids) - (0 if anew else live.n_reported) >= at_least:
                live.n_reported = len(done.ids)
                yield self._partial(key, live, done)

    def _partial(self, key: Key, live: LiveSample, done: Done) -> Partial:
        given = live.run.ids
        return Partial(
            uid=key[1],
            sample=key[3],
            attempt=key[2],
            term=self.term,
            segments=[[len(given), len(done.ids)]],
            spans=done.spans,
            ids=np.asarray(given + done.ids, dtype="<i4").tobytes(),
            logps=np.asarray(done.logps, dtype="<f4").tobytes(),
            lease=live.lease,
        )

    def step(self) -> Iterator[Outcome]:
        """Run one or more decode steps. Yields the samples that end."""
        for completion in self._engine.step():
            key = completion.key[:4]
            if key in self._live:  # a failure in its group may have cancelled it
                live = self._live[key]
                if completion.n_reused is not None:
                    live.n_reused = (live.n_reused or 0) + completion.n_reused
                outcome = self._advance(key, partial(live.run.answer, completion))
                if outcome is not None:
                    yield outcome

    @property
    def is_idle(self) -> bool:
        """All live samples wait for events outside the engine that have not occurred."""
        return all(live.awaits is not None for live in self._live.values()) and not self.can_go_on

    @property
    def can_go_on(self) -> bool:
        """The event that a live sample waits for has occurred."""
        return any(live.awaits is not None and live.awaits.ready() for live in self._live.values())

    @property
    def is_midway(self) -> bool:
        """A live sample has tokens and waits for an event outside the engine."""
        return any(live.awaits is not None and live.run.logps for live in self._live.values())

    def go_on(self) -> Iterator[Outcome]:
        """Resume samples whose external event has occurred. Yields the samples that end."""
        for key in [key for key, live in self._live.items() if live.awaits is not None and live.awaits.ready()]:
            if key in self._live:
                outcome = self._advance(key, self._live[key].run.go_on)
                if outcome is not None:
                    yield outcome

    def cancel(self, evaluation: str, uid: int, attempt: int) -> None:
        for key in [key for key in self._live if key[:3] == (evaluation, uid, attempt)]:
            live = self._live.pop(key)
            if live.run.n_turns:
                self._engine.abort((*key, live.run.n_turns - 1))
            live.run.close()
            self._forget(key)

    def cancel_all(self) -> None:
        for group in {key[:3] for key in self._live}:
            self.cancel(*group)

    def lost(self, keeps: Callable[[int | None], bool]) -> set[Group]:
        """Groups with a sample whose tokens belong to a lost timeline."""
        return {key[:3] for key, live in self._live.items() if not keeps(self._newest(key, live))}

    def _newest(self, key: Key, live: LiveSample) -> int | None:
        """Version of the sample's last token (versions never decrease, I5); None before the first token."""
        asked = self._engine.newest((*key, live.run.n_turns - 1)) if live.run.n_turns else None
        return live.run.spans[-1][0] if asked is None and live.run.spans else asked

    def _advance(self, key: Key, resume: Callable[[], Wish]) -> Outcome | None:
        """Resume the episode. Returns its trajectory when it has ended, or SampleFailed when it cannot continue."""
        live = self._live[key]
        live.awaits = None
        try:
            wish = resume()
            while wish is not None:
                if isinstance(wish, Asked):
                    rejection = self._submit(key, live, wish)
                    if rejection is None:
                        return None
                    wish = live.run.reject(rejection)
                elif wish.ready():
                    wish = live.run.go_on()
                else:
                    live.awaits = wish
                    return None
            return self._finish(key)
        except ConfigError:
            raise  # an invalid config stops the run
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001  user code: the group is refunded with the text (I3)
            reason = Refund.PROMPT_TOO_LONG if isinstance(error, PromptTooLong) else Refund.SAMPLING_ERROR
            text = text_of(error) if reason == Refund.PROMPT_TOO_LONG else self._fail(key, error)
            self.cancel(*key[:3])
            return SampleFailed(uid=key[1], attempt=key[2], evaluation=key[0], reason=str(reason), error=text)

    def _fail(self, key: Key, error: BaseException) -> str:
        """Record the failure and return its text. Raises UserCodeFailed when the workflow never succeeds.

        A generator whose engine fails is paused by the head.
        """
        is_of_engine = isinstance(error, EngineError) and not isinstance(error, SettingRefused)
        place, trace = place_of(error), ""
        if isinstance(error, WorkflowError):
            place, trace = place or error.place or self._live[key].run.place, error.trace
        text = describe(error, place) + known_fields(error, self._live[key].row, self._live[key].row.get(UNREAD, {}))
        if place and self._failures is not None:
            about = f"{self._live[key].run.name}"
            self._failures.note(
                group=(key[0], key[1]),
                about=about,
                place=place,
                error=text,
                trace=trace or trace_of(error),
                counts=key[2] % ATTEMPTS == 0 and not is_of_engine,
            )
        return text

    def _submit(self, key: Key, live: LiveSample, asked: Asked) -> EngineError | None:
        """Submit a request. Returns the engine's error when it cannot hold the request."""
        try:
            self._engine.submit(self._request(key, live, asked))
            live.n_prompt += len(asked.ids)
        except EngineError as error:
            return error
        return None

    def _request(self, key: Key, live: LiveSample, asked: Asked) -> Request:
        own = live.sampling.gconfig
        max_new_tokens = asked.max_new_tokens or own.max_new_tokens
        if not self._is_one:  # a workflow knows the largest limit only
            max_new_tokens = min(max_new_tokens, own.max_new_tokens)
        done = self._done(live.begun, asked.ids, max_new_tokens) if live.begun is not None else None
        live.begun, live.n_reported = None, live.n_reported if done is None else len(done.ids)
        return Request(
            key=(*key, live.run.n_turns - 1),
            ids=asked.ids,
            seed=(*live.seed, *live.run.branch),
            max_new_tokens=max_new_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            done=done,
            controls=self._controls(asked, live.sampling.controls, max_new_tokens),
        )

    def _controls(self, asked: Asked, own: SamplingControls, max_new_tokens: int) -> SamplingControls:
        """Those of the call, else the sample's own: its least length yields to the budget, and to the call's limit."""
        if asked.controls is not None and self._is_one:
            return asked.controls
        controls = asked.controls or own
        return replace(controls, min_new_tokens=min(controls.min_new_tokens, max_new_tokens))

    def _done(self, begun: Partial, ids: list[int], max_new_tokens: int) -> Done | None:
        """The tokens of another generator for a first turn; None when they cannot be continued here."""
        known = np.frombuffer(begun.ids, dtype="<i4").tolist()
        newest, held = begun.spans[-1][0], self._engine.version
        is_same = known[: len(ids)] == ids and begun.segments[0][0] == len(ids)
        if not is_same or held is None or newest > held or begun.n_sampled >= max_new_tokens:  # I5
            return None
        if not self._continues(begun.spans):  # of a version that this engine does not hold
            return None
        return Done(known[len(ids) :], np.frombuffer(begun.logps, dtype="<f4").tolist(), begun.spans)

    def _finish(self, key: Key) -> Trajectory:
        trajectory = self._trajectory(key)  # first: what the workflow has added to the row may be no JSON
        codec.check(trajectory)  # the text of an episode may be larger than a message
        live, (evaluation, uid, attempt, sample) = self._live.pop(key), key
        run = live.run
        self._forget(key)
        if self._failures is not None:
            self._failures.note_success()
        self._journal.write(
            Event.COMPLETION,
            uid=uid,
            sample=sample,
            attempt=attempt,
            **({"evaluation": evaluation} if evaluation else {}),
            n_tokens=len(run.logps),
            finish=run.finish,
            versions=[number for span in run.spans for number in span],
            **({"n_forgotten": run.n_forgotten} if run.n_forgotten else {}),
            **({"n_prompt": live.n_prompt, "n_reused": live.n_reused} if live.n_reused is not None else {}),
        )
        return trajectory

    def _trajectory(self, key: Key) -> Trajectory:
        live = self._live[key]
        run, (evaluation, uid, attempt, sample) = live.run, key
        assert run.episode is not None
        return Trajectory(
            uid=uid,
            sample=sample,
            attempt=attempt,
            evaluation=evaluation,
            generator=self._name,
            finish=run.finish,
            segments=run.segments,
            spans=run.spans,
            seconds=time.monotonic() - live.began,
            term=self.term,
            ids=np.asarray(run.ids, dtype="<i4").tobytes(),
            logps=np.asarray(run.logps, dtype="<f4").tobytes(),
            prompt_text=run.prompt_text(),
            text=run.episode.text,
            row=dump({**live.row, **run.episode.row}),
            turns=dump(run.turns()) if run.n_turns > 1 else "",
            fields=packed({name: values.tobytes() for name, values in run.fields.items()}),
            lease=live.lease,
            trajectories=run.trajectories if any(run.trajectories) else [],
            roles=roles_of(run.episode),
        )


def evaluation_number(evaluation: str) -> int:
    """0 for training, a different number for each evaluation, so that seeds never collide."""
    if not evaluation:
        return 0
    return 1 + int.from_bytes(hashlib.blake2b(evaluation.encode(), digest_size=7).digest(), "little")
