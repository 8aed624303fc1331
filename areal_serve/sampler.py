"""Samples from several weights with one engine: one after the other, by pointer. Without processes or HTTP.

Weights are those of the base, or of a saved folder: adapters, which are merged into copies of the base's layers, or a
whole model. T tokens of a prompt, V vocabulary, K likeliest tokens.
"""

import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.builtin.sampler import invert
from actors.engines.builtin.sequence import Uniforms
from actors.engines.protocol import Completion, Request, SamplingControls
from actors.models.loading import load_base, stop_ids
from actors.models.lora import merged, names_of
from actors.models.model_config import PREFIX, WEIGHTS_FILE, is_adapter_folder
from areal_bus.config.sections import Config
from areal_bus.errors import EngineError
from areal_bus.weights.snapshot import digest_of
from areal_serve.rejection import Rejected, fault
from areal_serve.trainer import ALPHA, WEIGHTS, read_meta
from areal_serve.versions import mark
from areal_serve.wire import sample_output

BASE = ""  # the weights of the base model
KEPT = 2  # merged weights that stay in memory, beside the base
TURN_S = 2.0  # requests of other weights wait at most about this long before the engine takes no more of these
LOGITS = 1 << 26  # most logits of a scoring pass at a time
MASKED = -99999.0  # log-prob of a place without a likeliest token, as the SDK has it
Key = tuple[str, int, int, int, int]


@dataclass(slots=True)
class Job:
    """One sampling request."""

    id: str
    weights: str  # folder, or BASE
    prompt: list[int]
    n_samples: int
    seed: tuple[int, ...]
    options: Mapping[str, Any]  # of the request: sampling_params and what is to be scored
    came: float = 0.0
    version: int = 0  # of the weights: optimizer steps of their model
    done: dict[int, Completion] = field(default_factory=dict)


