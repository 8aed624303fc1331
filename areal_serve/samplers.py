"""The sampler processes, as the front knows them: which one gets a request, and what is sent again when one ends."""

from collections import Counter

from areal_serve.registry import Future
from areal_serve.storage.client_journal import OnDone, unnoted
from areal_serve.versions import Versions
from areal_serve.worker import Frame, Link

KEPT = 1024  # retrieved results that are kept, for retries
MOST_ENDS = 3  # of the sampler with one request: the request is a likely cause, and gets an error


class Samplers:
    """Requests by sampler. `links` is filled by its owner; frames of sampler i come to `on_frame(i, frame)`."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self._open: list[dict[str, tuple[Frame, Future]]] = []
        self._weights: list[str] = []  # those of the latest request of each
        self._ready: list[bool] = []
        self._ends: Counter[str] = Counter()  # of their sampler, by request
        self._n_finished = 0
        self.versions = Versions()
        self.on_done: OnDone = unnoted

    def add(self, link: Link) -> None:
        self.links.append(link)
        self._open.append({})
        self._weights.append("")
        self._ready.append(False)

    def submit(self, frame: Frame, future: Future) -> None:
        """To the sampler with the fewest requests; among equals to one that has the weights."""
        loads = [(len(own), self._weights[i] != frame["weights"], i) for i, own in enumerate(self._open)]
        index = min(loads)[2]
        self._open[index][frame["id"]] = (frame, future)
        self._weights[index] = frame["weights"]
        if self._ready[index]:
            self.links[index].send(frame)

    def on_frame(self, index: int, frame: Frame) -> None:
        found = self._open[index].pop(frame["id"], None)
        self._ends.pop(frame["id"], None)
        if found is not None:
            if "version" in frame:
                self.versions.add(found[0]["model_id"], frame["version"], frame["marks"])
            self.on_done(found[0], found[1].came, frame)
            found[1].finish(frame)

    def on_start(self, index: int) -> None:
        """A sampler is ready, for the first time or again: it gets what it has not answered."""
        if self._ready[index]:
            self._ends.update(self._open[index].keys())
        self._ready[index] = True
        for id in [id for id in self._open[index] if self._ends[id] >= MOST_ENDS]:
            self.on_frame(
                index, {"id": id, "error": f"the sampler ended {MOST_ENDS} times with this request: given up"}
            )
        for frame, _ in self._open[index].values():
            self.links[index].send(frame)

    def cancel(self, id: str) -> None:
        for index, own in enumerate(self._open):
            if (found := own.pop(id, None)) is not None:
                self.links[index].send({"op": "cancel", "id": id})
                found[1].finish({"error": "the request was cancelled"})

    def forget_old(self, futures: dict[str, Future]) -> None:
        """Drop retrieved samples beyond KEPT, the oldest first; results of a model's calls are the registry's."""
        self._n_finished += 1
        if self._n_finished % KEPT:
            return
        old = [id for id, future in futures.items() if future.taken and ":sample:" in id]
        for id in old[:-KEPT]:
            del futures[id]
