"""Injects faults into every Python process of a ring under test (PYTHONPATH leads here).

The packages are unaware of it. When a module below is imported, the named functions are wrapped. `Ring.set_failpoint`
writes a file that names the failpoint, the process and the kind of fault; the first process that reaches the failpoint
claims the file. Without the variable AREAL_FAULTS nothing is wrapped.

    kill   as by kill -9       stop   as by SIGSTOP       raise   a RuntimeError       lag   wait for LAG_S
    at some failpoints, instead of the wrapped call:  drop, flip
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = os.environ.get("AREAL_FAULTS", "")
POLL_S = 0.01
LAG_S = 4.0
ME = SimpleNamespace(who="", name="")  # generator-0, generator-0.1, once this process knows


def claim(point: str) -> str:
    """The fault set for this process at this failpoint; "" for none. Each setting applies once."""
    for who in (ME.who, "any"):
        for name in pending(f"{point}@{who}#"):
            try:
                os.rename(f"{FOLDER}/failpoints/{name}", f"{FOLDER}/failpoints_hit/{name}")
            except FileNotFoundError:  # another process was first
                continue
            with open(f"{FOLDER}/failpoints_hit/{name}", encoding="utf-8") as file:
                how = file.read()
            hit = {"point": point, "name": ME.name, "pid": os.getpid(), "t": time.monotonic(), "how": how}
            with open(f"{FOLDER}/failpoint_hits.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(hit) + "\n")
            return how
    return ""


def pending(prefix: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(f"{FOLDER}/failpoints") if name.startswith(prefix))
    except FileNotFoundError:
        return []


def failpoint(point: str) -> str:
    """Apply the fault that is set for this failpoint. Returns its kind if the caller must apply it."""
    how = claim(point)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise RuntimeError(f"failpoint {point}")
    elif how == "lag":
        time.sleep(LAG_S)
    return how


def control(name: str) -> str:
    """Content of the control file of this name; "" when there is none."""
    try:
        with open(f"{FOLDER}/{name}", encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def before(owner: Any, name: str, point: str) -> None:
    """Wrap a function: a failpoint before the call."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        failpoint(point)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, point: str) -> None:
    """Wrap a function: a failpoint after its work, before it returns."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value = real(*args, **kwargs)
        failpoint(point)
        return value

    setattr(owner, name, wrapped)


# what is wrapped, by module


def context(module: Any) -> None:
    """Record the context of this process, so that a test can start a second one with it; keep journal files short."""
    module.SEGMENT_BYTES = 1 << 20  # so that journals go on in several files
    real = module.Context.from_json

    def from_json(text: str) -> Any:
        found = real(text)
        ME.who, ME.name = f"{found.role}-{found.index}", found.name
        with open(f"{FOLDER}/context-{found.name}.json", "w", encoding="utf-8") as file:
            file.write(text)
        return found

    module.Context.from_json = staticmethod(from_json)


def rollout(module: Any) -> None:
    """The learner takes no batch while it is held."""
    real = module.Rollout.prepare_batch

    def prepare_batch(self: Any) -> Any:
        while (version := control("hold_learner")) and self._step >= int(version):
            self._failover.inbox.check()
            self._failover.look()  # a checkpoint may be written meanwhile
            if self._failover.life >= 0 and self._failover.has_new_head:
                self._failover.confirm(has=False)  # as it does while it waits for a batch: that head needs its version
            time.sleep(POLL_S)
        batch = real(self)
        failpoint("consumed")
        return batch

    module.Rollout.prepare_batch = prepare_batch


def actor(module: Any) -> None:
    before(module.PPOActor, "_step", "update")


def learner(module: Any) -> None:
    before(module.Learner, "_load", "loading")
    before(module.Learner, "_publish", "updated")
    after(module.Learner, "_snapshot", "snapshot")
    before(module.Learner, "_sealed", "checkpoint-renamed")


def keeping(module: Any) -> None:
    before(module.CheckpointManager, "keep", "announced")


def copies(module: Any) -> None:
    """A learner copies its state to memory after every update, on a busy machine too; or there is no memory for it."""
    module.ALWAYS_S = float("inf")
    before(module._Stream, "put", "copying")
    after(module.CopyMemory, "write", "copied")
    real = module.available_bytes
    module.available_bytes = lambda: 0 if control("no_copies") else real()


def shelf(module: Any) -> None:
    after(module, "building", "checkpoint-begun")
    before(module, "seal", "checkpoint-files")
    before(module, "sync", "checkpoint-sync")
    before(module, "prune", "checkpoint-prune")
    real = module.shutil.rmtree

    def rmtree(*args: Any, **kwargs: Any) -> None:
        failpoint("checkpoint-discard")
        real(*args, **kwargs)

    module.shutil = SimpleNamespace(rmtree=rmtree)


def weights(module: Any) -> None:
    """A push at the root, in the order of its phases, by either route."""
    before(module.WeightSender, "_ready", "push-announced")
    before(module.WeightSender, "_send", "push-met")
    before(module.protocol.CompletionReports, "__enter__", "push-met")
    after(module.WeightSender, "_push", "push-reported")


def member(module: Any) -> None:
    """A push at a member, in the order of its phases, by either route."""
    before(module.WeightReceiver, "_receive", "receive-announced")
    before(module.WeightReceiver, "_take", "receive-met")
    before(module.WeightReceiver, "_copy", "receive-met")
    after(module.WeightReceiver, "_receive", "receive-reported")
    real = module.protocol.arrive

    def arrive(store: Any, begin: Any, phase: str, text: str) -> None:
        real(store, begin, phase, text)
        if phase == "ready":
            failpoint("receive-ready")

    module.protocol.arrive = arrive


def landing(module: Any) -> None:
    """Flip a received bit ("flip")."""

    def flipping(real: Callable[..., None]) -> Callable[..., None]:
        def land(self: Any, start: int, bucket: Any) -> None:
            if failpoint("receive-landing") == "flip":
                bucket[0] ^= 1
            real(self, start, bucket)

        return land

    for buffers in (module.ReceiveBuffers, module.DeltaBuffers):
        buffers.write = flipping(buffers.write)
        after(buffers, "finish", "receive-landed")


def receiver(module: Any) -> None:
    member(module)
    landing(module)


HOSTILE: list[Any] = []  # of this process, if it is the one that the file `hostile` names


def hostile() -> Any:
    """None: this process is an honest one."""
    if not HOSTILE and ME.who and control("hostile") == ME.who:
        from hostile import Hostile

        HOSTILE.append(Hostile())
    return HOSTILE[0] if HOSTILE else None


def session(module: Any) -> None:
    """A hostile generator claims room for every prompt there is."""
    real = module.HeadSession.send

    def send(self: Any, message: Any) -> None:
        is_claimed = isinstance(message, module.Ready) and hostile() is not None
        real(self, module.Ready(2**62) if is_claimed else message)

    module.HeadSession.send = send


def pauses(module: Any) -> None:
    """In a test a guest's leases time out sooner, and generators whose leases fail are paused for a short time."""
    module.LEAST_S = float(control("lease_s") or module.LEAST_S)
    if seconds := control("pause_s"):
        module.PAUSE_S = module.MOST_S = float(seconds)


