"""A learner's helpers, where its layers have something for them to do; knows nothing of how they do it."""

import os

import torch
from loguru import logger

from actors.cpu import build, layer_kernels
from actors.cpu import fused_mlp_qkv as dense
from actors.cpu.helpers import Crew
from actors.cpu.llama_layer import LlamaLayer
from actors.learner.policy import Policy


def call(n: int, policy: Policy) -> Crew | None:
    """So many, from now on; None, with a warning, where they would have nothing to do or the system refuses them."""
    why = _nothing(policy)
    if not why:
        try:
            crew = Crew(n)
        except RuntimeError as error:
            why = str(error)
    if why:
        logger.warning("learner.helpers = {} have nothing to do, and there are none: {}", n, why)
        return None
    if little := _little(policy):
        logger.warning("learner.helpers = {} have little to do: {}", n, little)
    return crew


def _nothing(policy: Policy) -> str:
    """Why helpers would have nothing to do, if so."""
    if build.library() is None:
        return "the C kernels were not compiled"
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < 2:
        return "the learner may compute on one core only"
    if torch.get_num_threads() != 1:
        return f"torch itself has {torch.get_num_threads()} threads, and the C kernels are for one"
    if not layer_kernels.made().attends:
        return "this processor's vectors are too short for the C kernels"
    if not any(isinstance(module, LlamaLayer) for module in policy.model.modules()):
        return "the policy's layers are the model's own, which go by torch"
    return ""


def _little(policy: Policy) -> str:
    """What of the layers is not for helpers, if something is not."""
    layers = [module for module in policy.model.modules() if isinstance(module, LlamaLayer)]
    if max(map(_largest, layers)) <= dense.MOST:
        return ""
    return f"weights over {dense.MOST >> 20} MiB go by torch; attention does not"


def _largest(one: LlamaLayer) -> int:
    """Bytes of a layer's largest weight, as `fused` joins them."""
    heads, mlp = one.self_attn, one.mlp
    joined = ((heads.q_proj, heads.k_proj, heads.v_proj), (mlp.gate_proj, mlp.up_proj))
    return max(sum(int(part.weight.nbytes) for part in parts) for parts in joined)
