"""The built-in engine: continuous batching over a Hugging Face causal LM, in the caller's thread.

A live request has a row of the KV cache: cached rows decode, others are prefilled. Versions are of sampling (I5).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from actors.engines.builtin import limits, own_forward
from actors.engines.builtin.cuda_graphs import MOST_AHEAD, CudaGraphs, CudaRecorder, Recorder
from actors.engines.builtin.dense_cache import DenseCache, decode_mask
from actors.engines.builtin.prefill import PrefillPack, plan
from actors.engines.builtin.prefix_cache import GivenKeys, PrefixCache
from actors.engines.builtin.sampler import sample
from actors.engines.builtin.sequence import Sequence, filtered_row, new_sequence
from actors.engines.protocol import Completion, Done, Request, check_order
from actors.models.loading import absent_ids
from actors.models.packed_attention import choose
from areal_bus.config.rollout import OnUpdate
from areal_bus.errors import EngineError
from areal_bus.messages import Finish
from areal_cpu.decode_step import Draws
from areal_cpu.fused_llama import disagreement, fused
from areal_cpu.matmul import stepped
from areal_cpu.paged_cache import PagedCache

Key = tuple[str, int, int, int, int]
Mask = Tensor | dict[str, Tensor] | None  # by kind of layer where a model has several
AHEAD_S = 0.02  # a generator decodes for about this long before it handles messages and weights


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine batches requests, and what an update does to them. Times in seconds."""

    n_slots: int  # requests that are decoded together
    on_update: OnUpdate = "recompute"  # "finish_old": of `VersionedEngine`; here as "recompute"
    prefill_tokens: int | None = None  # per forward pass; None: by device
    ahead_s: float = 0.0  # a `step` may decode several tokens per row for so long, if C or recorded steps can
    prefix_share: float = 0.0  # tokens of the prefix cache, of those of all slots at full length; 0: none


