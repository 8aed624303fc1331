"""An `Engine` over an inference server. Each request is an HTTP stream.

The server decodes by itself; `step` receives its results. New weights are verified in the memory of this process.
`update` then sends them to the server, between a pause and a resume if the server can pause. A server that cannot pause
or does not report the version of each token gets no running request across an update: the engine aborts all requests,
their tokens have the version under which they were sent, and new requests with the tokens so far as prompt continue
them. The engine never asks the server afterwards which version made a token (I5).
"""

import time
from collections.abc import Mapping
from typing import Any

from actors.engines.protocol import Completion, Done, Request, check_order
from actors.engines.servers.http_client import StreamEnded, StreamEvent
from actors.engines.servers.model_spec import ModelSpec
from actors.engines.servers.protocol import PieceUpdate, Server, ServerContext
from actors.engines.servers.request import ServerRequest, begun, versions
from areal_bus.errors import EngineError, EngineLost
from areal_bus.messages import Finish

WAIT_S = 0.01  # longest wait of a step for results
SENT_AGAIN = 3  # times that a request is sent again after the server ended it
LAST_WORDS_S = 0.5  # after a stream broke: time in which the end of the server's process is noticed
ABORT_AGAIN_S = 0.25  # interval of repeated aborts: the first may arrive before the request

Key = tuple[str, int, int, int, int]


