"""Several versions at once: every trajectory is the one that an engine of its version alone samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.adapter_engine import with_adapters
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.builtin.versions import VersionedEngine
from actors.engines.protocol import Completion, Done, Request
from actors.models.lora import BASE_DIGEST, base_digest
from areal_bus.config.sections import Config
from areal_bus.errors import EngineError
from tests.actors.engines.builtin.test_engine import STOP, engine, llama, request, run_all, weights

N_SETS = 3
SETS = [weights(llama(seed)) for seed in range(N_SETS)]
MOST, N_SLOTS = 3, 4
OPTIONS = EngineOptions(n_slots=N_SLOTS)


def made(model: Any, *, most: int = MOST, version: int | None = 0) -> VersionedEngine:
    make = partial(BuiltinEngine, options=OPTIONS, stop_ids=STOP)
    found = VersionedEngine(model, make, n_slots=N_SLOTS, most=most)
    if version is not None:
        found.update(version, tensors(version))
    return found


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in SETS[version % N_SETS].items()}


def alone(asked: Request, version: int) -> Completion:
    """The completion by an engine of this version alone."""
    (found,) = run_all(engine(llama(version % N_SETS), asked, version=version)).values()
    return found


def check(found: Completion, asked: Request, *, is_whole: bool = True) -> int:
    """Its one version; its tokens are those of that version, or the first of them."""
    ((version, n),) = found.spans
    expected = alone(asked, version)
    assert n == len(found.ids)
    assert found.ids == expected.ids[:n]
    assert n == len(expected.ids) or not is_whole
    assert found.logps == pytest.approx(expected.logps[:n], abs=1e-4)
    return version


@dataclass
class Story:
    """A versioned engine, and what its user knows of it."""

    running: VersionedEngine = field(default_factory=lambda: made(llama(0)))
    live: dict[tuple[Any, ...], Request] = field(default_factory=dict)
    begun_with: dict[int, int] = field(default_factory=dict)  # uid -> version of its first turn
    n_begun: int = 0
    n_pushed: int = 0

    def begin(self) -> None:
        uid = self.n_begun = self.n_begun + 1
        self.submit(request(uid, [2 + uid % 30, 5, 7], n=3 + 5 * (uid % 4)))

    def submit(self, asked: Request) -> None:
        self.running.submit(asked)
        self.live[asked.key] = asked

    def push(self) -> None:
        if not self.running.hold():
            self.n_pushed += 1
            for reusable in self.running.update(self.n_pushed, tensors(self.n_pushed)).values():
                reusable.fill_(torch.nan)  # as by the next push

    def step(self) -> None:
        for done in self.running.step():
            asked = self.live.pop(done.key)
            version, uid = check(done, asked), asked.key[1]
            assert self.begun_with.setdefault(uid, version) == version
            if uid % 2 and not asked.key[4]:  # a second turn
                more = replace(asked, key=(*asked.key[:4], 1), ids=[*asked.ids, *done.ids, 3], max_new_tokens=4)
                self.submit(more)
            else:
                self.running.forget(asked.key[:4])

    def abort(self) -> None:
        if self.live:
            key, asked = self.live.popitem()
            done = self.running.abort(key)
            assert done is not None
            if done.ids:
                check(done, asked, is_whole=False)
            self.running.forget(key[:4])

    def look(self) -> None:
        running = self.running
        assert running.version == self.n_pushed == running.versions[-1]
        assert len(running.versions) + (running._spare is not None) <= MOST
        assert running.n_live == len(self.live)
        assert running.versions == sorted(running.versions)
        for key in self.live:
            so_far = running.so_far(key)
            assert so_far is None or len(so_far.spans) == 1
            assert running.newest(key) == (None if so_far is None else so_far.spans[0][0])


STEPS = st.lists(st.sampled_from(["begin", "begin", "push", "step", "step", "step", "abort"]), max_size=40)


@settings(max_examples=15)
@given(STEPS)
def test_a_trajectory_is_that_of_its_first_version_whatever_is_pushed_meanwhile(steps: list[str]) -> None:
    story = Story()
    for name in steps:
        getattr(story, name)()
        story.look()
    while story.live:
        story.step()
    assert not story.running.hold()
    assert len(story.running.versions) == 1  # the others are released


def test_an_update_waits_for_room_and_goes_on_at_new_weights_without_it() -> None:
    running, asked = made(llama(0), most=2), [request(uid, [3, 4, 5], n=30) for uid in range(2)]
    for version, one in enumerate(asked):
        running.submit(one)
        running.step()
        assert running.hold() == bool(version)
        if not version:
            running.update(1, tensors(1))
    first, n = running.so_far(asked[0].key), running.n_tokens
    running.update(2, tensors(2))  # all the same: the oldest goes on at the new weights
    running.step()
    now = running.so_far(asked[0].key)
    assert first is not None
    assert now is not None
    assert now.ids[: len(first.ids)] == first.ids
    assert [version for version, _ in now.spans] == [0, 2]
    assert running.n_tokens == n + 2
    assert running.newest(asked[1].key) == 1


def test_a_newer_term_ends_all_versions_and_tokens_of_a_held_one_go_on_there() -> None:
    running, long = made(llama(0)), request(1, [3, 4, 5], n=20)
    running.submit(long)
    running.step()
    running.update(1, tensors(1))
    taken = alone(replace(long, max_new_tokens=5), 0)
    assert running.continues([[0, 5]])
    assert not running.continues([[5, 5]])
    assert not running.continues([[0, 2], [1, 3]])
    continued = replace(
        request(1, [3, 4, 5], sample=1, n=20), seed=long.seed, done=Done(taken.ids, taken.logps, [[0, 5]])
    )
    running.submit(continued)
    running.step()
    assert running.newest(continued.key) == 0
    running.pause()
    assert not running.step()
    running.update(0, tensors(2), term=1)
    running.step()
    assert running.versions == [0]
    with pytest.raises(EngineError, match="versions never go back"):
        running.update(7, tensors(0), term=0)
    with pytest.raises(EngineError, match="weights mismatch"):
        running.update(1, {}, term=1)


def test_adapters_of_a_version_stay_until_its_trajectory_has_ended() -> None:
    lora: dict[str, Any] = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    config = Config.model_validate({"actor": {"lora": lora}, "data": {"task": "sums"}})

    def opened() -> Any:
        model = llama(0)
        return with_adapters(made(model, version=None), model, config, base_on=torch.device("cpu"), is_live=True)

    def push(running: Any, version: int) -> None:
        draw, digest = torch.Generator().manual_seed(version), {BASE_DIGEST: base_digest(weights(llama(0)))}
        forms: Mapping[str, torch.Tensor] = running.parameters()
        running.update(version, {n: torch.randn(form.shape, generator=draw) / 4 for n, form in forms.items()} | digest)

    several, asked = opened(), [request(uid, [3, 4, 5], n=12) for uid in range(2)]
    done: dict[int, Completion] = {}
    for version in range(2):
        push(several, version)
        several.submit(asked[version])
        done |= {completion.key[1]: completion for completion in several.step()}
    done |= {key // 100: completion for key, completion in run_all(several).items()}
    for uid, found in done.items():
        one = opened()
        push(one, uid)
        one.submit(asked[uid])
        (expected,) = run_all(one).values()
        assert (found.ids, found.spans) == (expected.ids, [[uid, len(expected.ids)]])
        assert found.logps == pytest.approx(expected.logps, abs=1e-4)