class BuiltinEngine:
    """An `Engine` over a model in this process. `version` belongs to its weights; None: it has no weights yet."""

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        *,
        stop_ids: frozenset[int],
        tokenizer: Any = None,
        version: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder` records decode steps; `tokenizer`: for stop strings. Raises EngineError: unsupported model."""
        limits.check_supported(model.config)
        self._limits = limits.Limits.of(model)
        self._model = model.eval().requires_grad_(False)
        self._parameters = dict(model.named_parameters())
        first = next(iter(self._parameters.values()))
        self._device, self._dtype = first.device, first.dtype
        choose(self._device)
        is_plain = self._limits.sees is None or self._limits.sees >= self._limits.most
        has_kernels = recorder is None  # a recording holds torch operations
        self._fused = fused(model, by_kernel=has_kernels) if is_plain else None
        self._is_checked = False  # the fused forward has been compared with the model
        self._budget = options.prefill_tokens or (512 if self._device.type == "cpu" else 4096)
        self._stop_ids, self._on_update, self._tokenizer = stop_ids, options.on_update, tokenizer
        self._absent = absent_ids(tokenizer, self._limits.vocabulary) - stop_ids
        self.n_slots = options.n_slots
        self._cache: DenseCache | PagedCache = DenseCache(options.n_slots)
        self._prefixes = PrefixCache()
        self._prefix_share, self._longest = options.prefix_share, 0  # of the requests so far
        self._has_turns = False  # requests that continue an episode have come
        self._graphs: CudaGraphs | None = None  # recorded decode steps, on CUDA
        self._recorder = recorder
        self._weights_hash = 0  # hash of the addresses of the weights
        self._rows: list[Sequence] = []
        self._waiting: deque[Request] = deque()
        self.keys: set[Key] = set()  # of rows and waiting requests
        self._version = version
        self._term = 0  # term of the version
        self._holds = False  # start no new request before the next update
        self._paused = False  # decode nothing before the next update
        self.n_tokens = 0
        self.ahead_s = options.ahead_s
        self._step_s = math.inf  # duration of the latest step without prefill
        self.prefill_s = 0.0  # seconds in prefills so far; measured on a CPU only
        self._n_decoded = 0  # rows of that step
        if version is not None:
            self._check_forward()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def n_live(self) -> int:
        return len(self._rows) + len(self._waiting)

    @property
    def n_rows(self) -> int:
        """Requests that are decoded."""
        return len(self._rows)

    @property
    def unbegun(self) -> list[Request]:
        """Waiting requests of episodes without a token."""
        return [request for request in self._waiting if request.key[4] == 0 and request.done is None]

    def displace(self, *, begun: bool) -> list[Request]:
        """Remove the requests without a token, and with `begun` all others, too; returns them with their tokens."""
        found = [row.continued() for row in self._rows] + list(self._waiting) if begun else self.unbegun
        for request in found:
            self.abort(request.key)
        return found

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it does not fit the model or its key is not unique."""
        if request.key in self.keys:
            raise EngineError(f"a request must have a key that no live request has: {request.key}")
        for broken, sentence in limits.rules(request, self._limits):
            if broken:
                raise EngineError(sentence)
        limits.check_settings(request, self._limits.vocabulary, self._tokenizer)
        self._waiting.append(request)
        self._has_turns |= request.key[4] > 0
        self._longest = max(self._longest, len(request.ids) + request.max_new_tokens)
        self.keys.add(request.key)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one or several tokens per row; returns the finished rows. Does nothing without weights."""
        if self._version is None or self._paused:
            return []
        self._admit(self._version)
        if not self._rows:
            return []
        began, only_decodes, n_tokens = time.perf_counter(), all(row.cached for row in self._rows), self.n_tokens
        n_steps = self._n_ahead() if only_decodes else 1
        tokens, logps = self._decode_several(n_steps) if n_steps > 1 else ([], [])
        if not tokens or not all(tokens):
            tokens, logps = self._sample(self._version)
        for row, new, of_new in zip(self._rows, tokens, logps, strict=True):
            row.add(new, of_new, self._version)
        self.n_tokens += sum(map(len, tokens))
        if only_decodes:
            self._step_s = (time.perf_counter() - began) * len(self._rows) / (self.n_tokens - n_tokens)
            self._n_decoded = len(self._rows)
        return self._collect()

    @torch.inference_mode()
    def abort(self, key: Key) -> Completion | None:
        """Remove a request; returns its tokens so far, or None if it is not live."""
        for request in self._waiting:
            if request.key == key:
                self._waiting.remove(request)
                self.keys.remove(key)
                return self._sequence(request, 0).completion(Finish.ABORT)
        for index, row in enumerate(self._rows):
            if row.request.key == key:
                self._free(index)
                return row.completion(Finish.ABORT)
        return None

    def newest(self, key: Key) -> int | None:
        """Version of the latest token of a request; None if it has none or is not live."""
        return done.spans[-1][0] if (done := self.so_far(key)) is not None else None

    def so_far(self, key: Key) -> Done | None:
        """A copy of the tokens of a live request; None if it has none or is not live."""
        for row in self._rows:
            if row.request.key == key and row.sampled:
                return row.so_far()
        return next((request.done for request in self._waiting if request.key == key), None)

    def parameters(self) -> Mapping[str, Tensor]:
        """Name -> live weight; a tied weight once."""
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def update(self, version: int, tensors: Mapping[str, Tensor], *, term: int = 0) -> Mapping[str, Tensor]:
        """Replace all weights, by pointer if on the device; returns reusable tensors. Raises EngineError, unchanged."""
        check_order(None if self._version is None else (self._term, self._version), term, version)
        limits.check_update(self._parameters, tensors)
        free = {}
        for name, parameter in self._parameters.items():
            new = tensors[name]
            if new.device == parameter.device:
                free[name], parameter.data = parameter.data, new
            else:
                parameter.data.copy_(new)
                free[name] = new
        if self._on_update != "keep" or term > self._term:  # never keep a KV cache of lost weights
            for row in self._rows:
                row.cached = False
        self._term, self._version, self._holds, self._paused = term, version, False, False
        self._prefixes.keep_only(())  # also of the same version: its weights may be others
        if self._fused is not None:
            self._fused.bind()
        self._check_forward()
        self._weights_hash = self._hash_weights()
        return free

    def hold(self) -> bool:
        """Start no episode before the next update; returns whether one is in flight."""
        self._holds = True
        return bool(self._rows) or any(request.key[4] for request in self._waiting)

    def pause(self) -> None:
        """Decode nothing before the next update."""
        self._paused = True

    def check(self) -> None:
        """Health check: no other process is involved."""

    def close(self) -> None:
        """Nothing to stop."""

    def _check_forward(self) -> None:
        """Use the fused forward if it equals the model's. Raises ConfigError if the model's own cannot be used."""
        if self._is_checked:
            return
        self._is_checked = True
        why = None if self._fused is None else disagreement(self._model, self._fused)
        if why is not None:
            logger.warning("using the model's own forward, which is slower: with the fused one {}", why)
            self._fused = None
        if self._fused is None:
            own_forward.check(self._plain(), self._model, most=self._limits.most, n_words=self._limits.vocabulary)
        elif self._fused.by_kernel:
            self._cache = PagedCache(*self._fused.heads)
        elif isinstance(self._cache, DenseCache) and (self._recorder or self._device.type == "cuda"):
            recorder = self._recorder or CudaRecorder()
            self._graphs = CudaGraphs(self._fused, self._cache, dtype=self._dtype, recorder=recorder)

    def _plain(self) -> "BuiltinEngine":
        """A fresh engine over the same weights that uses the model's own forward, unchecked."""
        engine = BuiltinEngine(self._model, EngineOptions(n_slots=3), stop_ids=frozenset())
        engine._fused, engine._is_checked, engine._version = None, True, 0
        return engine

    def _hash_weights(self) -> int:
        """Hash of the addresses of the weights."""
        return hash(tuple(parameter.data_ptr() for parameter in self._parameters.values()))

    def _admit(self, version: int) -> None:
        """Move waiting requests to free rows. A prompt that another row has cached with these weights is copied."""
        new = [self._sequence(request, version) for request in self._take()]
        if not new:
            return
        holders = {row.prompt: at for at, row in enumerate(self._rows) if row.cached and row.filled == version}
        for row in new:
            row.cached = row.prompt in holders and not row.sampled
        new.sort(key=lambda row: not row.cached)  # cached rows come first
        for row in new:
            if row.cached:
                row.n_reused = row.length - 1
                self._cache.copy(holders[row.prompt], len(self._rows), row.n_reused)
            self._rows.append(row)

    def _sequence(self, request: Request, version: int) -> Sequence:
        return new_sequence(request, version=version, stop_ids=self._stop_ids, tokenizer=self._tokenizer)

    def _take(self) -> list[Request]:
        """Requests for the free rows: later turns of an episode first; only those while the engine holds."""
        n_free = self.n_slots - len(self._rows)
        if n_free < 1:
            return []
        may_begin = [request for request in self._waiting if request.key[4] or not self._holds]
        taken = sorted(may_begin, key=lambda request: not request.key[4])[:n_free]
        for request in taken:
            self._waiting.remove(request)
        return taken

    def _logits(self, version: int, lengths: list[int]) -> Tensor:
        """(n, V) logits of the next token of every row."""
        n_cached = sum(row.cached for row in self._rows)
        self._cache.reserve(lengths, n_cached)
        parts = [self._decode([length - 1 for length in lengths[:n_cached]])] if n_cached else []
        order = list(range(n_cached))
        fresh = self._rows[n_cached:]
        began = time.perf_counter()
        sequences = ((n_cached + i, row.prompt, row.sampled) for i, row in enumerate(fresh))
        for pack in plan(sequences, self._budget, partial(self._found, version)):
            parts.append(self._prefill(pack))
            order.extend(pack.rows)
            self._keep_prompts(version, pack)
        if fresh and self._device.type == "cpu":  # kernels of a GPU end later
            self.prefill_s += time.perf_counter() - began
        for row in fresh:
            row.cached, row.filled = True, version
        logits_nV = torch.cat(parts) if len(parts) > 1 else parts[0]
        if order == list(range(len(order))):
            return logits_nV
        return logits_nV[torch.tensor(order, device=self._device).argsort()]

    def _found(self, version: int, prompt: TokenIds[int]) -> list[int]:
        """The blocks of the prefix cache that a prompt begins with, without its last token: logits follow it."""
        return self._prefixes.find((self._term, version), prompt[:-1])

    def _allow_prefixes(self) -> None:
        """As many tokens as the share says. Without episodes of several turns no more than the slots leave free."""
        full = self.n_slots * self._longest
        free = full if self._has_turns else full - sum(row.length for row in self._rows)
        self._prefixes.allow(min(int(self._prefix_share * full), free))

    def _keep_prompts(self, version: int, pack: PrefillPack) -> None:
        self._allow_prefixes()
        for row, n in zip(pack.rows, pack.reused, strict=True):
            if not self._rows[row].spans:
                self._rows[row].n_reused = n
        for tree in pack.trees:
            read = partial(self._cache.read, tree.branches[0].row)
            self._prefixes.keep((self._term, version), tree.prompt, read, always=False)

    def _keep_turn(self, index: int) -> None:
        """Keep all tokens of a row that ends, for the next turn of its episode. Only of one version's weights."""
        row, version = self._rows[index], self._version
        if self._has_turns and version is not None and row.cached and row.filled == version:
            self._allow_prefixes()
            tokens = [*row.prompt, *row.sampled][:-1]
            self._prefixes.keep((self._term, version), tokens, partial(self._cache.read, index), always=True)

    def _sample(self, version: int) -> tuple[list[list[int]], list[list[float]]]:
        """The next token of every row, and its log-prob."""
        rows = self._rows
        lengths = [row.length for row in rows]
        tokens, logps = sample(
            self._logits(version, lengths),
            temperatures=[row.request.temperature for row in rows],
            top_ps=[row.request.top_p for row in rows],
            uniforms=[row.uniforms.at(length) for row, length in zip(rows, lengths, strict=True)],
            filters={at: filtered_row(row) for at, row in enumerate(rows) if row.is_filtered},
            absent=self._absent,
        )
        return [[token] for token in tokens], [[logp] for logp in logps]

    def _n_ahead(self) -> int:
        """Number of decode steps in one call: within `ahead_s` and the budget of every row, by graphs of one row."""
        n = min(MOST_AHEAD, int(self.ahead_s / self._step_s))
        if n < 2 or len(self._rows) > self._n_decoded or self._fused is None:
            return 1
        if any(row.request.top_p < 1 or not row.is_plain for row in self._rows):
            return 1
        left = [row.n_left for row in self._rows]
        if self._graphs is not None:
            return 1 if self._graphs.is_broken else min(n, max(left))
        by_call = isinstance(self._cache, PagedCache) and self._fused.steps_on(len(self._rows))
        return min(n, *left) if by_call else 1

    def _decode_several(self, n_steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """At most `n_steps` next tokens and log-probs of every row, none behind its end; none for a row, or nothing,
        where a single step has to draw.
        """
        rows = self._rows
        lengths = [row.length for row in rows]
        positions = [length - 1 for length in lengths]
        self._cache.reserve([length + n_steps - 1 for length in lengths], len(rows))
        uniforms = zip(
            *(row.uniforms.run(length, n_steps) for row, length in zip(rows, lengths, strict=True)), strict=True
        )
        draws = Draws([row.request.temperature for row in rows], list(uniforms), self._stop_ids | self._absent)
        last = [row.last for row in rows]
        if self._graphs is not None:
            found = self._graphs.decode_on(last, positions, self._weights_hash, draws)
            return ([], []) if found is None else self._cut(*found, draws.stop_ids)
        if self._fused is None or not isinstance(self._cache, PagedCache):
            raise RuntimeError("several steps in one call need the fused forward and the paged cache")
        view = self._cache.steps(positions, n_steps=n_steps)
        tokens, logps = self._fused.decoded_on(last, view, draws)
        if any(of_row[-1] in self._absent for of_row in tokens):  # the last step is drawn again, without them
            return [of_row[:-1] for of_row in tokens], [of_row[:-1] for of_row in logps]
        return tokens, logps

    def _cut(
        self, tokens: list[list[int]], logps: list[list[float]], ends: Collection[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Each row up to its own end; an absent token is drawn again, without the absent ones."""
        for row, of_row, logps_of in zip(self._rows, tokens, logps, strict=True):
            n = min(row.n_left, next((place for place, token in enumerate(of_row, 1) if token in ends), len(of_row)))
            n -= of_row[n - 1] in self._absent
            del of_row[n:], logps_of[n:]
        return tokens, logps

    def _decode(self, positions: list[int]) -> Tensor:
        """(n, V) logits of the cached rows, whose last tokens are at these positions."""
        rows = self._rows[: len(positions)]
        if self._graphs is not None:
            recorded = self._graphs.decode([row.last for row in rows], positions, self._weights_hash)
            if recorded is not None:
                return recorded
        view, mask = self._cache.decoding(positions, self._dtype, self._device)
        if self._fused is not None:
            return self._fused.decoded([row.last for row in rows], positions, view, mask)
        position_n1 = torch.tensor(positions, device=self._device)[:, None]
        ids_n1 = torch.tensor([[row.last] for row in rows], device=self._device)
        if self._limits.sees is not None:
            sliding = self._by_layer(partial(decode_mask, positions, self._dtype, self._device))
            return self._forward(ids_n1, position_n1, sliding, view, 1)[:, 0]
        return self._forward(ids_n1, position_n1, mask, view, 1)[:, 0]

    def _prefill(self, pack: PrefillPack) -> Tensor:
        where = None
        if self._fused is not None and self._fused.packs_by_kernel:
            pack = pack.filled(stepped(pack.n_computed, self._device))
            where = pack.sequences()
        mask = pack.mask(self._dtype, self._device) if where is None else None
        ids_1T = torch.tensor([pack.ids], device=self._device)
        position_1T = torch.tensor([pack.positions], device=self._device)
        last = torch.tensor(pack.last, device=self._device)
        given = GivenKeys(len(pack.ids), pack.given, self._prefixes) if pack.given else None
        if given is not None:
            ids_1T, position_1T = ids_1T[:, given.computed_T], position_1T[:, given.computed_T]
            last = torch.searchsorted(given.computed_T, last)
        view = self._cache.filling(pack.pieces, given)
        if self._fused is not None:
            return self._fused(ids_1T, position_1T, max(pack.positions) + 1, mask, view, last, where)
        if self._limits.sees is not None:
            sliding = self._by_layer(partial(pack.full_mask, self._dtype, self._device))
            return self._forward(ids_1T, position_1T, sliding, view, last)[0]
        return self._forward(ids_1T, position_1T, mask, view, last)[0]

    def _by_layer(self, made: Callable[..., Tensor]) -> Mask:
        """The masks of a model with sliding attention, by kind of layer if it has both; `made(window=...)` is one."""
        sliding = made(window=self._limits.sees)
        return {"full_attention": made(), "sliding_attention": sliding} if self._limits.is_mixed else sliding

    def _forward(self, ids: Tensor, positions: Tensor, mask: Mask, view: Any, keep: Any) -> Tensor:
        """The forward pass of the original model."""
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=view,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits

    def _collect(self) -> list[Completion]:
        """Remove and return the finished rows, in row order."""
        done = []
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            finish = row.ended()
            if finish is not None:
                done.append(row.completion(finish))
                self._keep_turn(index)
                self._free(index)
        return done[::-1]

    def _free(self, index: int) -> None:
        """Free a row; the last row takes its index, so that live rows stay contiguous."""
        last = len(self._rows) - 1
        self.keys.remove(self._rows[index].request.key)
        self._cache.drop(index, last, self._rows[last].length - 1 if self._rows[last].cached else 0)
        self._rows[index] = self._rows[last]
        self._rows.pop()