class ServerEngine:
    """One inference server. With requests in progress it must send something every `engine.silent_s`, or it is lost."""

    def __init__(
        self,
        server: Server,
        met: ServerContext,
        *,
        shape: ModelSpec,
        tokenizer: Any = None,
    ) -> None:
        """`met.name` is unique: it begins the ids of requests at the server and the labels of weights. `shape`: of the
        weights that pushes bring. `tokenizer`: for requests with stop strings.
        """
        self._server, self._link, self._shape, self._name = server, met.link, shape, met.name
        self._on_update, engine = met.config.rollout.on_update, met.config.engine
        self._silent_s, self._call_timeout_s = engine.silent_s, engine.call_timeout_s
        self._stop_ids, self._tokenizer = met.stop_ids, tokenizer
        self._samples: dict[Key, ServerRequest] = {}  # live, in order of arrival
        self._by_rid: dict[str, ServerRequest] = {}  # those at the server
        self._ended: list[Completion] = []  # not yet returned
        self._held: tuple[int, int] | None = None  # (term, version) of the weights at the server
        self._labels: dict[str, int] = {}  # label -> version, of all weights sent
        self._rests = False  # until the next update
        self._holds = False  # start no episode before the next update
        self._ends = False  # samples are being ended
        self._n_pieces = self.n_tokens = 0
        self._heard = self._listened = time.monotonic()

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held[1]

    @property
    def n_live(self) -> int:
        return len(self._samples) + len(self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError for a request that is too long or unsupported."""
        if request.key in self._samples or any(completion.key == request.key for completion in self._ended):
            raise EngineError(f"a request must have a key that no live request has: {request.key}")
        self._shape.check_request(request, self._tokenizer)
        self._server.check_sampling(temperature=request.temperature, top_p=request.top_p, controls=request.controls)
        sample = self._samples[request.key] = begun(request, stop_ids=self._stop_ids, tokenizer=self._tokenizer)
        self._send(sample)

    def step(self) -> list[Completion]:
        """The completions that ended since the last call; waits up to WAIT_S if there are none."""
        self.check()
        if self._held is None or self._rests:
            return self._take_ended()
        self._send_waiting()
        self._hear(0.0 if self._ended else WAIT_S)
        return self._take_ended()

    def abort(self, key: Key) -> Completion | None:
        """Drop a request; returns its tokens whose versions are known, or None if it is not live."""
        for completion in self._ended:
            if completion.key == key:
                self._ended.remove(completion)
                return completion
        sample = self._samples.pop(key, None)
        if sample is None:
            return None
        if sample.rid is not None:
            self._by_rid.pop(sample.rid)
            self._link.drop(sample.rid)
            self._server.abort(sample.rid)
        return sample.given_up()

    def newest(self, key: Key) -> int | None:
        """Version of the latest token; for a request at the server the current one, as it may have sampled by now."""
        sample = self._samples.get(key)
        if sample is not None and sample.rid is not None:
            return self.version
        done = self.so_far(key)
        return None if done is None else done.spans[-1][0]

    def so_far(self, key: Key) -> Done | None:
        """The tokens of a live request whose versions are known; None if there are none or it is not live."""
        for completion in self._ended:
            if completion.key == key:
                return Done(list(completion.ids), list(completion.logps), [list(span) for span in completion.spans])
        sample = self._samples.get(key)
        return None if sample is None else sample.done()

    def parameters(self) -> Mapping[str, Any]:
        """Name -> tensor on the meta device; a tied weight once."""
        return self._shape.parameters

    def hold(self) -> bool:
        """Start no episode before the next update; returns whether one is running."""
        self._holds = True
        return bool(self._by_rid or self._ended) or any(key[4] for key in self._samples)

    def pause(self) -> None:
        """Sample nothing before the next update; new requests wait."""
        if self._held is None or self._rests:
            return
        self._rests = True
        self._stop(keep=False)

    def check(self) -> None:
        """Raises EngineLost if the server has ended, or is silent with requests in progress."""
        self._server.check()
        if time.monotonic() - self._heard > self._silent_s:
            self._hear(0.0)  # events may wait in the queue
        silent_s = self._listened - self._heard
        if self._by_rid and not self._rests and silent_s > self._silent_s:
            raise EngineLost(
                f"a server with work must send something every {self._silent_s:g} s (engine.silent_s): "
                f"{self._link.url} has {len(self._by_rid)} samples and sent nothing for {silent_s:.0f} s"
            )

    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        """Send new weights; returns `tensors` for reuse. Raises EngineError (unchanged), EngineLost, ConfigError."""
        check_order(self._held, term, version)
        self._shape.check_weights(tensors)
        keep = self._on_update == "keep" and self._held is not None and term == self._held[0] and not self._rests
        self._stop(keep=keep)
        label = self._label(term, version)
        self._labels[label] = version
        self._server.load(label, tensors, flush=not keep)
        if self._server.pauses:
            self._server.resume()
        self._held, self._rests, self._holds = (term, version), False, False
        self._heard = time.monotonic()
        self._send_waiting()
        return tensors

    def close(self) -> None:
        """End all requests, and the server if this process started it."""
        self._link.close()
        self._server.close()

    # pieces

    def _send_waiting(self) -> None:
        """Send all waiting requests. The server queues those that it cannot run yet."""
        for sample in self._samples.values():
            if sample.rid is None:
                self._send(sample)

    def _label(self, term: int, version: int) -> str:
        """The name of weights at the server."""
        return f"{self._name}.{term}.{version}"

    def _send(self, sample: ServerRequest) -> None:
        """Send a request, unless it must wait."""
        if self._held is None or self._rests or (self._holds and not sample.request.key[4]):
            return
        self._n_pieces += 1
        rid = f"{self._name}-{self._n_pieces:012d}"
        path, body = self._server.ask(sample.piece(rid, self._held[1], self._label(*self._held)))
        if not self._by_rid:
            self._heard = time.monotonic()
        self._by_rid[rid] = sample
        self._link.stream(rid, path, body)

    def _hear(self, wait_s: float) -> None:
        now, before = time.monotonic(), self._listened
        self._listened = now
        if now - before > self._silent_s / 2:  # this process was busy or stopped: not the silence of the server
            self._heard = now
        for said in self._link.news(wait_s):
            sample = self._by_rid.get(said.name)
            if sample is None:  # aborted
                continue
            self._heard = time.monotonic()
            if isinstance(said, StreamEvent):
                self._on(sample, self._server.read(said.event, len(sample.new_ids)))
            else:
                self._broke(sample, said)

    def _on(self, sample: ServerRequest, news: PieceUpdate) -> None:
        self._shape.check_sampled(news.ids, news.logps)
        sample.hear(news)
        self.n_tokens += len(news.ids)
        has_end = sample.find_end()
        if news.finish is None:
            if has_end and sample.n_sure is None:  # no update has begun since the piece was sent
                self._end_here(sample)
            return
        if news.finish == Finish.ABORT and news.error and news.labels is None and self._server.stamps:
            self._lose_piece(sample, news.error)
            return
        if not self._server.stamps:  # all its tokens have one version
            spans = [[sample.since, len(sample.new_ids)]]
        elif news.labels is None and sample.new_ids:
            raise EngineLost(
                f"missing weight versions of the tokens of {sample.rid}: {self._link.url} reports them for others"
            )
        else:
            spans = versions(news.labels or [], self._labels)
        why = news.error or f"{news.finish} after {len(sample.new_ids)} of {sample.left} tokens"
        self._settle(sample, spans)
        self._conclude(sample, news.finish, why)

    def _conclude(self, sample: ServerRequest, finish: str, why: str) -> None:
        """End a sample whose piece has ended, or send it again because of `why`."""
        if sample.n_kept is not None:
            sample.cut()
            self._finish(sample, Finish.STOP)
        elif sample.ids and sample.ids[-1] in sample.stops:  # a stop token has priority over other ends
            self._finish(sample, Finish.STOP)
        elif sample.left < 1:
            self._finish(sample, Finish.LENGTH)
        elif sample.ids and finish == Finish.STOP:
            self._finish(sample, Finish.STOP)
        elif not self._ends:  # the budget of the request is spent, not that of the server
            self._send_again(sample, why)

    def _end_here(self, sample: ServerRequest) -> None:
        """End a sample where the server would not. All its tokens have the version under which it was sent."""
        rid = str(sample.rid)
        self._link.drop(rid)
        self._server.abort(rid)
        self._settle(sample, [[sample.since, len(sample.new_ids)]])
        sample.cut()
        self._finish(sample, Finish.STOP)

    def _broke(self, sample: ServerRequest, ended: StreamEnded) -> None:
        """Handle a stream that ended before its sample."""
        if ended.status in (0, 200):
            self._lose_piece(sample, f"the stream broke off: {ended.text or 'it has no end'}")
            return
        self._settle(sample, [])
        self._send_again(sample, f"it answers {ended.status}: {ended.text}")

    def _lose_piece(self, sample: ServerRequest, why: str) -> None:
        """A piece ended by an error: if the server answers, the sample goes on from its known tokens."""
        try:
            self._server.ping()
        except EngineLost as error:
            self._hear_why()
            raise EngineLost(f"{why}; {error}") from None
        self._server.abort(str(sample.rid))  # it may still sample
        sample.keep_sure()
        self._settle(sample, [[sample.since, len(sample.new_ids)]])
        self._conclude(sample, Finish.ABORT, why)

    def _hear_why(self) -> None:
        """Raises EngineLost with the last log line of the server if it has ended, which is known a moment later."""
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            self._server.check()
            time.sleep(WAIT_S)

    def _settle(self, sample: ServerRequest, spans: list[list[int]]) -> None:
        del self._by_rid[str(sample.rid)]
        if sample.new_ids:
            sample.n_sent_again = 0
        sample.settle(spans)

    def _send_again(self, sample: ServerRequest, why: str) -> None:
        """Queue the sample again with its tokens so far, up to SENT_AGAIN times."""
        sample.start_anew()
        sample.n_sent_again += 1
        if sample.n_sent_again > SENT_AGAIN:
            raise EngineLost(f"the server at {self._link.url} has ended a sample {SENT_AGAIN + 1} times: {why}")

    def _finish(self, sample: ServerRequest, finish: str) -> None:
        del self._samples[sample.request.key]
        self._ended.append(sample.completion(str(finish)))

    def _take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    # updates

    def _stop(self, *, keep: bool) -> None:
        """Pause the server, or end all its samples."""
        self._hear(0.0)
        for sample in self._by_rid.values():
            sample.mark()
        if self._server.pauses:
            self._server.pause(keep=keep)
        if not (self._server.pauses and self._server.stamps):
            self._end_pieces()

    def _end_pieces(self) -> None:
        """End all samples at the server. Their tokens get the version under which they were sent."""
        began, asked = time.monotonic(), -ABORT_AGAIN_S
        self._ends = True
        while self._by_rid:
            passed_s = time.monotonic() - began
            if passed_s > self._call_timeout_s:
                raise EngineLost(
                    f"a server must end aborted samples within {self._call_timeout_s:g} s: {self._link.url} still "
                    f"has {len(self._by_rid)} samples"
                )
            if passed_s >= asked + ABORT_AGAIN_S:
                asked = passed_s
                self._server.abort_all()
            self._server.check()
            self._hear(WAIT_S)
        self._ends = False
