"""The journal of a server: one line a call, once, with what the call did; and the report of it."""

from pathlib import Path

import pytest

from areal_bus.config.sections import Config, ServeConfig
from areal_serve.report.clients import Clients
from areal_serve.storage.client_journal import ClientJournal
from tests.areal_serve.parts import CONFIG
from tests.areal_serve.test_front import Call, model, pass_body, result, run, sampled, train
from tools.report.__main__ import page_of
from tools.report.facts.run_facts import read_facts
from tools.report.page.parts import render
from tools.run import Run

STRICT = CONFIG.model_copy(update={"serve": ServeConfig(max_staleness=0)})


async def loop_of_a_client(call: Call) -> None:
    """Samples, trains on them, and once more when they are stale."""
    id = await model(call)
    save = {"model_id": id, "sampling_session_seq_id": 0, "seq_id": 1}
    sampler = (await result(call, "/save_weights_for_sampler", save))["sampling_session_id"]
    ids, _, _ = await sampled(call, sampler, 1)
    for seq in (2, 5):
        await result(call, "/forward_backward", pass_body(id, seq, tokens=ids))
        await call("/forward_backward", pass_body(id, seq))  # again: the same call
        await train(call, id, seq + 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("served")
    (folder / "config.json").write_text(Config().model_dump_json())
    run(folder, loop_of_a_client, STRICT)
    return Run(folder)


def test_each_call_of_a_client_has_one_line_with_tokens_lag_and_seconds(served: Run) -> None:
    lines = list(served.events("call"))
    assert {line["client"] for line in lines} == {lines[0]["client"]}
    assert all(0 <= line.get("trainer_s", 0.0) <= line["seconds"] + 1e-3 for line in lines)
    created, saved, sample, first, first_other, step, stale, last, last_step = lines
    assert (created["op"], saved["op"], sample["op"]) == ("create", "save", "sample")
    assert (sample["n_tokens"], sample["version"]) == (4, 0)
    known = ("op", "n_data", "n_tokens", "n_tokens_trained", "loss_fn", "lag")
    assert [first[name] for name in known] == ["forward_backward", 1, 5, 5, "cross_entropy", 0]
    assert "lag" not in first_other  # its tokens have no known version
    assert (step["op"], step["version"], last_step["version"]) == ("optim_step", 1, 2)
    assert stale["error"].startswith("stale samples")
    assert "n_tokens" not in stale
    assert last["loss"] == pytest.approx(first_other["loss"], rel=0.5)


def test_report_of_a_server_has_a_row_for_each_client(served: Run) -> None:
    facts = read_facts(served)
    ((name, client),) = facts.clients.of.items()
    assert (client.n_steps, client.n_passes, client.n_sampled, client.n_errors) == (2, 3, 4, 1)
    assert client.lags == [1, 0, 0]
    assert 0 < client.trainer_s <= client.waits["training"].seconds <= client.wall_s
    assert client.own_s + client.waits["any"].seconds == pytest.approx(client.wall_s)
    page = page_of([served])
    assert [question for question, _ in page.answers] == [
        "What limits the clients?",
        "Do they learn?",
        "Is it healthy?",
    ]
    (table,) = next(section for section in page.sections if section.key == "clients").tables
    assert [row[:7] for row in table.rows] == [[name, "2", "3", str(client.n_trained), "4", "0", "0"]]
    assert "stale samples" in str(page.answers[2])
    assert b"report" in render(page).lower()


def line(wall: float, call: int, **others: object) -> dict[str, object]:
    passed = {"client": "c", "model": "m", "op": "forward_backward", "seconds": 2.0, "trainer_s": 1.0}
    return {"event": "call", "wall": wall, "call": call, "n_tokens_trained": 10, "lag": call, **passed, **others}


def test_times_that_overlap_count_once_and_a_repeated_call_not_at_all() -> None:
    clients = Clients()
    clients.take(line(10.0, 1))
    clients.take(line(11.0, 2))
    clients.take(line(12.5, 2))  # of a front that started again
    clients.take(line(13.0, 7, op="sample", n_tokens=5))
    clients.take(line(20.0, 3, loss_fn="cross_entropy", loss=25.0))
    clients.take(line(21.0, 4, seconds=None))  # incomplete
    (client,) = clients.of.values()
    assert {kind: waited.seconds for kind, waited in client.waits.items()} == {
        "training": 5.0,
        "sampling": 2.0,
        "any": 7.0,
    }
    assert (client.wall_s, client.own_s) == (12.0, 5.0)
    assert (client.lags, list(client.loss.values)) == ([3, 6, 3], [2.5])


def test_front_that_starts_again_has_a_journal_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        journal = ClientJournal(tmp_path, CONFIG)
        journal.mark()
        journal.worker_ended("trainer", 0, -9)
        journal.close()
    facts = read_facts(Run(tmp_path))
    assert [path.name for path in facts.where.journals()] == ["front-0.0.jsonl", "front-0.1.jsonl"]
    assert dict(facts.incidents.n_of) == {"death": 2, "restart": 1}
