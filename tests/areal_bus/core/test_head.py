"""The head's rules over whole rings, and what it answers to single events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages as m
from areal_bus.core.effects import Effect, End, Progress, Record, Save, Send
from areal_bus.core.evaluation import due, history
from areal_bus.core.events import Event
from areal_bus.core.head import ALL_RECORDED, Head
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint
from areal_bus.core.parts.sample_limits import NO_LIMITS, SampleLimits
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.rows import Row
from areal_bus.core.state import HeadState
from areal_bus.messages import Refund, Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Numbers, Scenario, ScenarioLengths, Tail

SHAPES = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(StalenessPolicy),
        "batch_size": st.integers(1, 4),
        "eta": st.integers(0, 3),
        "n_samples": st.integers(2, 3),
        "n_generators": st.integers(1, 3),
        "total_steps": st.integers(1, 8),
    }
)


def scenario(**changes: object) -> Scenario:
    standard: dict[str, object] = {
        "seed": 1,
        "policy": StalenessPolicy.MASK,
        "batch_size": 2,
        "eta": 1,
        "n_samples": 2,
        "total_steps": 6,
    }
    return Scenario(**(standard | changes))  # type: ignore[arg-type]


def ring_of(**changes: object) -> Ring:
    ring = Ring(scenario(**changes))
    ring.records = []
    return ring


def finish(ring: Ring) -> Ring:
    """Run to an orderly end without a violation."""
    outcome = ring.run()
    assert not outcome.violations
    assert outcome.end is not None
    assert outcome.end.code == 0
    return ring


def lines(ring: Ring, event: Event) -> list[dict[str, object]]:
    return [record.fields for _, record in ring.records or () if record.event is event]


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6))
def test_a_ring_trains_its_steps_and_ends(shape: dict[str, int], seed: int) -> None:
    ring = finish(ring_of(seed=seed, **shape))
    assert ring.head.state.gate.u == ring.head.state.gate.v == shape["total_steps"]
    assert len(ring.witness.samples_trained) == shape["total_steps"] * shape["batch_size"] * shape["n_samples"]
    assert ring.head.state.gate.is_idle


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6), n_rows=st.integers(1, 9), drop_last=st.booleans())
def test_the_end_of_the_data_ends_the_run(shape: dict[str, int], seed: int, n_rows: int, drop_last: bool) -> None:
    ring = finish(ring_of(seed=seed, **shape | {"total_steps": 50}, n_rows=n_rows, drop_last=drop_last))
    full, rest = divmod(n_rows, shape["batch_size"])
    assert ring.head.state.gate.u == full + (1 if rest and not drop_last else 0)
    reasons = {line["reason"] for line in lines(ring, Event.REFUND)} - {"too_old"}
    assert reasons == ({"end_of_data"} if rest and drop_last else set())


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6), every=st.integers(1, 3))
def test_every_due_version_is_evaluated_or_merged_and_never_trained(
    shape: dict[str, int], seed: int, every: int
) -> None:
    ring = finish(ring_of(seed=seed, n_problems=3, evaluate_every=every, **shape))
    state, steps = ring.head.state, shape["total_steps"]
    told = [str(line["name"]) for line in lines(ring, Event.EVALUATION)]
    assert len(told) == len(set(told)) == len(state.results)
    assert {"before", "before:small", "after", "after:small"} <= set(told)
    assert state.results["after"].version == steps
    assert len(ring.witness.samples_trained) == steps * shape["batch_size"] * shape["n_samples"]
    due = list(range(every, steps, every))
    begun = {name: state.results[name].version for name in told if name.startswith("step-")}
    assert all(int(name.partition(":")[0].removeprefix("step-")) in due for name in begun)
    if shape["eta"] == 0:  # each is pinned
        assert begun == {f"step-{v}{of}": v for v in due for of in ("", ":small")}
        assert all(
            {version for scored in result.scored.values() for version, _ in scored.spans} == {result.version}
            for result in state.results.values()
        )


@pytest.mark.parametrize("every", [2, 4, 5])
def test_a_version_that_was_evaluated_at_the_end_is_not_evaluated_again_when_the_run_is_extended(every: int) -> None:
    """Of 6 updates, 2 divides them: version 6 is due in training, too."""
    state = finish(ring_of(n_problems=3, evaluate_every=every)).head.state
    last, sets = state.terms.checkpoints[6], state.rules.evaluation_sets
    assert last.results["step-6"] == {**state.figures["after"], "name": "step-6"}
    assert last.results["step-6:small"]["n"] == state.figures["after:small"]["n"]
    assert not {"after", "after:small"} & last.results.keys()  # the extended run has an end of its own
    if every == 2:
        assert due(6, every=every, sets=sets, figures=last.results) is None
    assert history("", "reward", last.results)[-1] == (6, state.figures["after"]["reward"])


@pytest.mark.parametrize("eta", [0, 2])
def test_a_run_stops_early_when_its_metric_does_not_improve(eta: int) -> None:
    ring = ring_of(seed=2, eta=eta, n_problems=3, evaluate_every=2, evaluate_patience=2, total_steps=60)
    outcome = ring.run()
    assert not outcome.violations
    assert outcome.end is not None
    assert outcome.end.code == 0
    gate, values = ring.head.state.gate, history("", "reward", ring.head.state.figures)
    assert gate.u == gate.v < 60
    assert max(values[:-2], key=lambda value: value[1])[1] >= max(value for _, value in values[-2:])
    assert f"stopped at version {gate.u}, because reward did not improve in 2 evaluations" in outcome.end.sentence
    assert len(ring.witness.samples_trained) == gate.u * 2 * 2


def test_a_killed_job_that_is_resumed_evaluates_no_version_twice() -> None:
    for seed in range(8):
        faults = (Fault("kill", Role.HEAD, 0, 25.0 + 4 * seed, 5.0), Fault("crash", Role.HEAD, 0, 70.0 + seed, 2.0))
        ring = finish(
            ring_of(seed=seed, n_problems=3, evaluate_every=2, checkpoint_every=1, faults=faults, calm_s=120.0, eta=2)
        )
        figures = ring.head.state.figures
        assert {"after", "after:small"} <= figures.keys()
        assert all(f["version_last"] is None or f["version_last"] <= 6 for f in figures.values())  # type: ignore[operator]


def test_a_reward_that_never_works_ends_the_job_with_its_error() -> None:
    ring = ring_of(p_error=1.0)
    outcome = ring.run()
    assert outcome.end is not None
    assert outcome.end.code == 1
    assert "no value" in outcome.end.sentence
    assert "reward_" in outcome.end.sentence
    assert not ring.witness.samples_trained


def test_rows_dropped_too_old_are_issued_again_at_most_three_times() -> None:
    tail = ScenarioLengths(Tail.PARETO, 2.0, 1.1, 2000)
    ring = finish(ring_of(policy=StalenessPolicy.DROP, eta=1, batch_size=1, total_steps=120, lengths=tail, seed=3))
    refunds = [line for line in lines(ring, Event.REFUND) if line["reason"] == "too_old"]
    issues = {line["uid"]: line["issue"] for line in lines(ring, Event.ADMIT)}
    assert refunds
    assert all(line["again"] == (issues[line["uid"]] < 3) for line in refunds)
    assert all(line["n_scored"] == 2 and line["n_tokens_dropped"] > 0 and line["age"] > 1 for line in refunds)
    assert {0, 1} <= set(issues.values()) <= {0, 1, 2, 3}


# single events, with a clock that stands still

LENGTH = 3


def head_with(
    n_generators: int = 1,
    *,
    secret: bytes = b"",
    capacity: int | None = None,
    limits: SampleLimits = NO_LIMITS,
    **changes: object,
) -> tuple[Head, list[Effect]]:
    """A head whose ring is complete and whose generators hold version 0; and its effects so far."""
    rules = replace(scenario(n_generators=n_generators, **changes).rules, lease_secret=secret)
    head = Head(HeadState(replace(rules, capacity=capacity, limits=limits), Numbers(None)), now=0.0)
    return head, assemble(head, *(f"generator-{i}.0" for i in range(n_generators)))


def joined(head: Head, *names: str, now: float = 0.0, capacity: int = 4, again: int = 0) -> list[Effect]:
    """These join and are ready."""
    effects: list[Effect] = []
    for name in names:
        role, index, incarnation = name.replace(".", "-").split("-")
        endpoint = "" if role == "generator" else name
        effects += head.on(name, m.Join(name, role, int(index), int(incarnation), endpoint, 1, "", again), now)
        effects += head.on(name, m.Ready(capacity), now)
    return effects


def assemble(head: Head, *generators: str, learner: str = "learner-0.0") -> list[Effect]:
    """One of each role and these generators join; the learner begins at version 0, and everybody holds it."""
    effects = joined(head, learner, "reward-0.0", *generators)
    effects += head.on(learner, m.BeginTerm(0, "digest 0", head.state.incarnation), 0.0)
    for name in (learner, *generators):
        effects += push_done(head, name, 0)
    return effects


def push_done(head: Head, name: str, version: int) -> list[Effect]:
    push = head.state.pushes.current
    assert push is not None
    return head.on(name, m.PushDone(push.id, version, f"digest {version}", 0.0, 0.0), 0.0)


def scored(uid: int, sample: int, attempt: int = 0, version: int = 0, generator: str = "generator-0.0") -> m.Scored:
    return m.Scored(
        status="value", reward=1.0, correct=None, error="", score_s=0.0, uid=uid, sample=sample, attempt=attempt,
        evaluation="", generator=generator, finish="stop", segments=[[1, LENGTH]], spans=[[version, LENGTH]],
        seconds=0.0, term=0, ids=b"", logps=bytes(4 * LENGTH), prompt_text="", text="",
    )  # fmt: skip


def sent(effects: list[Effect], kind: type) -> list[tuple[str, m.Message]]:
    return [(x.to, x.message) for x in effects if isinstance(x, Send) and isinstance(x.message, kind)]


def records(effects: list[Effect], event: Event) -> list[dict[str, Any]]:
    """Fields of the lines of this event."""
    return [x.fields for x in effects if isinstance(x, Record) and x.event is event]


def refused(effects: list[Effect]) -> list[str]:
    return [line["why"] for line in records(effects, Event.REFUSED)]


def end_of(effects: list[Effect]) -> End | None:
    return next((x for x in effects if isinstance(x, End)), None)


def warnings(effects: list[Effect]) -> list[str]:
    return [x.fields["text"] for x in effects if isinstance(x, Progress) and x.kind == "warning"]


def test_an_incomplete_ring_names_its_missing_members() -> None:
    head = Head(HeadState(scenario().rules, Numbers(None)), now=0.0)
    head.on("learner-0.0", m.Join("learner-0.0", "learner", 0, 0, "x", 1, ""), 0.0)
    head.tick(2000.0)
    assert head.state.phase == "stopping"
    head = Head(HeadState(scenario().rules, Numbers(None)), now=0.0)
    (end,) = [effect for effect in head.tick(2000.0) if hasattr(effect, "sentence")]
    assert "reward-0 has not joined" in end.sentence


def test_the_first_failed_verdict_is_warned_of_and_its_group_cancelled() -> None:
    head, _ = head_with()
    effects = head.on("reward-0.0", replace(scored(0, 0), status="timeout", error="over 2 s"), 1.0)
    assert warnings(effects) == ["prompt 0 ended untrained, reward_timeout: over 2 s"]
    assert [to for to, _ in sent(effects, m.Cancel)] == ["generator-0.0", "reward-0.0"]


def test_a_late_message_is_journalled_without_a_warning() -> None:
    """A prompt may close while its sample is on its way; one that never was is somebody's mistake."""
    head, _ = head_with()
    head.on("reward-0.0", replace(scored(0, 0), status="error"), 1.0)
    late = head.on("generator-0.0", m.Sampled(0, 0, 0, "", LENGTH), 1.0)
    wrong = head.on("generator-0.0", m.Sampled(10**6, 0, 0, "", LENGTH), 1.0)
    assert refused(late) == ["only an open prompt is sampled; prompt 0 is closed"]
    assert [x.kind for x in late if isinstance(x, Progress)] == ["late"]
    assert refused(wrong) == ["only an open prompt is sampled; prompt 1000000 was never admitted"]
    (note,) = [x for x in wrong if isinstance(x, Progress)]
    assert note.kind == "note"
    assert "(1 so far)" in note.fields["text"]


