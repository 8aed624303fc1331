"""The processes that compute, and the link to the front: frames of msgpack over a socket pair.

`python -m areal_serve.worker ROLE FD RUN MODEL PARENT`, with ROLE trainer or sampler. A worker ends with the
process that started it. A frame: its length (8 bytes, little-endian), then a map.
"""

import json
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np

from areal_bus.config.removed import saved
from areal_bus.process.parent_death import die_with_parent
from areal_serve.rejection import Rejected, fault
from areal_serve.versions import n_trained
from areal_serve.wire import PassRequest, pass_output, read_pass

LENGTH = struct.Struct("<Q")
Frame = dict[str, Any]
READY = {"id": "ready"}  # first frame of a worker


class Link(Protocol):
    """A worker, as the front knows it."""

    def send(self, frame: Frame) -> None:
        """Replies come by the callback that it was made with."""

    def close(self) -> None: ...


class Pipe:
    """A worker's end of the link."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def has_frame(self) -> bool:
        """Whether a frame begins, or the end has come."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def read(self) -> Frame | None:
        """Wait for the next frame; None at the end."""
        head = self._take(LENGTH.size)
        if head is None:
            return None
        body = self._take(LENGTH.unpack(head)[0])
        return None if body is None else dict(msgpack.unpackb(body, strict_map_key=False))

    def send(self, frame: Frame) -> None:
        body = msgpack.packb(frame, use_bin_type=True)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def _take(self, size: int) -> bytes | None:
        """Unbuffered: `select` would not see what a buffer holds."""
        found = bytearray()
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                return None
            found += part
        return bytes(found)


def main(words: list[str]) -> None:
    role, descriptor, run, folder, parent = words
    die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front ends it
    config = saved((Path(run) / "config.json").read_text(encoding="utf-8"))
    serve = serve_trainer if role == "trainer" else serve_sampler
    import torch

    serve(Pipe(int(descriptor)), config, folder, "cuda" if torch.cuda.is_available() else "cpu")


def serve_trainer(pipe: Pipe, config: Any, folder: str, device: str) -> None:
    from actors.models.loading import max_positions
    from areal_serve.trainer import Trainer

    trainer = Trainer(config, folder, device=device, max_tokens=max_positions(folder) or 1 << 20)
    pipe.send(READY)
    while (frame := pipe.read()) is not None:
        try:
            pipe.send(answer(trainer, frame))
        except Exception as error:  # the next trainer makes the state again, without this call
            pipe.send({"id": frame["id"], "error": fault(error), "void": True})
            raise


def answer(trainer: Any, frame: Frame) -> Frame:
    """The reply to one call of a model."""
    began = time.monotonic()
    facts: Frame = {}
    try:
        result = carry_out(trainer, frame, facts)
        return {"id": frame["id"], "result": result, "facts": facts | {"trainer_s": _since(began)}}
    except Rejected as error:
        return {"id": frame["id"], "error": str(error), "facts": {"trainer_s": _since(began)}}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 6)


def carry_out(trainer: Any, frame: Frame, facts: Frame) -> bytes:
    """The body of the reply: a protocol buffer for a pass, else JSON. `facts` gets those that the journal has."""
    op, model_id = frame["op"], frame["model_id"]
    if op == "pass":
        request = read_pass(frame["body"])
        outcome = trainer.run(model_id, request, oldest=frame.get("oldest"))
        facts |= facts_of(request, outcome.metrics)
        return pass_output([{"logprobs": logps} for logps in outcome.logps], outcome.metrics)
    if op == "step":
        metrics = trainer.step(model_id, frame["params"])
        facts["version"] = int(metrics["step:max"])
        return json.dumps({"metrics": metrics}).encode()
    if op == "create":
        origin = None if frame["folder"] is None else Path(frame["folder"])
        trainer.create(model_id, frame["lora"], origin, optimizer=frame["optimizer"])
    elif op == "save":
        own = {name: frame[name] for name in ("optimizer", "overwrite", "meta")}
        trainer.save(
            model_id,
            Path(frame["folder"]),
            gradients=frame.get("gradients", False),
            for_others=frame.get("for_others", False),
            **own,
        )
    elif op == "load":
        trainer.load(model_id, Path(frame["folder"]), optimizer=frame["optimizer"])
    elif op == "drop":
        trainer.drop(model_id)
    return json.dumps(frame.get("reply", {})).encode()


def facts_of(request: PassRequest, metrics: Mapping[str, float]) -> Frame:
    """What the journal says of a pass. `lag`: of its oldest known sample."""
    facts: Frame = {"n_data": len(request.data), "n_tokens": sum(len(datum.ids_T) for datum in request.data)}
    facts |= {"loss_fn": request.loss_fn, "loss": metrics["loss:sum"]}
    if not request.forward_only:
        facts["n_tokens_trained"] = sum(n_trained(datum, request.loss_fn) for datum in request.data)
        facts |= {"lag": int(metrics["lag:max"])} if "lag:max" in metrics else {}
    return facts


def serve_sampler(pipe: Pipe, config: Any, folder: str, device: str) -> None:
    from actors.models.loading import load_tokenizer
    from areal_serve.sampler import Sampler

    sampler = Sampler(config, folder, load_tokenizer(folder), device=device)
    pipe.send(READY)
    while True:
        while sampler.is_idle or pipe.has_frame():
            frame = pipe.read()
            if frame is None:
                return
            take(sampler, frame)
        for id, reply in sampler.step():
            pipe.send({"id": id, **reply})


def take(sampler: Any, frame: Frame) -> None:
    from areal_serve.sampler import Job

    if frame["op"] == "cancel":
        sampler.cancel(frame["id"])
        return
    options = frame["options"]
    if (targets := options.get("target_prompt_logprobs")) is not None:
        options["target_prompt_logprobs"] = np.array(targets, np.int64)
    sampler.submit(
        Job(frame["id"], frame["weights"], frame["prompt"], frame["n_samples"], tuple(frame["seed"]), options)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