def generation(module: Any) -> None:
    """Drop a message to a generator ("drop")."""
    real_turn = module.Generator.turn

    def turn(self: Any) -> None:
        if (one := hostile()) is not None:
            one.act(self, sys.modules["areal_bus.messages"])
        real_turn(self)

    module.Generator.turn = turn
    before(module.Generator, "_swap", "swap")
    before(module.Generator, "turn", "turn")
    real = module.Generator._on

    def on(self: Any, message: Any) -> None:
        if failpoint(f"message-{type(message).__name__}") != "drop":
            real(self, message)

    module.Generator._on = on


def delivery(module: Any) -> None:
    """A complete sample that is not reported yet."""
    real = module.Delivery.add

    def add(self: Any, trajectory: Any) -> None:
        one = hostile()
        if (given := trajectory if one is None else one.result(trajectory)) is not None:
            real(self, given)

    module.Delivery.add = add
    after(module.Delivery, "add", "completed")


def builtin(module: Any) -> None:
    """Every token takes the time set by the test; the engine of the generator that `failing` names takes no request."""
    take = module.BuiltinEngine.submit

    def submit(self: Any, request: Any) -> None:
        if ME.who and control("failing") == ME.who:
            raise sys.modules["areal_bus.errors"].EngineError("the device is in error")
        take(self, request)

    module.BuiltinEngine.submit = submit
    after(module.BuiltinEngine, "update", "swapped")
    real = module.BuiltinEngine.step

    def step(self: Any) -> Any:
        seconds = control("throttle")
        if seconds == "forever":
            time.sleep(POLL_S)
            return []
        if seconds:
            time.sleep(float(seconds))
        return real(self)

    module.BuiltinEngine.step = step


def frontiers(module: Any) -> None:
    before(module.HeadCheckpointWriter, "_save", "frontier")
    after(module.HeadCheckpointWriter, "_save", "frontier-saved")


def head(module: Any) -> None:
    after(module.Shell, "_begin_term", "term")
    before(module.Shell, "_divide", "dividing")
    after(module.Shell, "_divide", "divided")
    before(module.Shell, "_summarize", "ending")
    after(module.Shell, "_summarize", "ended")


def decisions(module: Any) -> None:
    after(module.Training, "update_done", "head-updated")


WRAPPED: dict[str, Callable[[Any], None]] = {
    "actors.runtime.context": context,
    "actors.runtime.head_session": session,
    "actors.learner.link.rollout": rollout,
    "actors.learner.update.ppo": actor,
    "actors.learner.actor": learner,
    "actors.learner.checkpoint.checkpoint_manager": keeping,
    "actors.learner.checkpoint.memory_copy": copies,
    "areal_bus.storage.versioned_dirs": shelf,
    "areal_bus.weights.sender": weights,
    "areal_bus.weights.receiver": receiver,
    "actors.generator.loop": generation,
    "actors.generator.delivery": delivery,
    "actors.engines.builtin.engine": builtin,
    "actors.head.checkpoint_writer": frontiers,
    "actors.head.shell": head,
    "areal_bus.core.transitions.training": decisions,
    "areal_bus.core.members.lease_failures": pauses,
}


class Finder(importlib.abc.MetaPathFinder):
    """Import hook: wraps the modules of WRAPPED after they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wrap = WRAPPED.get(name)
        found = importlib.machinery.PathFinder.find_spec(name, path, target) if wrap else None
        if wrap is None or found is None or found.loader is None:
            return None
        real = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            real(module)
            wrap(module)

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


if FOLDER:
    sys.meta_path.insert(0, Finder())