def test_an_illegal_message_is_journalled_after_any_number_of_late_ones() -> None:
    head, _ = head_with()
    head.on("reward-0.0", replace(scored(0, 0), status="error"), 1.0)
    late = [head.on("generator-0.0", m.Sampled(0, 0, 0, "", LENGTH), 1.0) for _ in range(ALL_RECORDED + 1)]
    assert refused(late[-2])
    assert not refused(late[-1])
    assert refused(head.on("generator-0.0", m.Sampled(10**6, 0, 0, "", LENGTH), 1.0))


def test_a_generator_that_sampled_alone_has_all_its_room_on_reconnect() -> None:
    head, _ = head_with(n_generators=2)
    member = head.state.members.by_name["generator-0.0"]
    member.alone = True
    head.requeue(member.name, 1.0)
    head.on(member.name, m.Heartbeat(9, 0, ""), 2.0)
    assert (member.standing, member.load, member.room) == ("stale", 0, member.capacity)


@pytest.mark.parametrize("version", [-1, 5])
def test_a_sample_of_an_impossible_version_ends_its_group(version: int) -> None:
    head, _ = head_with()
    effects = head.on("reward-0.0", scored(0, 0, version=version), 0.0)
    assert "versions never decrease" in refused(effects)[0]
    assert [(x["uid"], x["reason"]) for x in records(effects, Event.REFUND)] == [(0, Refund.SAMPLING_ERROR)]


