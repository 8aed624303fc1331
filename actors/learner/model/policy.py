"""Models of the learner: Hugging Face causal LMs that return log-probs of packed sequences; FSDP2 over several ranks.

Shapes: S tokens of a packed row, N wanted tokens of it, V words.
"""

import contextlib
import ctypes
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, Required, TypedDict, Unpack

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from actors.learner.algorithms.running import RUNNING, empty
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model import chunked_head
from actors.learner.model.adapters import Adapters
from actors.learner.model.chunked_head import GivenTeacher, Teacher
from actors.learner.model.context_parallel import RowSplit, padded
from actors.learner.model.row_probe import RowProbe, whole_row
from actors.models import packed_attention
from actors.models.packed_attention import PackedAttention, choose
from actors.models.packed_row import PackedRow, SequencePiece, lay_out
from areal_bus.config.capacity import LOGITS_MIB, TEACHER_COPIES, logits_chunk
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.weights.route import Home
from areal_cpu import layer_kernels, linear, llama_layer
from areal_cpu.matmul import stepped

NOT_PLAIN = "has sliding windows, soft caps or an attention of its own"
PROBE = 12  # tokens of the check that compares fused layers with the original ones


class ModelSettings(TypedDict, total=False):
    """How a model of the learner computes."""

    ranks: Required[LearnerRanks]
    device: Required[str]
    temperature: Required[float]  # of the sampler: log-probs are of logits / temperature; a sequence may have its own
    dtype: str  # of compute; default "float32"
    gradient_checkpointing: bool  # recompute activations in the backward pass; default off
    compile: bool  # torch.compile for decoder layers; default off
    computes: bool  # False: no pass is ever run, and every rank holds the whole model; default True
    offload: bool  # parameters and gradients stay in host memory (FSDP2, also of one rank); default off
    max_logits_mib: float  # more logits than this are computed in chunks; default LOGITS_MIB


class Wanted(TypedDict, total=False):
    """What a pass finds beside log-probs."""

    entropy: bool
    entropy_grad: bool  # which then carries a gradient
    teacher: Teacher | GivenTeacher | None  # divergences from it


Found = tuple[Tensor, Tensor | None, Tensor | None]  # (N,) log-probs, entropies, divergences from a teacher


def model_settings(config: Config, ranks: LearnerRanks, device: str) -> ModelSettings:
    return {
        "ranks": ranks,
        "device": device,
        "temperature": config.gconfig.temperature or 1.0,  # of a greedy sampler: log-probs at temperature 1
        "dtype": config.model.dtype,
        "gradient_checkpointing": config.learner.gradient_checkpointing,
        "compile": config.learner.compile,
        "computes": config.learner.simulated is None,
        "offload": config.actor.offload == "all",
    }