class Sampler:
    """Takes requests, returns (id, reply) as they end. A reply: {"result": bytes} or {"error": text}."""

    def __init__(self, config: Config, folder: str, tokenizer: Any, *, device: str) -> None:
        model = load_base(config, folder, device)
        self._model = model
        self._base: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
        n_slots = config.rollout.max_concurrent_rollouts
        options = EngineOptions(n_slots=n_slots, on_update="recompute", ahead_s=AHEAD_S)
        stops = stop_ids(model, tokenizer)
        self._engine = BuiltinEngine(model, options, stop_ids=stops, tokenizer=tokenizer, version=0)
        self._device, self._n_slots, self._version = torch.device(device), n_slots, 0
        self._held: OrderedDict[str, tuple[int, Mapping[str, Tensor]]] = OrderedDict()  # version, tensors
        self._at = BASE
        self._waiting: deque[Job] = deque()
        self._live: dict[int, Job] = {}  # by uid
        self._n_jobs = 0
        self.max_tokens = int(self._engine._limits.most)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._live

    def submit(self, job: Job) -> None:
        job.came = time.monotonic()
        self._waiting.append(job)

    def cancel(self, id: str) -> None:
        """Drop a request; it gets no reply."""
        self._waiting = deque(job for job in self._waiting if job.id != id)
        for uid, job in list(self._live.items()):
            if job.id == id:
                self._drop(uid)

    def step(self) -> list[tuple[str, dict[str, Any]]]:
        """Admit requests, decode a few tokens; the replies that are ready."""
        replies = self._admit()
        for completion in self._engine.step():
            job = self._live[completion.key[1]]
            job.done[completion.key[3]] = completion
            if len(job.done) == job.n_samples:
                del self._live[completion.key[1]]
                replies.append((job.id, self._answer(job)))
        return replies

    def _answer(self, job: Job) -> dict[str, Any]:
        try:
            return self._reply(job)
        except Exception as error:  # noqa: BLE001  the other requests go on
            traceback.print_exc()
            return {"error": fault(error)}

    def _admit(self) -> list[tuple[str, dict[str, Any]]]:
        """Start requests of the weights that are in use; without any, take those of the oldest request."""
        replies: list[tuple[str, dict[str, Any]]] = []
        while self._waiting:
            oldest = self._waiting[0]
            is_due = oldest.weights != self._at and time.monotonic() - oldest.came > TURN_S
            job = None if is_due else next((job for job in self._waiting if job.weights == self._at), None)
            if self._live and (job is None or self._engine.n_live + job.n_samples > self._n_slots):
                break
            job = job or oldest
            self._waiting.remove(job)
            try:
                job.version = self._use(job.weights)
                self._start(job)
            except (Rejected, EngineError) as error:
                replies.append((job.id, {"error": str(error)}))
            except Exception as error:  # noqa: BLE001  the other requests go on
                traceback.print_exc()
                replies.append((job.id, {"error": fault(error)}))
        return replies

    def _use(self, weights: str) -> int:
        """Put these weights under the engine, which is idle unless it has them. Their version. Raises Rejected for a
        folder that does not fit.
        """
        if weights != BASE and weights not in self._held:
            self._held[weights] = self._load(Path(weights))
            while len(self._held) > KEPT:
                self._held.popitem(last=False)
        version, tensors = (0, self._base) if weights == BASE else self._held[weights]
        if weights == self._at:
            self._held.move_to_end(weights) if weights in self._held else None
            return version
        self._version += 1
        self._engine.update(self._version, tensors)
        self._at = weights
        return version

    @torch.no_grad()
    def _load(self, folder: Path) -> tuple[int, Mapping[str, Tensor]]:
        """Version and tensors by name of a saved folder, verified by its digest; layers without adapters are those of
        the base.
        """
        meta = read_meta(folder)
        has_adapters = is_adapter_folder(folder)
        found = load_file(str(folder / (WEIGHTS_FILE if has_adapters else WEIGHTS)))
        found = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        if digest_of(dict(found)) != meta["digest"]:
            raise Rejected(f"checksum mismatch in {folder.name}: the weights on disk are not those that were saved")
        if not has_adapters:
            whole = {name: found[name].to(self._device, base.dtype) for name, base in self._base.items()}
            return meta["n_steps"], whole
        tensors, scale = dict(self._base), ALPHA / meta["lora"]["rank"]
        suffix = names_of("")[0]
        for layer in [name.removesuffix(suffix) for name in found if name.endswith(suffix)]:
            a_RE, b_FR = (found[name].to(self._device) for name in names_of(layer))
            base = self._base[f"{layer}.weight"]
            tensors[f"{layer}.weight"] = merged(base, a_RE, b_FR, scale).to(base.dtype)
        return meta["n_steps"], tensors

    def _start(self, job: Job) -> None:
        params = job.options["sampling_params"]
        budget = params.get("max_tokens")
        left = self.max_tokens - len(job.prompt)
        if budget is None:
            budget = max(left, 1)
        if left < 1 or budget > left:
            raise Rejected(
                f"prompt too long: {len(job.prompt)} tokens and max_tokens {budget} exceed the context of "
                f"{self.max_tokens}"
            )
        targets, vocabulary = (
            job.options.get("target_prompt_logprobs"),
            self._model.get_input_embeddings().num_embeddings,
        )
        if targets is not None and targets.max() >= vocabulary:
            raise Rejected(f"unknown token {targets.max()} in target_prompt_logprobs: ids are below {vocabulary}")
        stop = params.get("stop")
        own = [stop] if isinstance(stop, str) else stop or []
        controls = SamplingControls(
            top_k=max(0, params.get("top_k", -1)),
            stop=tuple(one for one in own if isinstance(one, str)),
            stop_token_ids=tuple(one for one in own if isinstance(one, int)),
            ignore_eos=stop is not None,
        )
        uid, self._n_jobs = self._n_jobs, self._n_jobs + 1
        self._live[uid] = job
        try:
            for sample in range(job.n_samples):
                self._engine.submit(
                    Request(
                        key=("", uid, 0, sample, 0),
                        ids=job.prompt,
                        seed=(*job.seed, sample),
                        max_new_tokens=budget,
                        temperature=float(params.get("temperature", 1.0)),
                        top_p=float(params.get("top_p", 1.0)),
                        controls=controls,
                    )
                )
        except Exception:
            self._drop(uid)
            raise

    def _drop(self, uid: int) -> None:
        job = self._live.pop(uid)
        for sample in range(job.n_samples):
            self._engine.abort(("", uid, 0, sample, 0))

    def _reply(self, job: Job) -> dict[str, Any]:
        n_top = int(job.options.get("topk_sample_logprobs") or 0)
        sequences = []
        for sample in range(job.n_samples):
            done = job.done[sample]
            one = {"ids": done.ids, "logps": done.logps, "stop": done.finish == "stop", "version": job.version}
            if n_top:
                scored = self._score([*job.prompt, *done.ids], first=len(job.prompt), n_top=n_top)
                one["top"] = (scored["top_ids"], scored["top_logps"])
            sequences.append(one)
        marks = [mark(job.prompt, job.done[sample].ids) for sample in range(job.n_samples)]
        result = sample_output(sequences, self._prompt_scores(job))
        facts = {"n_tokens": sum(n for _, n in marks), "version": job.version}
        return {"result": result, "version": job.version, "marks": marks, "facts": facts}

    def _prompt_scores(self, job: Job) -> dict[str, Any]:
        """What the request wants to know of its prompt."""
        options, n = job.options, len(job.prompt)
        found: dict[str, Any] = {}
        n_top, n_drawn = (int(options.get(name) or 0) for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k"))
        targets = options.get("target_prompt_logprobs")
        if not (options.get("prompt_logprobs") or n_top or n_drawn or targets is not None):
            return found
        heat = float(options["sampling_params"].get("temperature", 1.0)) or 1.0
        drawn = (n_drawn, job.seed, heat) if n_drawn else None
        scored = self._score(job.prompt, first=1, n_top=n_top, targets=targets, drawn=drawn)
        is_kept = np.arange(n) >= max(1, n - int(options.get("prompt_logprobs_last_n") or n))
        if options.get("prompt_logprobs"):
            found["logps"] = np.where(is_kept, np.concatenate([[np.nan], scored["logps"]]), np.nan)
        if n_top:
            ids_TK, logps_TK = np.zeros((n, n_top), np.int32), np.full((n, n_top), MASKED, np.float32)
            ids_TK[1:], logps_TK[1:] = scored["top_ids"], scored["top_logps"]
            ids_TK[~is_kept], logps_TK[~is_kept] = 0, MASKED
            found["top"] = (ids_TK, logps_TK)
        if targets is not None:
            found["targets"] = scored["targets"]
        if n_drawn:
            found["others"] = (scored["drawn"], scored["drawn_logps"])
        return found

    @torch.inference_mode()
    def _score(
        self,
        ids: Sequence[int],
        *,
        first: int,
        n_top: int = 0,
        targets: np.ndarray[Any, Any] | None = None,
        drawn: tuple[int, tuple[int, ...], float] | None = None,
    ) -> dict[str, Any]:
        """Log-probs at temperature 1 of the tokens from `first` on, by a forward pass of its own; float32."""
        parts: list[dict[str, Any]] = []
        at = first
        for logp_nV in self._logprobs(ids, first):
            n = len(logp_nV)
            token_n = torch.tensor(ids[at : at + n], device=logp_nV.device)
            part: dict[str, Any] = {"logps": logp_nV.gather(1, token_n[:, None])[:, 0].cpu().numpy()}
            if n_top:
                top = logp_nV.topk(min(n_top, logp_nV.shape[1]))
                part |= {"top_ids": _wide(top.indices, n_top, 0), "top_logps": _wide(top.values, n_top, MASKED)}
            if targets is not None:
                rows_nK = torch.from_numpy(targets[at - first : at - first + n]).to(logp_nV.device)
                value_nK = logp_nV.gather(1, rows_nK.clamp(min=0)).where(rows_nK >= 0, 0.0)
                part["targets"] = value_nK.cpu().numpy()
            if drawn is not None:
                part |= _draw(logp_nV, at, *drawn)
            parts.append(part)
            at += n
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _nothing(n_top)

    def _logprobs(self, ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """(n, V) of consecutive tokens from `first` on."""
        places = torch.arange(first - 1, len(ids) - 1)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        input_ids = torch.tensor([list(ids)], device=self._device)
        for part in torch.split(places, max(1, LOGITS // vocabulary)) if len(places) else ():
            output = self._model(input_ids=input_ids, use_cache=False, logits_to_keep=part.to(self._device))
            yield torch.log_softmax(output.logits[0].float(), dim=-1)


def _draw(logp_nV: Tensor, at: int, n_drawn: int, seed: tuple[int, ...], heat: float) -> dict[str, Any]:
    """Tokens drawn from each position's distribution at the temperature `heat`, and their log-probs at 1."""
    weight_nV = torch.softmax(logp_nV / heat, dim=-1)
    columns = []
    for turn in range(n_drawn):
        uniforms = Uniforms((*seed, turn, 1)).run(at, len(logp_nV))
        columns.append(invert(weight_nV, torch.tensor(uniforms, dtype=torch.float64, device=logp_nV.device)))
    token_nK = torch.stack(columns, dim=1)
    return {"drawn": token_nK.cpu().numpy(), "drawn_logps": logp_nV.gather(1, token_nK).cpu().numpy()}


def _wide(values_nK: Tensor, width: int, filling: float) -> np.ndarray[Any, Any]:
    """With columns of the filling up to the width, where the vocabulary is smaller."""
    found = np.full((len(values_nK), width), filling, values_nK.cpu().numpy().dtype)
    found[:, : values_nK.shape[1]] = values_nK.cpu().numpy()
    return found


def _nothing(n_top: int) -> dict[str, Any]:
    """Scores of no token."""
    none = np.empty((0, max(n_top, 1)), np.float32)
    return {"logps": none[:, 0], "top_ids": none.astype(np.int32), "top_logps": none, "targets": none,
            "drawn": none.astype(np.int64), "drawn_logps": none}  # fmt: skip