@pytest.mark.parametrize("width", [1, 2])
def test_a_batch_needs_every_learner_rank_to_ask(width: int) -> None:
    rules = replace(scenario(n_learners=2, batch_size=1, n_samples=1).rules, context_parallel=width)
    head = Head(HeadState(rules, Numbers(None)), now=0.0)
    joined(head, "learner-1.0")
    assemble(head, "generator-0.0")
    head.on("learner-1.0", m.BatchRequest(0), 0.0)
    assert not sent(head.on("reward-0.0", scored(0, 0), 0.0), m.ShardEnd)
    effects = head.on("learner-0.0", m.BatchRequest(0), 0.0)
    assert sorted(to for to, _ in sent(effects, m.ShardEnd)) == ["learner-0.0", "learner-1.0"]
    assert [to for to, _ in sent(effects, m.ShardItem)] == ["learner-0.0", "learner-1.0"][:width]
    assert len({(item.uid, item.sample) for _, item in sent(effects, m.ShardItem)}) == 1  # type: ignore[union-attr]
    # rank 1 is quick: it asks for the next batch before rank 0 has said that the update is done
    assert not sent(head.on("learner-1.0", m.BatchRequest(1), 0.0), m.ShardEnd)
    assert refused(head.on("learner-1.0", m.BatchRequest(0), 0.0))