class PackedModel:
    """A causal LM on one device, sharded by FSDP2 when there is more than one learner rank. It computes in `dtype`."""

    def __init__(self, model: Any, **settings: Unpack[ModelSettings]) -> None:
        """`model`: a PreTrainedModel of transformers, whose classes are not typed."""
        self.ranks = ranks = settings["ranks"]
        self.dtype: torch.dtype = getattr(torch, settings.get("dtype", "float32"))
        self.casts = {parameter.dtype for parameter in model.parameters()} != {self.dtype}
        self.device = torch.device(settings["device"])
        self.temperature = settings["temperature"]
        self.sharded = ranks.size > 1 or settings.get("offload", False)
        if not settings.get("computes", True):
            self.model, self._parameters = model, dict(model.named_parameters())
            return
        choose(self.device)
        self.model = model if self.sharded else model.to(self.device)  # sharding moves it layer by layer
        self.packed = False  # by our attention: a prompt that several sequences share is computed once
        self.alone = False  # one sequence a row
        linear.replace(self.model)
        if ranks.context is not None and not self._may_pack():
            self._refuse_context(NOT_PLAIN)
        self._head = chunked_head.install(self.model)
        self._max_logits_mib = settings.get("max_logits_mib", LOGITS_MIB)
        self.model.eval()  # no dropout: log-probs must be those of the sampler
        compiles = settings.get("compile", False)
        if not self.sharded:
            self._choose_rows()
            if not compiles:
                self._fuse()
        if settings.get("gradient_checkpointing"):
            self._checkpoint_activations()
        if self.sharded:
            compute, offload = self.dtype if self.casts else None, settings.get("offload", False)
            shard(self.model, compute, self.device, replicas=ranks.replicas, offload=offload)
            self._choose_rows()
            self.model.reshard()  # or the names would be those of gathered parameters
        if compiles:
            compile_layers(self.model)
        self._parameters = dict(self.model.named_parameters())
        if self.device.type == "cpu":
            _return_freed_memory()

    def _choose_rows(self) -> None:
        """Choose by a test how sequences share a row. A collective when sharded. Raises ConfigError: unfit model."""
        config = self.model.config.get_text_config()
        probe = RowProbe(config, self.model.get_input_embeddings().num_embeddings, self.ranks.max)
        is_mixed = len({parameter.dtype for parameter in self.model.parameters()}) > 1  # adapters are float32
        read = self._forward if is_mixed else self._output  # else in the type of the parameters: rounding hides less
        why = NOT_PLAIN
        probe.read_alone(lambda row: read(row, None))
        if self._may_pack():
            self.model.set_attn_implementation(packed_attention.NAME)
            why = probe.trouble(lambda row: read(row, PackedAttention.of(row, self.device)), share=True)
            self.packed = not why
            if why:
                self.model.set_attn_implementation("sdpa")
        if not self.packed and self.ranks.context is not None:
            self._refuse_context(f"fails its test: {why}")
        if not self.packed:
            why = whole_row(config) or probe.trouble(lambda row: read(row, None), share=False)
            self.alone = bool(why)
        if self.alone and self.ranks.index == 0:
            logger.warning("one sequence per row, which is slower: {}: {}", config.model_type, why)

    def _may_pack(self) -> bool:
        return packed_attention.supports(self.model.config) and self.model.config._attn_implementation == "sdpa"

    def _refuse_context(self, why: str) -> NoReturn:
        raise ConfigError(
            f"actor.context_parallel needs plain causal attention in every layer, and {self.model.config.model_type} "
            f"{why}: set actor.context_parallel = 1"
        )

    def row_tokens(self, budget: int) -> int:
        """Most tokens of a micro-batch of several sequences; 1 where each is a micro-batch of its own."""
        return 1 if self.alone else budget

    def _fuse(self) -> None:
        """Replace the layers of a Llama-like model by fused ones on CPU, if they compute the same."""
        is_plain = self.device.type == "cpu" and self.dtype is torch.float32 and self.packed
        has_gradients = all(parameter.requires_grad for parameter in self.model.parameters())  # fused layers make all
        if is_plain and has_gradients and llama_layer.applies(self.model):
            why = llama_layer.disagreement(self.model, self._probe)
            if why is not None:
                logger.warning("fused layers are not used, so training is slower: with them {}", why)

    def _probe(self) -> Tensor:
        """A loss over two sequences with a common prefix."""
        ids_T = torch.arange(PROBE) * 7919 % self.model.config.vocab_size
        other_T = torch.cat([ids_T[: PROBE // 2], ids_T[PROBE // 2 - 2 :].flip(0)])
        pieces = [SequencePiece(ids, torch.arange(1, len(ids)), family=0) for ids in (ids_T, other_T)]
        logp_N, _ = self.logprobs(pieces)
        return (logp_N * torch.linspace(-1.0, 1.0, len(logp_N))).sum()

    def _checkpoint_activations(self) -> None:
        dropouts = {
            key: value
            for key, value in self.model.config.to_dict().items()
            if "dropout" in key and value not in (0, None)
        }
        if dropouts:
            raise ConfigError(
                f"learner.gradient_checkpointing needs a model without dropout, this one has {dropouts}: set it to 0 "
                "in its config.json, or learner.gradient_checkpointing = false"
            )
        self.model.train()  # transformers checkpoints activations in training mode only
        self.model.activation_checkpointing_enable({"use_reentrant": False})

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Name -> live parameter; tied parameters once; DTensors when sharded."""
        return self._parameters

    def shared_on(self, home: Home) -> torch.device | None:
        """The device of snapshots that other processes open; None if private."""
        return {"private": None, "host": torch.device("cpu"), "device": self.device}[home]

    def _compute(self) -> AbstractContextManager[object]:
        """Context in which a forward pass computes in `dtype`: FSDP2 casts itself, a single rank uses autocast."""
        if self.sharded or not self.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def logprobs(
        self, pieces: Sequence[SequencePiece], *, entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(logp_N, entropy_N) of the wanted tokens of all pieces, in order, float32, at the temperature of each piece.

        The pieces are packed into one row without attention across pieces. If the model allows it (`packed`), the
        shared prompt of a family is computed once. The entropy carries a gradient with `entropy_grad` only.
        """
        logp_N, entropy_N, _ = self.read(pieces, entropy=entropy, entropy_grad=entropy_grad)
        return logp_N, entropy_N

    def read(self, pieces: Sequence[SequencePiece], **wanted: Unpack[Wanted]) -> Found:
        """As `logprobs`, and the (N,) divergences from the teacher before each wanted token, if there is one."""
        if self.alone and len(pieces) > 1:
            return self._read_alone(pieces, **wanted)
        row, packing, split = self._rows(pieces)
        n = sum(len(piece.places_K) for piece in pieces)
        logp_N, *others = self._chosen(row, packing, **wanted)

        def whole(found: Tensor) -> Tensor:
            return (found if split is None else split.whole(found))[:n]

        entropy_N, apart_N = (None if one is None else whole(one) for one in others)
        return whole(logp_N), entropy_N, apart_N

    def _read_alone(self, pieces: Sequence[SequencePiece], **wanted: Unpack[Wanted]) -> Found:
        """Piece by piece."""
        teacher, at, parts = wanted.get("teacher"), 0, []
        for piece in pieces:
            tokens = slice(at, at := at + len(piece.places_K))
            wanted["teacher"] = None if teacher is None else teacher.part(tokens)
            parts.append(PackedModel.read(self, [piece], **wanted))
        logps, entropies, others = ([one for one in column if one is not None] for column in zip(*parts, strict=True))
        return torch.cat(logps), torch.cat(entropies) if entropies else None, torch.cat(others) if others else None

    def _rows(
        self, pieces: Sequence[SequencePiece]
    ) -> tuple[PackedRow, packed_attention.Packing | None, RowSplit | None]:
        """The row of this rank, which may want more tokens than the pieces."""
        row = lay_out(pieces, share=self.packed, temperature=self.temperature)
        if (split := self.split(row)) is not None:
            return split.part, split, split
        if self.packed:  # other models would need a mask for the filling
            row = row.filled(stepped(len(row.ids_S), self.device), stepped(len(row.wanted_N), self.device))
        return row, self.packing(row), None

    def split(self, row: PackedRow) -> RowSplit | None:
        """This rank's part of the row; None without context parallelism."""
        if (group := self.ranks.context) is None:
            return None
        n_rows = padded(len(row.ids_S), group.size, self.device)
        return RowSplit(row.filled(n_rows, len(row.wanted_N)), group, self.device)

    def packing(self, row: PackedRow) -> packed_attention.PackedAttention | None:
        """What attention needs to know of a whole row."""
        return packed_attention.PackedAttention.of(row, self.device) if self.packed else None

    def _chosen(self, row: PackedRow, packing: packed_attention.Packing | None, **wanted: Unpack[Wanted]) -> Found:
        """Of all wanted tokens of the row."""
        entropy, entropy_grad = wanted.get("entropy", False), wanted.get("entropy_grad", False)
        teacher = wanted.get("teacher")
        targets_N = row.targets_N.to(self.device)
        heat = self.temperature if row.heat_N is None else row.heat_N.to(self.device).unsqueeze(1)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        n_chunk = logits_chunk(len(targets_N), vocabulary, self._max_logits_mib)
        if teacher is not None:  # its logits, and those that the divergence makes of both
            n_chunk = logits_chunk(len(targets_N), TEACHER_COPIES * vocabulary, self._max_logits_mib) or len(targets_N)
            teacher = teacher.filled(len(targets_N))
        if n_chunk is not None and self._head is not None:
            task = chunked_head.HeadTask(targets_N, heat, n_chunk, entropy_grad, teacher=teacher)
            with chunked_head.working(self.model, self._head, task):
                found_N3 = self._forward(row, packing).flatten(0, 1)
            by_chunk_N = found_N3[:, 1] if entropy_grad else found_N3[:, 1].detach()
            apart_N = None if teacher is None else found_N3[:, 2]
            return found_N3[:, 0], by_chunk_N if entropy else None, apart_N
        logits_NV = self._forward(row, packing).flatten(0, 1).float()  # a view: the gradient of [0] would be copied
        if isinstance(heat, Tensor) or heat != 1.0:
            logits_NV = logits_NV / heat
        choose_logprobs = _selected_with_entropy if entropy_grad else _selected
        return *choose_logprobs(logits_NV, targets_N, entropy=entropy), None

    def check_chunks(self, key: str) -> None:
        """Raises ConfigError for a model whose logits are not those of a linear head."""
        if self._head is None:
            raise ConfigError(
                f"{key} needs a model whose logits are the output of a linear layer: {self.model.config.model_type} "
                "scales them or has another head; remove it, or choose another model"
            )

    def _forward(self, row: PackedRow, packing: packed_attention.Packing | None) -> Tensor:
        """What the head makes of the wanted tokens."""
        with self._compute():
            return self._output(row, packing)

    def _output(self, row: PackedRow, packing: packed_attention.Packing | None) -> Tensor:
        """The same, computed in the type of the parameters."""
        output = self.model(
            input_ids=row.ids_S.unsqueeze(0).to(self.device),
            position_ids=row.positions_S.unsqueeze(0).to(self.device),
            use_cache=False,  # with a cache transformers would not detect packing
            logits_to_keep=row.wanted_N.to(self.device),
            **({} if packing is None else {"packing": packing}),
        )
        return output.logits  # type: ignore[no-any-return]

    def idle_pass(self) -> None:
        """A forward and backward pass without effect, so that this rank joins the collectives of the others."""
        piece = SequencePiece(ids_T=torch.zeros(2, dtype=torch.int64), places_K=torch.ones(1, dtype=torch.int64))
        logp_N, _ = self.logprobs([piece])
        if torch.is_grad_enabled():
            (logp_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]


def _selected(logits_NV: Tensor, targets_N: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logp_N, entropy_N = _SelectedLogProbs.apply(logits_NV, targets_N, entropy)  # type: ignore[no-untyped-call]
    return logp_N, entropy_N if entropy else None


def _selected_with_entropy(logits_NV: Tensor, targets_N: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """As `_selected`, and the entropy has a gradient, too. Needs twice the memory."""
    logprobs_NV = logits_NV.log_softmax(-1)
    logp_N = logprobs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    return logp_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1) if entropy else None


class _SelectedLogProbs(torch.autograd.Function):
    """Log-probs of the targets, and entropies without a gradient. The gradient is analytic, in one pass over N V."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        kernels = layer_kernels.found(logits_NV)
        if kernels is not None:
            logp_N, entropy_N, prob_NV = kernels.target_logprobs(logits_NV, targets_N)
            ctx.save_for_backward(prob_NV, targets_N)
            ctx.mark_non_differentiable(entropy_N)
            return logp_N, entropy_N
        total_N = torch.logsumexp(logits_NV, dim=-1)
        logp_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) - total_N
        if not (entropy or ctx.needs_input_grad[0]):
            return logp_N, logp_N.new_empty(0)
        prob_NV = torch.sub(logits_NV, total_N.unsqueeze(1)).exp_()
        entropy_N = total_N - torch.einsum("nv,nv->n", prob_NV, logits_NV) if entropy else logp_N.new_empty(0)
        ctx.save_for_backward(prob_NV, targets_N)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of a logit: (1 if target else 0) - probability, in the memory of the probabilities: once only."""
        prob_NV, targets_N = ctx.saved_tensors
        grad_N1 = gradients[0].unsqueeze(1)
        grad_NV = prob_NV.mul_(-grad_N1).scatter_add_(1, targets_N.unsqueeze(1), grad_N1)
        return grad_NV, None, None


class Policy(PackedModel):
    """The model that is trained: all of its parameters, or adapters beside frozen ones.

    Trained parameters are float32, as most updates are below a step of bfloat16; `dtype`: of compute, push, export.
    Frozen weights keep the type they were loaded in. Adapters are pushed and exported as they are.
    """

    def __init__(self, model: Any, adapters: Adapters | None = None, **settings: Unpack[ModelSettings]) -> None:
        """The settings of `PackedModel`. Raises ValueError if a trained parameter is not float32."""
        found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if found != {torch.float32}:
            raise ValueError(f"a policy keeps its parameters in float32: the model has {sorted(map(str, found))}")
        self.adapters = adapters
        self.running = {name: empty() for name in RUNNING}  # statistics of the run that checkpoints hold beside it
        super().__init__(model, **settings)
        self._base: Mapping[str, Tensor] = {}
        if adapters is not None:
            adapters.drop(False)
            self._parameters = adapters.parameters()
            self._base = adapters.digest()

    @property
    def push_dtype(self) -> torch.dtype:
        """Type of the parameters in a push."""
        return self.dtype if self.adapters is None else torch.float32

    def pushed(self) -> dict[str, Tensor]:
        """Name -> tensor of a push: the parameters; with adapters also the digest of their base."""
        return {**self._parameters, **self._base}

    def read(self, pieces: Sequence[SequencePiece], **wanted: Unpack[Wanted]) -> Found:
        """As of `PackedModel`. Adapters have dropout in passes with a gradient only."""
        if self.adapters is not None:
            self.adapters.drop(torch.is_grad_enabled())
        return super().read(pieces, **wanted)


def shard(
    model: Any, dtype: torch.dtype | None, device: torch.device, *, replicas: int = 1, offload: bool = False
) -> None:
    """FSDP2 over the default process group: one unit per decoder layer, the rest (with tied embeddings) in the root.

    With `replicas` (HSDP) each `size / replicas` ranks in a row hold a copy: parameters are gathered and gradients are
    reduced within a copy, then gradients are summed over the copies.

    With `offload` shards and gradients are in host memory.

    Shards have the type of the parameters, gathered parameters are `dtype` (None: the same). Gradients are
    summed over the ranks in float32, not averaged, because the loss is already divided by the global number of tokens.
    """
    mixed = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    layers = decoder_layers(model, "several learners need")
    if device.type == "cuda":
        torch.cuda.set_device(device if device.index is not None else 0)  # else the mesh derives it from the rank
    if not dist.is_initialized():
        _init_alone(device)
    size = dist.get_world_size()
    away: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    if replicas > 1:
        mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=away)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=away)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """torch.compile, layer by layer, for rows of any length; attention and the head stay as they are.

    The layers of a model share one compiled form, made in the first passes. Hooks of FSDP2 and checkpointed
    activations stay outside of it.
    """
    packed_attention.keep_apart()
    compiled: dict[type, Callable[..., Any]] = {}
    for layer in decoder_layers(model, "learner.compile needs"):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(inspect.unwrap(kind.forward), dynamic=True, backend=backend)
        layer.forward = partial(_run_layer, layer, compiled[kind])


def _run_layer(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = partial(forward, layer, **kwargs)
    if layer.training and getattr(layer, "gradient_checkpointing", False):  # not every model's layers have it
        return checkpoint(run, *args, use_reentrant=False)
    return run(*args)


def decoder_layers(model: Any, who_needs: str) -> list[nn.Module]:
    """Raises ConfigError for a model that is not made of them."""
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    if not layers:
        raise ConfigError(f"no decoder layers in {type(model).__name__}: {who_needs} a model made of them")
    return layers


def _init_alone(device: torch.device) -> None:
    """A process group of one rank, which FSDP2 needs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _return_freed_memory() -> None:
    """Give the kernel back what glibc keeps: the model of which a rank holds a shard now, and trial gradients."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard (a collective when sharded), else the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
