"""The rules that every engine keeps, held against each (docs/engines.md).

The builtin engine and the simulated one in the default suite; a real SGLang server by `make test-sglang`, as it is and
as an older one would be used (which can neither stand still nor stamp its tokens); a real vLLM server by
`make test-vllm`. An engine of your own by `areal-bus check-engine module:function`, which sets AREAL_BUS_ENGINE.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.engines.protocol import PLAIN, Request, SamplingControls
from actors.models.loading import load_tokenizer
from areal_bus.errors import EngineError
from tests.servers.engines import (
    EOS,
    POSITIONS,
    Builtin,
    Imagined,
    Running,
    Servers,
    Simulated,
    Users,
    distributions,
    model,
    model_folder,
    raw_logits,
    weights,
    worst,
)

EXACT = 1e-4
USERS = os.environ.get("AREAL_BUS_ENGINE")


class Rig:
    """An engine to be tried: `open` makes one, without weights; `models` are those of versions 0, 1, ..."""

    def __init__(
        self, engines: Builtin | Simulated | Servers | Users, models: dict[int, Any], **abilities: bool
    ) -> None:
        self._engines, self.models, self._abilities = engines, models, abilities
        self.is_server = engines.is_server
        self.refuses_changed_logits = isinstance(engines, Servers) and engines.kind == "sglang"
        self._tokenizer = load_tokenizer(str(engines.folder))

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def open(
        self, on_update: str = "recompute", *, stops: bool = False, **settings: float
    ) -> AbstractContextManager[Running]:
        """`settings`: of gconfig, where a server must be started for them. `stops`: texts end, for the model STOPS."""
        if on_update == "keep" and self._abilities:
            pytest.skip("a server that cannot stand still or stamp keeps no sample under way")
        if isinstance(self._engines, Simulated):
            return self._engines.open(on_update, stops=stops)
        return self._engines.open(on_update, **settings, **self._abilities)  # type: ignore[arg-type]

    @contextmanager
    def serving(self, requests: Iterable[Request], *args: str, version: int = 0, **settings: Any) -> Iterator[Running]:
        """An engine at that version that has these requests."""
        with self.open(*args, **settings) as running:
            self.update(running, version)
            for request in requests:
                running.engine.submit(request)
            yield running

    def update(self, running: Running, version: int, *, term: int = 0, like: int | None = None) -> None:
        """`like`: the version whose model these weights are."""
        made = self.models[version if like is None else like]
        running.engine.update(version, weights(made), term=term)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[int, Any]]:
    folder = model_folder(tmp_path_factory.mktemp("engines") / "model")
    return folder, {seed: model(folder, seed, stops=seed == STOPS) for seed in range(STOPS + 1)}


STOPS = 4  # the model that ends its texts


@pytest.fixture(scope="module")
def sglang_servers(models: tuple[Any, dict[int, Any]]) -> Iterator[Servers]:
    started = Servers(models[0], "sglang")
    yield started
    started.close()


@pytest.fixture(scope="module")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, dict[int, Any]]]:
    """With models of their own: vLLM has no heads of 16 on CPU, and is done with a smaller one before it is asked."""
    folder = model_folder(tmp_path_factory.mktemp("vllm") / "model", hidden_size=512, heads=8, layers=8)
    started = Servers(folder, "vllm")
    yield started, {seed: model(folder, seed, stops=seed == STOPS) for seed in range(STOPS + 1)}
    started.close()


@pytest.fixture(
    params=[
        "builtin",
        *(["user's"] if USERS else []),
        "simulated",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("sglang without stamps", marks=pytest.mark.sglang),
        pytest.param("sglang without pause and stamps", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ]
)
def rig(request: pytest.FixtureRequest, models: tuple[Any, dict[int, Any]]) -> Rig:
    folder, made = models
    if request.param == "builtin":
        return Rig(Builtin(folder), made)
    if request.param == "user's":
        return Rig(Users(folder, str(USERS)), made)
    if request.param == "simulated":
        return Rig(Simulated(folder), {seed: Imagined(made[seed], stops=seed == STOPS) for seed in made})
    if request.param == "vllm":
        return Rig(*request.getfixturevalue("vllm_servers"))
    servers = request.getfixturevalue("sglang_servers")
    lacks = {"stamps": False} if "without" in request.param else {}
    return Rig(servers, made, **lacks | ({"pauses": False} if "pause" in request.param else {}))


def ask(uid: int, *, sample: int = 0, n: int = 64, ids: list[int] | None = None, **more: Any) -> Request:
    given = {"temperature": 1.0, "top_p": 1.0, "turn": 0, **more}
    key = ("", uid, 0, sample, given["turn"])
    prompt = [5 + uid % 20, 6, 7] if ids is None else ids
    controls = given.get("controls", PLAIN)
    return Request(key, prompt, (7, uid, sample), n, given["temperature"], given["top_p"], controls=controls)


def mixed(n: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, two samples of each, at three temperatures."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 31, (1 + 29 * i % 60,), generator=generator).tolist() for i in range(6)]
    return [
        ask(i, sample=s, n=n + 7 * i, ids=ids, temperature=[1.0, 0.7, 1.3][(i + s) % 3])
        for i, ids in enumerate(prompts)
        for s in range(2)
    ]


def test_tokens_log_probs_and_versions_stay_and_are_those_of_the_stamped_version_across_updates(rig: Rig) -> None:
    requests, known = mixed(90), []
    with rig.serving(requests) as running:
        for version in (1, 2, 3):
            running.tokens(150)
            known += [(r.key, running.engine.so_far(r.key), running.engine.newest(r.key)) for r in requests]
            rig.update(running, version)
        ended = running.all()
    assert len(ended) == len(requests)
    assert max(worst(request, ended[request.key], rig.models) for request in requests) < EXACT
    assert max(len(completion.spans) for completion in ended.values()) >= 2
    stamped = {key: [version for version, n in completion.spans for _ in range(n)] for key, completion in ended.items()}
    assert all(versions == sorted(versions) for versions in stamped.values())
    said = [(key, done, newest) for key, done, newest in known if done is not None]
    assert said
    for key, done, newest in said:
        n = len(done.ids)
        assert (done.ids, done.logps) == (ended[key].ids[:n], pytest.approx(ended[key].logps[:n], abs=1e-6))
        assert [version for version, m in done.spans for _ in range(m)] == stamped[key][:n]
        assert newest is None or newest >= done.spans[-1][0]


def test_an_engine_of_ones_own_is_opened_by_its_name(models: tuple[Any, dict[int, Any]]) -> None:
    """It passes everything on to the builtin one."""
    own = Rig(Users(models[0], "tests.support.own_engine:open_it"), models[1])
    test_tokens_log_probs_and_versions_stay_and_are_those_of_the_stamped_version_across_updates(own)


def test_an_aborted_sample_continues_from_its_finished_tokens(rig: Rig) -> None:
    request = ask(0, n=100)
    with rig.serving([request]) as running:
        running.until(lambda: running.engine.so_far(request.key) is not None)
        done = running.engine.so_far(request.key)
        assert done is not None
        aborted = running.engine.abort(request.key)
        assert aborted is not None
        assert (aborted.finish, aborted.ids[: len(done.ids)]) == ("abort", done.ids)
        assert running.engine.n_live == 0
        rig.update(running, 1)
        running.engine.submit(replace(request, done=done))
        (completion,) = running.all().values()
    n = len(done.ids)
    assert completion.ids[:n] == done.ids
    assert completion.logps[:n] == pytest.approx(done.logps, abs=1e-6)
    assert completion.spans == [[0, n], [1, 100 - n]]
    assert worst(request, completion, rig.models) < EXACT


def test_samples_of_a_group_differ_and_keep_to_the_budget_of_their_request_over_an_update(rig: Rig) -> None:
    requests = [ask(0, sample=s, n=40 + s) for s in range(6)]
    with rig.serving(requests) as running:
        running.tokens(60)
        rig.update(running, 1)
        ended = running.all()
    assert [len(ended[request.key].ids) for request in requests] == [request.max_new_tokens for request in requests]
    assert {completion.finish for completion in ended.values()} == {"length"}
    assert len({tuple(completion.ids[:24]) for completion in ended.values()}) == 6


def test_abort_ends_one_sample_and_no_other(rig: Rig) -> None:
    requests = [ask(uid, n=200) for uid in range(4)]
    with rig.serving(requests) as running:
        running.tokens(4)
        assert running.engine.abort(requests[1].key) is not None
        assert running.engine.abort(requests[1].key) is None
        assert running.engine.n_live == 3
        ended = running.all()
    assert set(ended) == {requests[i].key for i in (0, 2, 3)}
    assert {len(completion.ids) for completion in ended.values()} == {200}


def test_nothing_is_sampled_without_weights(rig: Rig) -> None:
    request = ask(0, n=5)
    with rig.open() as running:
        running.engine.submit(request)
        assert [running.engine.step() for _ in range(5)] == [[]] * 5
        assert (running.engine.version, running.engine.n_tokens, running.engine.n_live) == (None, 0, 1)
        rig.update(running, 0)
        assert running.all()[request.key].spans == [[0, 5]]


def test_nothing_is_sampled_while_it_is_paused_and_a_sample_aborted_then_leaves_nothing(rig: Rig) -> None:
    """As after lost weights: the newer term begins at an older version."""
    first, lost, anew = ask(0, n=220), ask(1, n=220), ask(1, n=30)
    with rig.serving([first, lost], version=3) as running:
        running.until(lambda: running.engine.newest(lost.key) == 3)
        running.engine.abort(lost.key)
        running.engine.pause()
        running.engine.submit(anew)
        assert [running.engine.step() for _ in range(20)] == [[]] * 20
        rig.update(running, 1, term=1)
        ended = running.all()
    assert ended[anew.key].spans == [[1, 30]]
    assert ended[first.key].spans[0][1] < 220
    assert max(worst(request, ended[request.key], rig.models) for request in (first, anew)) < EXACT


def test_a_stop_token_is_the_last_one_and_no_other(rig: Rig) -> None:
    requests = [ask(uid, sample=s, n=60) for uid in range(4) for s in range(2)]
    with rig.serving(requests, version=STOPS, stops=True) as running:
        ended = running.all()
    assert {completion.finish for completion in ended.values()} >= {"stop"}
    for completion in ended.values():
        assert EOS not in completion.ids[:-1]
        assert (completion.ids[-1] == EOS) == (completion.finish == "stop")
    assert max(worst(request, ended[request.key], rig.models) for request in requests) < EXACT


def test_temperature_0_takes_the_likeliest_token_and_gives_its_plain_log_prob(rig: Rig) -> None:
    request = ask(0, n=20, temperature=0.0)
    with rig.serving([request]) as running:
        (completion,) = running.all().values()
    logps = distributions(rig.models[0], list(request.ids), completion.ids)
    assert logps.argmax(-1).tolist() == completion.ids
    assert worst(request, completion, rig.models) < EXACT


def test_a_nucleus_bounds_the_tokens_and_not_their_log_probs(rig: Rig) -> None:
    requests = [ask(uid, n=40, top_p=0.3) for uid in range(4)]
    with rig.serving(requests, top_p=0.3) as running:
        ended = running.all()
    assert max(worst(request, ended[request.key], rig.models) for request in requests) < EXACT
    for request in requests:
        p = distributions(rig.models[0], list(request.ids), ended[request.key].ids).exp()
        chosen = p.gather(-1, torch.tensor(ended[request.key].ids)[:, None])
        likelier = (p * (p > chosen + 1e-5)).sum(-1)
        assert float(likelier.max()) < 0.3 + 1e-3


def controlled(rig: Rig, controls: SamplingControls, *, n: int = 40, version: int = 0, **more: Any) -> list[Any]:
    """(request, completion) of eight samples; all log-probs are the model's own, whatever changes what is drawn.

    The updates in between show that the log-probs and the controls outlive them.
    """
    requests = [ask(uid, sample=s, n=n, controls=controls, **more) for uid in range(4) for s in range(2)]
    with rig.serving(
        requests, version=version, stops=version == STOPS, **({"top_p": 0.3} if controls.changes_sampling else {})
    ) as running:
        if version != STOPS:
            running.tokens(8)
            rig.update(running, 1)
        ended = running.all()
    assert len(ended) == len(requests)
    assert max(worst(request, ended[request.key], rig.models) for request in requests) < EXACT
    return [(request, ended[request.key]) for request in requests]


def logits_of(rig: Rig, request: Request, completion: Any) -> torch.Tensor:
    """(n, V), each row of the version stamped on its token."""
    stamped = [version for version, n in completion.spans for _ in range(n)]
    of = {v: raw_logits(rig.models[v], list(request.ids), completion.ids) for v in set(stamped)}
    return torch.stack([of[version][at] for at, version in enumerate(stamped)])


def test_top_k_and_min_p_bound_the_tokens_and_not_their_log_probs(rig: Rig) -> None:
    for request, completion in controlled(rig, SamplingControls(top_k=3), n=24):
        logits = logits_of(rig, request, completion)
        chosen = logits.gather(-1, torch.tensor(completion.ids)[:, None])
        assert int((logits > chosen + 1e-3).sum(-1).max()) < 3
    for request, completion in controlled(rig, SamplingControls(min_p=0.2), n=24):
        p = torch.softmax(logits_of(rig, request, completion), -1)
        chosen = p.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert bool((chosen >= 0.2 * p.amax(-1) - 1e-4).all())


def test_penalties_and_bias_decide_the_greedy_token_and_not_its_log_prob(rig: Rig) -> None:
    controls = SamplingControls(
        repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, logit_bias=((9, 2.5), (11, -100.0))
    )
    if rig.refuses_changed_logits:
        with rig.open() as running, pytest.raises(EngineError, match="log-probs are of logits after penalties"):
            running.engine.submit(ask(0, controls=controls))
        return
    for request, completion in controlled(rig, controls, temperature=0.0):
        logits = logits_of(rig, request, completion)
        for at, token in enumerate(completion.ids):
            row, before = logits[at], completion.ids[:at]
            row[9] += 2.5
            row[11] -= 100.0
            for seen in {*request.ids, *before}:
                row[seen] = row[seen] / 1.4 if row[seen] > 0 else row[seen] * 1.4
                row[seen] -= 0.9 * before.count(seen) + 0.7 * (seen in before)
            assert float(row.max() - row[token]) < 1e-3


def test_no_text_ends_before_its_least_length(rig: Rig) -> None:
    if rig.refuses_changed_logits:
        pytest.skip("this server's log-probs are of logits without the stop tokens")
    ended = controlled(rig, SamplingControls(min_new_tokens=17), n=60, version=STOPS)
    lengths = [len(completion.ids) for _, completion in ended]
    assert min(lengths) > 17
    assert {completion.finish for _, completion in ended} >= {"stop"}


def test_stop_token_ids_end_a_text_and_ignore_eos_goes_on(rig: Rig) -> None:
    stops = (7, 8, 9, 10, 12)
    for _, completion in controlled(rig, SamplingControls(stop_token_ids=stops), n=120):
        assert not set(completion.ids[:-1]) & {*stops, EOS}
        assert (completion.ids[-1] in stops) == (completion.finish == "stop")
    ended = controlled(rig, SamplingControls(ignore_eos=True), n=60, version=STOPS)
    assert {len(completion.ids) for _, completion in ended} == {60}
    assert any(EOS in completion.ids for _, completion in ended)
    for _, completion in controlled(rig, SamplingControls(ignore_eos=True, stop_token_ids=stops), n=60, version=STOPS):
        assert not set(completion.ids[:-1]) & set(stops)
        assert (completion.ids[-1] in stops) == (completion.finish == "stop")


def test_the_token_that_completes_a_stop_string_is_the_last_one(rig: Rig) -> None:
    stops = tuple(f"{a}{b}" for a in "ghijlm" for b in "abcdefghijklm")
    controls, finishes = SamplingControls(stop=stops), set()
    for _, completion in controlled(rig, controls, n=120):
        text = rig.text(completion.ids)
        if completion.finish == "stop" and completion.ids[-1] != EOS:
            assert text.endswith(stops)
        assert not any(stop in rig.text(completion.ids[:-1]) for stop in stops)
        finishes.add(completion.finish)
    assert "stop" in finishes


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
def test_a_new_request_uses_no_prefix_of_older_weights(rig: Rig, on_update: str) -> None:
    prompt = list(range(3, 31)) * 3
    with rig.serving([ask(0, ids=prompt, n=8)], on_update) as running:
        running.all()
        rig.update(running, 1)
        again = ask(1, ids=prompt, n=8)
        running.engine.submit(again)
        completion = running.all()[again.key]
    assert completion.spans == [[1, 8]]
    assert worst(again, completion, rig.models) < EXACT


def test_keep_goes_on_from_the_old_keys_and_stamps_the_new_version(rig: Rig) -> None:
    request = ask(0, n=220)
    with rig.serving([request], "keep") as running:
        running.tokens(10)
        rig.update(running, 1)
        (completion,) = running.all().values()
    (old, n), (new, m) = completion.spans
    assert (old, new, n + m) == (0, 1, 220)
    first = replace(completion, ids=completion.ids[:n], logps=completion.logps[:n], spans=[[0, n]])
    assert worst(request, first, rig.models) < EXACT
    assert worst(request, completion, rig.models) > 1e-2  # the keys are those of the old weights


def test_the_first_weights_of_a_newer_term_recompute_under_every_swap_mode(rig: Rig) -> None:
    request = ask(0, n=220)
    with rig.serving([request], "keep", version=2) as running:
        running.tokens(10)
        rig.update(running, 2, term=1, like=2)
        (completion,) = running.all().values()
    assert completion.spans == [[2, 220]]
    assert worst(request, completion, rig.models) < EXACT


def test_drain_begins_no_episode_and_ends_those_begun(rig: Rig) -> None:
    first, later, turn = ask(0, n=40), ask(1, n=5), ask(2, n=5, turn=1)
    with rig.serving([first], "drain") as running:
        running.tokens(1)
        assert running.engine.hold()
        running.engine.submit(later)
        running.engine.submit(turn)
        running.until(lambda: not running.engine.hold())
        assert set(running.ended) == {first.key, turn.key}
        rig.update(running, 1)
        ended = running.all()
    assert [ended[key.key].spans for key in (first, turn, later)] == [[[0, 40]], [[0, 5]], [[1, 5]]]


def test_versions_never_go_back_within_a_term(rig: Rig) -> None:
    request = ask(0, n=5)
    with rig.open() as running:
        rig.update(running, 2, term=1)
        for term in (0, 1):
            with pytest.raises(EngineError, match="never go back"):
                rig.update(running, 1 + 2 * (1 - term), term=term)
        assert running.engine.version == 2
        rig.update(running, 2, term=1)  # pushed again
        running.engine.submit(request)
        assert running.all()[request.key].spans == [[2, 5]]


def test_an_update_brings_every_weight_and_no_other(rig: Rig) -> None:
    request, others = ask(0, n=5), weights(rig.models[1])
    name, first = next(iter(others.items()))
    with rig.serving([]) as running:
        for spoiled in (dict(list(others.items())[1:]), others | {name: first[:-1]}):
            with pytest.raises(EngineError, match=r"weights of the model|every weight|shapes|is \("):
                running.engine.update(1, spoiled)
        running.engine.submit(request)
        completion = running.all()[request.key]
    assert completion.spans == [[0, 5]]
    assert worst(request, completion, rig.models) < EXACT


IMPOSSIBLE = [
    (ask(0, ids=[]), "at least one token"),
    (ask(0, n=0), "at least one new token"),
    (ask(0, temperature=-1.0), "temperature"),
    (ask(0, top_p=0.0), "top_p"),
    (ask(0, n=POSITIONS), "the model holds"),
    (ask(0, ids=[31]), "token ids are below"),
    (ask(0, ids=[-1]), "token ids are below"),
    (ask(0, controls=SamplingControls(top_k=-1)), "top_k"),
    (ask(0, controls=SamplingControls(min_p=1.5)), "min_p"),
    (ask(0, n=5, controls=SamplingControls(min_new_tokens=6)), "at most the budget"),
    (ask(0, controls=SamplingControls(top_k=2**70)), "top_k is from 0"),
    (ask(0, controls=SamplingControls(repetition_penalty=0.0)), "repetition_penalty"),
    (ask(0, controls=SamplingControls(repetition_penalty=1e-40)), "repetition_penalty is from 0.001 to 1000"),
    (ask(0, controls=SamplingControls(presence_penalty=float("nan"))), "presence_penalty is a number"),
    (ask(0, controls=SamplingControls(frequency_penalty=2.5)), "from -2 to 2"),
    (ask(0, controls=SamplingControls(stop=("",))), "at least one character"),
    (ask(0, controls=SamplingControls(stop_token_ids=(31,))), "stop token ids are below"),
    (ask(0, controls=SamplingControls(logit_bias=((31, 1.0),))), "logit_bias are below"),
    (ask(0, controls=SamplingControls(logit_bias=((3, 101.0),))), "from -100 to 100"),
]


def test_an_impossible_request_is_refused_and_others_are_served(rig: Rig) -> None:
    with rig.serving([]) as running:
        for request, why in IMPOSSIBLE:
            with pytest.raises(EngineError, match=why):
                running.engine.submit(request)
        running.engine.submit(ask(0, n=5))
        with pytest.raises(EngineError, match="no live request has"):
            running.engine.submit(ask(0, n=5))
        assert len(running.all()) == 1


def test_a_sequence_may_be_as_long_as_the_model_holds(rig: Rig) -> None:
    request = ask(0, ids=[5] * 100, n=POSITIONS - 100)
    with rig.serving([request]) as running:
        completion = running.all()[request.key]
    assert len(completion.ids) == POSITIONS - 100
    assert worst(request, completion, rig.models) < EXACT