def test_the_root_is_notified_at_once_of_a_member_that_died_in_its_push() -> None:
    head, _ = head_with(n_generators=2, batch_size=1, n_samples=1)
    head.on("reward-0.0", scored(0, 0), 0.0)
    head.on("learner-0.0", m.BatchRequest(0), 0.0)
    effects = head.on("learner-0.0", m.UpdateDone(1, {}, "digest 1"), 0.0)
    begin = sent(effects, m.PushBegin)[0][1]
    assert isinstance(begin, m.PushBegin)
    assert begin.members == ["generator-0.0", "generator-1.0"]
    push_done(head, "generator-0.0", 1)
    join = m.Join("generator-1.1", "generator", 1, 1, "", 2, "")
    told = sent(head.on("generator-1.1", join, 1.0), m.PushBroken)
    assert told == [("learner-0.0", m.PushBroken(begin.push, 1, "generator-1.0 is dead"))]
    assert not sent(head.on("generator-0.1", m.Join("generator-0.1", "generator", 0, 1, "", 2, ""), 1.0), m.PushBroken)
    head.on("learner-0.0", m.PushBroken(begin.push, 1, "called off"), 1.0)
    assert head.state.gate.v == 1


# what is known of the lives before


BEFORE: dict[str, str | int | float | None] = {"name": "before", "version": 0, "accuracy": 0.5}


