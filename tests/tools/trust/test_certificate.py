"""Certificates: chains of journals over restarts; any of 200 single changes of a run or a certificate is found."""

import fcntl
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from areal_bus.storage import journal_chain
from areal_bus.storage.journal import Journal
from areal_bus.storage.journal_segments import FileSizes
from tests.tools.audit.forged_run import true_run
from tools.run import Run
from tools.trust import certify, verify
from tools.trust.certify import chain_of, lost_ends

N_CHANGES = 200


def write(folder: Path, role: str, incarnation: int = 0, n: int = 3, **sizes: Any) -> Path:
    book = Journal(folder, role=role, index=0, incarnation=incarnation, **sizes)
    for i in range(n):
        book.write(Event.NOTE, text=f"note {i}")
    book.close()
    return book.path


def ended(folder: Path) -> Path:
    """With the files of a job that ended well."""
    for name in ("origin.json", "summary.json"):
        (folder / name).write_text('{"rows":1}\n')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A true run whose journals are chained."""
    folder = ended(true_run().save(tmp_path / "run"))
    for path in (folder / "journal").iterdir():
        links = journal_chain.chained("", path.read_bytes().splitlines())
        path.write_bytes(b"".join(line + b"\n" for line, _ in links))
    (folder / "samples").mkdir()
    (folder / "samples" / "samples.jsonl").write_text("".join(f'{{"uid":{i},"reward":1.5}}\n' for i in range(9)))
    return folder


def test_a_chain_goes_on_in_a_later_start_of_the_same_file(tmp_path: Path) -> None:
    path = write(tmp_path, "reward")
    n = chain_of(path)["lines"]
    with path.open("ab") as file:
        file.write(b'{"torn":')  # by a kill
    assert write(tmp_path, "reward") == path
    assert chain_of(path)["state"] == "chained"
    assert chain_of(path)["lines"] == 2 * n


def test_a_chain_goes_over_restarts_and_the_head_names_the_ends_of_all(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first, reward = write(journal, "generator"), write(journal, "reward")
    second, head = write(journal, "generator", 1), write(journal, "head")
    begun = json.loads(second.read_text().splitlines()[0])
    assert begun["follows"] == f"generator-0.0={chain_of(first)['end']}"
    seals = json.loads(head.read_text().splitlines()[0])["seals"]
    assert seals == [f"{path.stem}={chain_of(path)['end']}" for path in (first, second, reward)]
    assert {chain_of(path)["state"] for path in (first, second, reward, head)} == {"chained"}
    assert lost_ends(Run(tmp_path)) == []
    reward.write_bytes(b"".join(reward.read_bytes().splitlines(keepends=True)[:-1]))  # its chain is whole without it
    assert chain_of(reward)["state"] == "chained"
    assert [sentence.partition(":")[0] for sentence in lost_ends(Run(tmp_path))] == [
        "missing end of reward-0.0, which head-0.0.jsonl names"
    ]


def test_files_that_are_compressed_and_lose_their_times_keep_the_chain(tmp_path: Path) -> None:
    book = Journal(tmp_path, role="learner", index=0, incarnation=0, sizes=FileSizes(2000, 0))
    for i in range(40):
        book.write(Event.SPANS, s_work=1.0, at_work=[i, 100])
    book.close()
    assert list(tmp_path.glob("*.gz"))
    assert chain_of(book.path)["state"] == "chained"


@pytest.mark.parametrize(
    "change",
    [
        lambda lines, i: lines[:i] + lines[i + 1 :],
        lambda lines, i: [*lines[:i], lines[i].replace(b'"wall":', b'"wall":1'), *lines[i + 1 :]],
        lambda lines, i: [*lines[:i], lines[i], *lines[i:]],
        lambda lines, i: [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]],
        lambda lines, i: [*lines[:i], b'{"event":"note","seq":1,"text":"without a hash"}\n', *lines[i:]],
    ],
)
def test_a_chain_shows_a_change_of_any_line_before_its_last(
    tmp_path: Path, change: Callable[[list[bytes], int], list[bytes]]
) -> None:
    path = write(tmp_path, "reward", n=6)
    lines = path.read_bytes().splitlines(keepends=True)
    for i in range(1, len(lines) - 2):
        path.write_bytes(b"".join(change(lines, i)))
        assert chain_of(path)["state"].startswith("line "), i
    path.write_bytes(b"".join(lines[1:]))
    assert chain_of(path)["state"] == "line 1 does not follow from the line before it"


def test_an_unchanged_run_verifies_and_a_running_one_is_not_certified(run: Path) -> None:
    assert certify.main([str(run)]) == 0
    assert verify.main([str(run / "certificate.json"), str(run)]) == 0
    assert "I4" in (run / "certificate.html").read_text()
    (run / "lock").touch()
    with (run / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="unfinished run: a job writes"):
            certify.main([str(run)])


def test_a_killed_run_is_not_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    assert certify.main([str(run)]) == 1
    assert "missing summary.json" in capsys.readouterr().out
    assert verify.main([str(run / "certificate.json"), str(run)]) == 0


@pytest.mark.slow
def test_each_of_200_single_changes_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certify.main([str(run)])
    told, draw = verify.read_certificate(run / "certificate.json"), random.Random(46)
    assert verify.changes(told, Run(run)) == []
    for i in range(N_CHANGES):
        if i % 10 == 0:
            forged, place = forge(json.loads(json.dumps(told)), draw)
            assert verify.changes(forged, Run(run)), place
            continue
        path = run / draw.choice(sorted(told["files"]))
        kind, before = draw.choice((remove_line, change_number, swap_file, cut, repeat_line)), path.read_bytes()
        path.write_bytes(kind(before, run, draw))
        if path.read_bytes() != before:  # a line may be equal to the one it takes the place of
            assert verify.changes(told, Run(run)), (kind.__name__, path)
        path.write_bytes(before)
    assert verify.changes(told, Run(run)) == []
    for added in ("journal/generator-7.0.jsonl", "samples/more.jsonl"):
        (run / added).write_bytes(b'{"seq":0}\n')
        assert f"new file: {added}" in verify.changes(told, Run(run))
        (run / added).unlink()
    (run / "samples" / "samples.jsonl").unlink()
    assert verify.changes(told, Run(run)) == ["missing file: samples/samples.jsonl"]
    capsys.readouterr()


def remove_line(before: bytes, run: Path, draw: random.Random) -> bytes:
    lines = before.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(before: bytes, run: Path, draw: random.Random) -> bytes:
    lines = before.splitlines(keepends=True)
    i = draw.randrange(len(lines))
    return b"".join([*lines[: i + 1], *lines[i:]])


def change_number(before: bytes, run: Path, draw: random.Random) -> bytes:
    at = draw.choice([i for i, byte in enumerate(before) if chr(byte).isdigit()])
    return before[:at] + str((before[at] - 48 + draw.randint(1, 9)) % 10).encode() + before[at + 1 :]


def swap_file(before: bytes, run: Path, draw: random.Random) -> bytes:
    return draw.choice(sorted((run / "journal").iterdir())).read_bytes()


def cut(before: bytes, run: Path, draw: random.Random) -> bytes:
    return before[: draw.randrange(len(before))]


def forge(told: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """The certificate with one changed value, and its place."""
    table, place = told, []
    while True:
        key = draw.choice([key for key in table if key != "schema"])
        place.append(key)
        if not isinstance(table[key], dict) or not table[key]:
            break
        table = table[key]
    table[key] = f"{table[key]} forged"
    return told, place
