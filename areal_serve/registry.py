"""What the server has accepted: sessions, models and their calls in order, results. No HTTP here.

Every call of a model has a number (seq_id). A call is written to the model's log when it is accepted, carried out once
in the order of the numbers, and answered from its result ever after. State on disk, in RUN/models/ID: model.json,
calls.log and results.log since the last snapshot, snapshot-SEQ. A front or a trainer that starts again continues there.
"""

import asyncio
import errno
import json
import os
import secrets
import shutil
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from areal_bus.storage.atomic_file import write_atomic
from areal_serve.limits import InFlight
from areal_serve.rejection import Rejected
from areal_serve.storage.client_journal import OnDone, unnoted
from areal_serve.worker import Frame

SESSION_S = 900.0  # a session without a heartbeat for this long has ended
MOST_WAITING = 4096  # calls of one model that are accepted and not finished
MOST_ENDS = 3  # of the trainer during one call: the call is the likely cause, and gets an error
KEPT_RESULTS = 256  # calls before a snapshot whose results are kept, for retries
SNAPSHOT_BYTES = 64 << 20  # of calls that are carried out again after a crash; then a snapshot takes their place
CALL_BYTES = 1 << 16  # for which each call counts at least
CALLS, RESULTS, SNAPSHOT = "calls.log", "results.log", "snapshot"  # in RUN/models/ID
LENGTH = struct.Struct("<I")
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(slots=True)
class Future:
    """The result of a request, or the wait for it."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: bytes = b""
    error: str = ""
    kind: str = JSON  # of the result
    taken: bool = False  # its client has it
    is_void: bool = False  # the call ended the trainer: it is not carried out again
    version: int | None = None  # of the weights that have sampled the result
    came: float = field(default_factory=time.monotonic)  # when it was promised
    on_finish: Callable[[], None] = lambda: None

    def finish(self, reply: Mapping[str, Any]) -> None:
        self.result, self.error = reply.get("result", b""), reply.get("error", "")
        self.is_void, self.version = reply.get("void", False), reply.get("version")
        self.done.set()
        self.on_finish()


@dataclass(frozen=True, slots=True)
class Model:
    """What a client trains."""

    id: str
    session_id: str
    base_model: str
    lora: dict[str, Any] | None  # rank, seed and parts of its adapters; None: the whole model
    created: float
    user_metadata: dict[str, str] | None = None


@dataclass(slots=True)
class Run:
    """A model in training, and its calls by number."""

    model: Model
    folder: Path
    accepted: dict[int, Frame] = field(default_factory=dict)  # since the snapshot
    next: int = 0  # the call to carry out next
    snapshot: int = -1  # last call that the newest snapshot has carried out
    steps: int = 0  # optimizer steps since the latest snapshot was asked for
    n_bytes: int = 0  # of the calls that were carried out since then
    seen: float = 0.0  # time of its latest call
    first: deque[Frame] = field(default_factory=deque)  # what goes before the next call: redone calls, a snapshot
    busy: bool = False  # the trainer has a frame of it

    def add_done(self, frame: Frame, future: Future) -> None:
        """Count a call that is carried out and in no snapshot."""
        self.steps += frame["op"] == "step" and not future.error
        self.n_bytes += CALL_BYTES + len(frame.get("body", b""))
        if frame.get("folder") and frame["op"] != "save" and not future.error:
            self.n_bytes = SNAPSHOT_BYTES  # it has read a checkpoint, which a client may delete or overwrite


class Registry:
    """The state behind the front. `to_trainer` sends a frame; the reply comes to `on_trainer`."""

    def __init__(self, folder: Path, *, save_every: int, to_trainer: Callable[[Frame], None]) -> None:
        self.folder, self._save_every, self._to_trainer = folder, save_every, to_trainer
        self.sessions: dict[str, dict[str, Any]] = {}
        self.samplers: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, Run] = {}
        self.futures: dict[str, Future] = {}
        self.in_flight = InFlight()
        self.on_done: OnDone = unnoted
        self._turns: deque[str] = deque()  # models, in the order in which they get the trainer
        self._sent: deque[str] = deque()  # ids of the frames that the trainer has, in its order
        self._ends: Counter[str] = Counter()  # of the trainer, by the id of the frame that it worked on
        self.is_ready = False  # the trainer is
        for name in ("sessions", "samplers", "models"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._read()

    # sessions and samplers

    def open_session(self, given: Mapping[str, Any]) -> str:
        id = f"session-{secrets.token_hex(8)}"
        kept = {name: given.get(name) for name in ("tags", "user_metadata", "sdk_version", "display_name")}
        record = {**kept, "created": time.time(), "ended": ""}
        self._write("sessions", id, record)
        self.sessions[id] = {**record, "seen": time.monotonic()}
        return id

    def session(self, id: str) -> dict[str, Any]:
        """An open session, which is heard of now. Raises Rejected."""
        found = self.sessions.get(id)
        if found is None:
            raise Rejected(f"unknown session {id!r}: create one with a ServiceClient", status=404)
        if found["ended"]:
            raise Rejected(f"session {id} has ended: {found['ended']}", status=410)
        found["seen"] = time.monotonic()
        return found

    def end_session(self, id: str, reason: str) -> None:
        """Its models leave the trainer. Checkpoints with a name stay."""
        found = self.sessions[id]
        if found["ended"]:
            return
        found["ended"] = reason
        self._write("sessions", id, {name: value for name, value in found.items() if name != "seen"})
        for run in [run for run in self.runs.values() if run.model.session_id == id]:
            self._drop(run)

    def end_silent_sessions(self) -> None:
        now = time.monotonic()
        for id, session in list(self.sessions.items()):
            if not session["ended"] and now - session["seen"] > SESSION_S:
                self.end_session(id, f"no heartbeat for {SESSION_S:.0f} s")

    def open_sampler(self, id: str, record: Mapping[str, Any]) -> str:
        """`record`: session_id, base_model, and model_path, or folder, or inflight (a model)."""
        if id not in self.samplers:
            self._write("samplers", id, record)
            self.samplers[id] = dict(record)
        return id

    def sampler(self, id: str) -> dict[str, Any]:
        """Raises Rejected."""
        if id not in self.samplers:
            raise Rejected(f"unknown sampling session {id!r}: create a sampling client", status=404)
        return self.samplers[id]

    def weights_of(self, sampler_id: str) -> str:
        """The folder of a sampler's weights; "" for the base model. Raises Rejected."""
        record = self.sampler(sampler_id)
        self.session(record["session_id"])
        if record.get("inflight"):
            return str(newest(self.folder / "models" / record["inflight"], "inflight"))
        return str(record.get("folder") or "")

    # models and their calls

    def create(self, model: Model, *, folder: Path | None, optimizer: bool, reply: Mapping[str, Any]) -> str:
        """Accept a new model, from a checkpoint's folder or new. The same model again is the same request."""
        request = f"{model.id}:0"
        if request not in self.futures:
            self.session(model.session_id)
            if model.id in self.runs:
                raise Rejected(f"result of {request} is no longer kept: the model was created once", status=410)
            run = Run(model, self.folder / "models" / model.id, seen=time.time())
            run.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(run.folder / "model.json", json.dumps(asdict(model)))
            self.runs[model.id] = run
            origin = None if folder is None else str(folder)
            self._accept(run, 0, {"op": "create", "lora": model.lora, "folder": origin, "optimizer": optimizer,
                                  "reply": dict(reply)}, JSON)  # fmt: skip
        return request

    def run(self, model_id: str) -> Run:
        """Raises Rejected."""
        run = self.runs.get(model_id)
        if run is None:
            raise Rejected(f"unknown model {model_id!r}: its session has ended, or it was never created", status=404)
        self.session(run.model.session_id)
        return run

    def call(self, model_id: str, seq_id: Any, frame: Frame, *, kind: str = JSON) -> str:
        """Accept a call; its request id. A repeated one is not carried out again. Raises Rejected."""
        run = self.run(model_id)
        if type(seq_id) is not int or seq_id < 1:
            raise Rejected(f"missing number: a call of a model has a seq_id from 1 on, got {seq_id!r:.80}")
        request = f"{model_id}:{seq_id}"
        if request not in self.futures:
            if seq_id < run.next:
                raise Rejected(f"result of call {seq_id} is no longer kept: it was carried out once", status=410)
            if seq_id - run.next >= MOST_WAITING:
                raise Rejected(f"too many calls in flight: a model has at most {MOST_WAITING}", status=429)
            run.seen = time.time()
            self._accept(run, seq_id, frame, kind)
        return request

    def _accept(self, run: Run, seq_id: int, frame: Frame, kind: str) -> None:
        frame = {**frame, "model_id": run.model.id, "id": f"{run.model.id}:{seq_id}"}
        size, is_urgent = len(frame.get("body", b"")), seq_id == run.next  # later calls wait for the next one
        give_back = self.in_flight.take(run.model.session_id, n_bytes=size, is_urgent=is_urgent)
        try:
            _append(run.folder / CALLS, {"seq": seq_id, "frame": frame, "kind": kind})
        except BaseException:
            give_back()
            raise
        run.accepted[seq_id] = frame
        self.futures[frame["id"]] = Future(kind=kind, on_finish=give_back)
        self._turns.append(run.model.id)
        self._give_turns()

    def _give_turns(self) -> None:
        """Give each model with something to do, and nothing with the trainer, its next frame."""
        for _ in range(len(self._turns) if self.is_ready else 0):
            run = self.runs.get(self._turns.popleft())
            if run is None:
                continue
            if run.busy:
                self._turns.append(run.model.id)
            elif (frame := run.first.popleft() if run.first else run.accepted.get(run.next)) is not None:
                run.busy = True
                self._send(frame)

    def _send(self, frame: Frame) -> None:
        self._sent.append(frame["id"])
        self._to_trainer(frame)

    def on_trainer(self, reply: Frame) -> None:
        """A frame of the trainer: the result of a call, or of what the server itself has sent."""
        model_id, _, what = reply["id"].rpartition(":")
        self._ends.pop(self._sent.popleft(), None)
        run = self.runs.get(model_id)
        if run is None:
            return
        run.busy = False
        if what.isdecimal():
            self._finish(run, int(what), reply)
        elif what.startswith(SNAPSHOT):
            self._rotate(run, int(what.partition("-")[2]), str(reply.get("error", "")))
        self._turns.append(model_id)
        self._give_turns()

    def _finish(self, run: Run, seq_id: int, reply: Frame) -> None:
        frame, future = run.accepted[seq_id], self.futures[reply["id"]]
        self.on_done(frame, future.came, reply)
        try:
            kept = {name: value for name, value in reply.items() if name != "facts"}  # those are for the journal
            _append(run.folder / RESULTS, {"seq": seq_id, "reply": kept, "kind": future.kind})
        except OSError as error:  # a front that starts again carries the call out again, with the same result
            _warn(f"the result of {reply['id']} is not on disk: {error}")
        run.next = seq_id + 1
        future.finish(reply)
        run.add_done(frame, future)
        if run.steps >= self._save_every or run.n_bytes >= SNAPSHOT_BYTES:
            run.steps = run.n_bytes = 0
            folder = str(run.folder / f"{SNAPSHOT}-{seq_id}")
            save = {"op": "save", "folder": folder, "optimizer": True, "gradients": True, "overwrite": True, "meta": {}}
            run.first.append({**save, "model_id": run.model.id, "id": f"{run.model.id}:{SNAPSHOT}-{seq_id}"})

    def _rotate(self, run: Run, seq_id: int, error: str) -> None:
        """A snapshot is written: forget the calls before it, and results that no client asks for again."""
        if error:
            _warn(f"no snapshot of {run.model.id}: {error}")
            return
        run.snapshot = seq_id
        run.accepted = {number: frame for number, frame in run.accepted.items() if number > seq_id}
        for number in range(seq_id - KEPT_RESULTS, -1, -1):
            if self.futures.pop(f"{run.model.id}:{number}", None) is None:
                break
        try:
            kept = [record for record in _records(run.folder / RESULTS) if record["seq"] > seq_id - KEPT_RESULTS]
            _rewrite(run.folder / RESULTS, kept)
            _rewrite(run.folder / CALLS, [r for r in _records(run.folder / CALLS) if r["seq"] > seq_id])
        except OSError as error:  # the logs stay longer than they need to
            _warn(f"cannot shorten the logs of {run.model.id}: {error}")
        for older in run.folder.glob(f"{SNAPSHOT}-*"):
            if int(older.name.partition("-")[2]) < seq_id:
                shutil.rmtree(older, ignore_errors=True)

    def on_trainer_start(self) -> None:
        """The trainer has no model: bring each back to where it was, by its snapshot and the calls since. A call
        during which it ended again and again gets an error instead.
        """
        self.is_ready = True
        culprit = self._sent[0] if self._sent else ""
        self._ends[culprit] += 1
        if self._ends[culprit] >= MOST_ENDS and culprit in self.futures:
            sentence = f"this call ended the trainer {MOST_ENDS} times: it is given up, and nothing is changed"
            model_id, _, seq_id = culprit.rpartition(":")
            self._finish(self.runs[model_id], int(seq_id), {"id": culprit, "error": sentence, "void": True})
        self._sent.clear()
        self._turns.clear()
        for run in self.runs.values():
            run.busy, run.steps, run.n_bytes = False, 0, 0
            run.first = deque(self._redone(run))
            for number in range(run.snapshot + 1, run.next):
                run.add_done(run.accepted[number], self.futures[f"{run.model.id}:{number}"])
            self._turns.append(run.model.id)
        self._give_turns()

    def _redone(self, run: Run) -> Iterator[Frame]:
        again = {"model_id": run.model.id, "id": f"{run.model.id}:again"}
        if run.snapshot >= 0:
            folder = str(run.folder / f"{SNAPSHOT}-{run.snapshot}")
            yield {"op": "create", "lora": run.model.lora, "folder": folder, "optimizer": True, **again}
        for seq_id in range(run.snapshot + 1, run.next):
            frame = run.accepted[seq_id]
            changes_nothing = frame["op"] == "save" or frame.get("forward_only")
            if not changes_nothing and not self.futures[frame["id"]].is_void:
                yield {**frame, **again}

    def _drop(self, run: Run) -> None:
        del self.runs[run.model.id]
        if self.is_ready:
            self._send({"op": "drop", "model_id": run.model.id, "id": f"{run.model.id}:drop"})
        for seq_id in range(run.next + MOST_WAITING):
            future = self.futures.pop(f"{run.model.id}:{seq_id}", None)
            if future is not None and not future.done.is_set():
                future.finish({"error": f"session of {run.model.id} has ended"})
        for path in [run.folder / CALLS, run.folder / RESULTS]:
            path.unlink(missing_ok=True)
        for name in (SNAPSHOT, "inflight", "unnamed"):
            for folder in run.folder.glob(f"{name}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    # on disk

    def _write(self, kind: str, id: str, record: Mapping[str, Any]) -> None:
        write_atomic(self.folder / kind / f"{id}.json", json.dumps(record))

    def _read(self) -> None:
        """What an earlier front has accepted."""
        for path in (self.folder / "sessions").glob("*.json"):
            self.sessions[path.stem] = {**json.loads(path.read_text(encoding="utf-8")), "seen": time.monotonic()}
        for path in (self.folder / "samplers").glob("*.json"):
            self.samplers[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        for path in (self.folder / "models").glob("*/model.json"):
            model = Model(**json.loads(path.read_text(encoding="utf-8")))
            if not self.sessions.get(model.session_id, {"ended": "unknown"})["ended"]:
                self.runs[model.id] = self._read_run(Run(model, path.parent, seen=time.time()))

    def _read_run(self, run: Run) -> Run:
        snapshots = [path for path in run.folder.glob(f"{SNAPSHOT}-*") if (path / "meta.json").exists()]
        run.snapshot = max((int(path.name.partition("-")[2]) for path in snapshots), default=-1)
        run.next = run.snapshot + 1
        for record in _records(run.folder / CALLS):
            future = self.futures[record["frame"]["id"]] = Future(kind=record["kind"])
            if record["seq"] > run.snapshot:
                run.accepted[record["seq"]] = record["frame"]
                size = len(record["frame"].get("body", b""))
                future.on_finish = self.in_flight.take(run.model.session_id, n_bytes=size, is_urgent=True)
        for record in _records(run.folder / RESULTS):
            id = record["reply"]["id"]
            self.futures.setdefault(id, Future(kind=record.get("kind", JSON))).finish(record["reply"])
            run.next = max(run.next, record["seq"] + 1)
        return run


def newest(folder: Path, name: str) -> Path:
    """The folder NAME-N with the highest N. Raises Rejected."""
    found = [path for path in folder.glob(f"{name}-*") if (path / "meta.json").exists()]
    if not found:
        raise Rejected(f"missing weights: {folder.name} has published none", status=404)
    return max(found, key=lambda path: int(path.name.partition("-")[2]))


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Raises Rejected for a number that msgpack does not hold. After an OSError the file is as before."""
    try:
        body = msgpack.packb(record, use_bin_type=True)
    except (OverflowError, ValueError, TypeError) as error:
        raise Rejected(f"invalid body: {error}") from None
    with path.open("ab", buffering=0) as file:
        at = file.tell()
        try:
            if file.write(LENGTH.pack(len(body)) + body) < LENGTH.size + len(body):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(at)
            raise


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    for record in records:
        _append(temporary, record)
    temporary.touch()
    temporary.replace(path)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a log; what a killed writer left of the last one is cut off."""
    if not path.exists():
        return
    data, at = path.read_bytes(), 0
    while at + LENGTH.size <= len(data):
        end = at + LENGTH.size + LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            break
        yield msgpack.unpackb(data[at + LENGTH.size : end], strict_map_key=False)
        at = end
    if at < len(data):
        with path.open("r+b") as file:
            file.truncate(at)
