"""CUDA graphs of decode steps: recorded once and replayed without launching each kernel from Python.

A recording has fixed addresses and sizes. So a step reads its tokens and positions from fixed buffers. The number of
rows is rounded up to a recorded width (the padding rows begin at position 0, and nothing reads their results), the
number of attended positions to a multiple of REACH. A recording belongs to one set of weights and one KV cache. There
is one for each of the two sets of weights of a generator; other addresses are recorded anew.

Several steps in a row need no answer from the device between them: another recording, one for each width, draws the
next tokens and puts them and their positions where the step reads them (`decode_on`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from loguru import logger
from torch import Tensor

from actors.engines.builtin.dense_cache import DecodeView, DenseCache
from actors.engines.builtin.sampler import invert, sample
from areal_cpu.decode_step import Draws
from areal_cpu.fused_llama import ROUGH, TOLERANCE, FusedLlama

MOST_AHEAD = 16  # decode steps in a row without an answer from the device, at most
REACH = 256  # attention reads a multiple of this many positions
MOST_SEEN = 4096  # steps whose occurrences are counted
WARM = 3  # calls before a recording: libraries make what they need
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Step = Callable[[], Tensor]  # (width, V) logits; reads and writes only memory that stays where it is
Memory = tuple[int, int]  # of keys and values, and of rotations: by how often each was made anew
Key = tuple[int, int, int, Memory]  # width, reach, weights, the rest


class Recorder(Protocol):
    """Records what a step does to memory, to be done again."""

    def __call__(self, step: Step) -> Step: ...


class CudaRecorder:
    """CUDA graphs, with one pool of memory: one of them runs at a time, and what it leaves is read before the next."""

    def __init__(self) -> None:
        self._reserve()

    def _reserve(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # for all recordings, as cuBLAS keeps a workspace for each stream that it was called on. Two, since a recording
        # that goes gives its stream's back, which therefore must lie in the pool: made while recording, never before
        self._warm, self._stream = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        before = torch.cuda.current_stream()
        self._warm.wait_stream(before)
        with torch.cuda.stream(self._warm):
            for _ in range(WARM):
                step()
        before.wait_stream(self._warm)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads receive weights meanwhile: their calls are not part of this
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                logits_nV = step()
        except RuntimeError:
            self._recover(before)
            raise

        def again() -> Tensor:
            graph.replay()
            return logits_nV

        return again

    def _recover(self, before: torch.cuda.Stream) -> None:
        """From a recording that broke off: torch leaves its stream current and its random generator mid-way (2.11)."""
        torch.cuda.set_stream(before)
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # of a pool that is not being filled
            torch._C._cuda_endAllocateToPool(device, self._pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        self._reserve()
        torch.cuda.synchronize()


class CudaGraphs:
    """Decodes by recordings where there is one, else by the plain forward, and records what comes often."""

    def __init__(
        self,
        forward: FusedLlama,
        slots: DenseCache,
        *,
        dtype: torch.dtype,
        recorder: Recorder,
        n_seen: int = 4,
        n_kept: int = 48,
    ) -> None:
        """Record a step of a width and reach after `n_seen` occurrences; keep `n_kept` recordings at most."""
        self._n_seen, self._n_kept = n_seen, n_kept
        self._forward, self._slots, self._dtype, self._record = forward, slots, dtype, recorder
        self._widths = [w for w in WIDTHS if w < slots.n_slots] + [slots.n_slots]
        self._ids: dict[int, Tensor] = {}  # by width: (n, 1)
        self._positions: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}  # of all recordings of a width: one of them runs at a time
        self._drawings: dict[int, Drawing] = {}  # by width
        self._kept: dict[Key, Step] = {}
        self._seen: Counter[Key] = Counter()
        self._is_broken = False

    def decode(self, ids: Sequence[int], positions: Sequence[int], weights: int) -> Tensor | None:
        """(n, V) logits of rows 0..n-1 until the next call; None: not recorded. `weights`: same number, same memory."""
        again = self._step_at(ids, positions, weights, 1)
        return None if again is None else again()[: len(ids)]

    def decode_on(
        self, ids: Sequence[int], positions: Sequence[int], weights: int, draws: Draws
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Next tokens and log-probs of each row, as many as `draws` has steps, wherever it ends; None: not recorded."""
        n_steps = len(draws.uniforms)
        again = self._step_at(ids, positions, weights, n_steps)
        if again is None:
            return None
        width = self._width(len(ids))
        if width not in self._drawings:
            self._record_drawing(width, again, len(ids), draws)
            self._fill(width, ids, positions)  # what it drew is not wanted
        if self._is_broken:
            return None
        drawing = self._drawings[width]
        drawing.begin(draws)
        for _ in range(n_steps):
            again()
            drawing.draw()
        return drawing.drawn(n_steps, len(ids))

    def _record_drawing(self, width: int, again: Step, n: int, draws: Draws) -> None:
        """One that draws what the sampler draws; no more recordings where that cannot be had."""
        try:
            logits_nV = again()
            drawing = Drawing(logits_nV, self._ids[width], self._positions[width], self._record)
            drawing.begin(draws)
            drawing.draw()
            found, _ = drawing.drawn(1, n)
            expected, _ = sample(
                logits_nV[:n], temperatures=draws.temperatures, top_ps=[1.0] * n, uniforms=draws.uniforms[0]
            )
        except RuntimeError as error:
            self._give_up(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        if found != [[token] for token in expected]:
            self._give_up("it draws other tokens than the sampler")
        self._drawings[width] = drawing

    @property
    def is_broken(self) -> bool:
        """No step is recorded any more."""
        return self._is_broken

    def _width(self, n: int) -> int:
        return next(w for w in self._widths if w >= n)

    def _step_at(self, ids: Sequence[int], positions: Sequence[int], weights: int, n_steps: int) -> Step | None:
        """The recorded step for these rows, whose buffers are filled; None: not recorded."""
        if self._is_broken or not self._slots.n_made:
            return None
        width = self._width(len(ids))
        reach = min(-(-(max(positions) + n_steps) // REACH) * REACH, self._slots.capacity)
        key = (width, reach, weights, (self._slots.n_made, self._forward.reserve(reach)))
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        if key not in self._kept and self._seen[key] < self._n_seen:
            return None
        self._fill(width, ids, positions)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)  # the newest again
        return self._kept.get(key) or self._recorded(key)

    def _fill(self, width: int, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Into the buffers that recordings of this width read."""
        if width not in self._ids:
            device = self._forward.device
            self._ids[width] = torch.zeros(width, 1, dtype=torch.long, device=device)
            self._positions[width] = torch.zeros(width, 1, dtype=torch.long, device=device)
        rest = [0] * (width - len(ids))
        self._ids[width].copy_(torch.tensor([*ids, *rest])[:, None])
        self._positions[width].copy_(torch.tensor([*positions, *rest])[:, None])

    def _recorded(self, key: Key) -> Step | None:
        """A recording that does what the plain step does; None, and no more of them, where that cannot be had."""
        width, reach, _, memory = key
        ids_n1, position_n1 = self._ids[width], self._positions[width]

        def step() -> Tensor:
            position_n = position_n1[:, 0]
            unseen_nL = torch.arange(reach, device=position_n.device) > position_n1
            mask_nL = torch.zeros(unseen_nL.shape, dtype=self._dtype, device=position_n.device)
            mask = mask_nL.masked_fill_(unseen_nL, torch.finfo(self._dtype).min)[:, None, None]
            logits_nV = self._forward(ids_n1, position_n1, reach, mask, DecodeView(self._slots, position_n, reach))
            if width not in self._logits:  # made by the first step, which is not recorded
                self._logits[width] = torch.empty_like(logits_nV)
            return self._logits[width].copy_(logits_nV)

        try:
            expected_nV = step().clone()
            again = self._record(step)
            gap, bound = distance(again(), expected_nV, self._dtype)
        except RuntimeError as error:
            self._give_up(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        if not gap <= bound:  # NaN differs, too
            self._give_up(f"its logits differ by {gap:.2e}, more than {bound:.1e}")
            return None
        for old in [old for old in self._kept if old[3] != memory]:
            del self._kept[old]  # what it reads and writes is no more
        while len(self._kept) >= self._n_kept:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._seen[oldest]  # it has to come often again
        self._kept[key] = again
        return again

    def _give_up(self, why: str) -> None:
        logger.warning("decode steps are not recorded, which is slower: {}", why)
        self._is_broken = True
        self._kept.clear()


class Drawing:
    """Draws a token for each row on the device by inverse transform, as `sampler.sample` does, from recorded logits."""

    def __init__(self, logits_nV: Tensor, ids_n1: Tensor, position_n1: Tensor, record: Recorder) -> None:
        """A drawn token goes to `ids_n1`, and `position_n1` moves on by one."""
        self._logits_nV, self._ids_n1, self._position_n1 = logits_nV, ids_n1, position_n1
        n, device = len(ids_n1), ids_n1.device
        self._heat_n1 = torch.ones(n, 1, device=device)
        self._is_greedy_n = torch.zeros(n, dtype=torch.bool, device=device)
        self._uniform_Sn = torch.zeros(MOST_AHEAD, n, dtype=torch.float64, device=device)
        self._last_n1 = torch.zeros_like(position_n1)  # positions never pass these, nor does the step its last place
        self._step_1 = torch.zeros(1, dtype=torch.long, device=device)
        self._found_S2n = torch.zeros(MOST_AHEAD, 2, n, dtype=torch.float64, device=device)
        self.draw = record(lambda: self._draw())

    def begin(self, draws: Draws) -> None:
        """For the first step of `draws`; tokens and positions are filled."""
        n = len(draws.temperatures)
        heats = torch.tensor(draws.temperatures)
        self._heat_n1[:n, 0].copy_(torch.where(heats > 0, heats, 1.0))
        self._is_greedy_n[:n].copy_(heats == 0)
        self._uniform_Sn[: len(draws.uniforms), :n].copy_(torch.tensor(draws.uniforms, dtype=torch.float64))
        torch.add(self._position_n1, len(draws.uniforms) - 1, out=self._last_n1)
        self._step_1.zero_()

    def _draw(self) -> Tensor:
        weight_nV = torch.softmax(self._logits_nV.float() / self._heat_n1, dim=-1)
        token_n = invert(weight_nV, self._uniform_Sn.index_select(0, self._step_1)[0])
        token_n = torch.where(self._is_greedy_n, self._logits_nV.argmax(-1), token_n)
        logp_n = weight_nV.gather(-1, token_n[:, None])[:, 0].log()
        self._found_S2n.index_copy_(0, self._step_1, torch.stack([token_n.double(), logp_n.double()])[None])
        self._ids_n1.copy_(token_n[:, None])
        torch.minimum(self._position_n1 + 1, self._last_n1, out=self._position_n1)
        self._step_1.add_(1).clamp_(max=MOST_AHEAD - 1)
        return token_n

    def drawn(self, n_steps: int, n: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs of the first n rows, by row. Waits for the device."""
        found_2nS = self._found_S2n[:n_steps, :, :n].permute(1, 2, 0).cpu()
        return found_2nS[0].long().tolist(), found_2nS[1].tolist()


def distance(found: Tensor, expected: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Largest difference of logits, and how large it may be."""
    bound = TOLERANCE.get(dtype, ROUGH) * max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()), bound