def evaluated() -> Head:
    """A head that has just evaluated before the first step."""
    head, effects = head_with(n_problems=1)
    problems = [message for _, message in sent(effects, m.Prompt) if message.evaluation]  # type: ignore[union-attr]
    assert {problem.evaluation for problem in problems} == {"before"}  # type: ignore[union-attr]
    for sample in (0, 1):
        effects = head.on("reward-0.0", replace(scored(0, sample), evaluation="before"), 1.0)
    (saved,) = [effect.checkpoint for effect in effects if isinstance(effect, Save)]
    assert (saved.version, saved.results["before"]["n"]) == (0, 2)
    assert str(head.state.phase) == "training"
    return head


def test_a_term_that_begins_at_version_0_again_does_not_evaluate_again() -> None:
    head = evaluated()
    figures = dict(head.state.figures)
    joined(head, "learner-0.1", now=2.0)
    effects = head.on("learner-0.1", m.BeginTerm(0, "digest 0"), 2.0)
    for name in ("learner-0.1", "generator-0.0"):
        effects += push_done(head, name, 0)
    assert head.state.figures == figures
    assert figures.keys() == {"before"}
    assert str(head.state.phase) == "training"
    prompts = [message for _, message in sent(effects, m.Prompt)]
    assert {prompt.evaluation for prompt in prompts} == {""}  # type: ignore[union-attr]


def test_a_head_that_comes_back_at_version_0_does_not_evaluate_again() -> None:
    kept = evaluated().state.terms.checkpoints[0]
    assert (kept.next_uid, kept.open, kept.results.keys()) == (0, (), {"before"})
    rules = scenario(n_generators=1, n_problems=1).rules
    head = Head(HeadState(rules, Numbers(None), incarnation=1, term=1, checkpoints={0: kept}), now=0.0)
    assemble(head, "generator-0.0", learner="learner-0.1")
    assert str(head.state.phase) == "training"
    assert head.state.evaluations.open is None


def test_a_resumed_run_drained_before_any_join_reports_its_version() -> None:
    frontiers = {**START, 4: HeadCheckpoint(4, next_uid=8, position=8, results={"before": BEFORE})}
    head = Head(HeadState(scenario().rules, Numbers(None), incarnation=1, term=1, checkpoints=frontiers), now=0.0)
    assert end_of(head.drain(1.0)) == End(0, "drained at version 4")
    assert (head.state.version, head.state.figures) == (4, {"before": BEFORE})


class ChangedRow(Numbers):
    """A loader whose second row differs."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(None)
        self._changes = changes

    def draw(self) -> Row | None:
        drawn = super().draw()
        return replace(drawn, **self._changes) if drawn is not None and drawn.row == 1 else drawn


def with_changed_row(eta: int, **changes: Any) -> tuple[Head, list[Effect]]:
    """A head that has leased the first rows."""
    rules = scenario(n_generators=1, batch_size=3, n_samples=1, eta=eta).rules
    head = Head(HeadState(rules, ChangedRow(**changes)), now=0.0)
    return head, assemble(head, "generator-0.0") + head.tick(0.0)


def test_an_admission_has_the_digest_of_a_row_that_has_one() -> None:
    _, effects = with_changed_row(1, digest="5f3a")
    assert [line.get("row_digest") for line in records(effects, Event.ADMIT)[:3]] == [None, "5f3a", None]


@pytest.mark.parametrize("eta", [0, 1])
def test_a_row_larger_than_a_message_is_refunded_with_its_reason_and_the_next_one_is_leased(eta: int) -> None:
    head, effects = with_changed_row(eta, text="x" * (m.MAX_TEXT_BYTES + 1))
    [refund] = records(effects, Event.REFUND)
    assert (refund["uid"], refund["reason"]) == (1, Refund.PROMPT_TOO_LONG)
    assert refund["error"] == "a row of the data has at most 8388608 bytes as JSON; this one has 8388609"
    assert [prompt.uid for _, prompt in sent(effects, m.Prompt) if isinstance(prompt, m.Prompt)][:2] == [0, 2]
    assert not head.state.gate.live - len(head.state.ledger.open)
