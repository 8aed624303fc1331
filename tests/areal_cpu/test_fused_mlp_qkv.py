"""What a layer does to each row, in one pass by C, is what torch computes in float64; other shapes are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_cpu import build, fused_mlp_qkv
from areal_cpu.decode_step import PackedWeights
from areal_cpu.fused_mlp_qkv import CHUNK, MOST, RopeAngles
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.layer_ops import LayerPath, UnfusedOps
from areal_cpu.llama_layer import _path
from areal_cpu.packed_weights import panel, panels, panels_back, sizes
from areal_cpu.paged_attention import WIDEST, P

pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine"),
]

EPSILON = 1e-5
COUNTS = st.sampled_from([1, 5, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 13])
PATHS: dict[str, Callable[[], LayerPath]] = {
    "dense": lambda: fused_mlp_qkv,
    "kernels": lambda: UnfusedOps(LayerKernels()),
}


def near(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * (1.0 + float(exact.abs().max())))


def doubled(*tensors: Tensor) -> list[Tensor]:
    """The same in float64, to be differentiated by."""
    return [tensor.double().requires_grad_() for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@given(
    n=COUNTS, width=st.sampled_from([5, 16, 49, 64, 72, 513]), heads=st.sampled_from([(1, 1), (4, 2), (5, 5)]),
    head_width=st.sampled_from([2, 6, 32]), has_bias=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_projections(
    path: str, n: int, width: int, heads: tuple[int, int], head_width: int, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    n_rope, n_out = sum(heads), (heads[0] + 2 * heads[1]) * head_width
    x, weight, scale = torch.randn(n, width), torch.randn(n_out, width), 1 + torch.rand(width)
    bias = torch.randn(n_out) if has_bias else None
    half = torch.randn(n, head_width // 2)
    angles = RopeAngles(torch.cos(half).repeat(1, 2), torch.sin(half).repeat(1, 2), n_rope)
    out, normed, rstd = PATHS[path]().qkv_forward(x, weight.clone(), scale, bias, angles, EPSILON)

    x_, weight_, scale_, bias_ = doubled(x, weight, scale, torch.zeros(n_out) if bias is None else bias)
    straight = F.rms_norm(x_, (width,), scale_, EPSILON) @ weight_.t() + bias_
    turned, values = straight.split([n_rope * head_width, n_out - n_rope * head_width], dim=1)
    a, b = turned.view(n, n_rope, head_width).chunk(2, dim=-1)
    cos, sin = torch.cos(half).double()[:, None], torch.sin(half).double()[:, None]
    exact = torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1), values], dim=1)
    near(out, exact.detach())

    grad = torch.randn(n, n_out)
    expected = torch.autograd.grad(exact, (x_, weight_, scale_, bias_), grad.double())
    found = PATHS[path]().qkv_backward(grad, normed, rstd, weight.clone(), scale, angles, has_bias=has_bias)
    assert (found[3] is not None) == has_bias
    for of_what, exactly in zip(found, expected, strict=True):
        if of_what is not None:
            near(of_what, exactly)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@given(
    n=COUNTS, width=st.sampled_from([5, 16, 49, 64, 72, 513]), n_attn=st.sampled_from([2, 65]),
    n_gates=st.sampled_from([1, 24, 70, 128]), seed=st.integers(0, 9),
)  # fmt: skip
def test_the_feed_forward(path: str, n: int, width: int, n_attn: int, n_gates: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, attn, scale = torch.randn(n, width), torch.randn(n, n_attn), 1 + torch.rand(width)
    out_weight, gate_up, down = (
        torch.randn(*shape) / shape[1] ** 0.5 for shape in ((width, n_attn), (2 * n_gates, width), (width, n_gates))
    )
    out, kept = PATHS[path]().mlp_forward(x, attn, EPSILON, scale, out_weight, gate_up.clone(), down)

    given_ = doubled(x, attn, scale, out_weight, gate_up, down)
    x_, seen_, scale_, out_, gate_up_, down_ = given_
    h_ = x_ + seen_ @ out_.t()
    gate, up = (F.rms_norm(h_, (width,), scale_, EPSILON) @ gate_up_.t()).chunk(2, dim=1)
    exact = h_ + (F.silu(gate) * up) @ down_.t()
    near(out, exact.detach())

    grad = torch.randn(n, width)
    expected = torch.autograd.grad(exact, given_, grad.double())
    before = grad.clone()
    found = PATHS[path]().mlp_backward(grad, attn, kept, scale, out_weight, gate_up.clone(), down)
    assert torch.equal(grad, before)  # another may use it, too
    for of_what, exactly in zip(found, expected, strict=True):
        near(of_what, exactly)


@given(n_in=st.integers(1, 70), n_out=st.integers(1, 3 * 64 + 5), is_scaled=st.booleans())
def test_panels_of_a_weight_and_of_its_transpose(n_in: int, n_out: int, is_scaled: bool) -> None:
    weight = torch.arange(1.0, n_out * n_in + 1).view(n_out, n_in)
    scale = torch.arange(2.0, n_in + 2) if is_scaled else None
    packed = PackedWeights(weight)
    assert torch.equal(packed.panels, panels(weight, None))
    for other in ((torch.zeros(n_out + 1, n_in),), (weight, torch.zeros(n_out + 1))):
        with pytest.raises(ValueError, match="one shape"):
            packed.fill(*other)
    whole = weight if scale is None else weight * scale
    for found, outputs in ((panels(weight, scale), whole), (panels_back(weight, scale), whole.t())):
        filled = torch.zeros(-(-len(outputs) // panel()) * panel(), outputs.shape[1])
        filled[: len(outputs)] = outputs
        assert torch.equal(found, filled.view(-1, panel(), outputs.shape[1]).transpose(1, 2).flatten())


def test_kernels_propagate_nan_and_infinity() -> None:
    x, attn = torch.randn(CHUNK + 2, 8), torch.randn(CHUNK + 2, 8)
    x[CHUNK] = torch.nan
    out, _ = fused_mlp_qkv.mlp_forward(
        x, attn, EPSILON, torch.ones(8), torch.randn(8, 8), torch.randn(12, 8), torch.randn(8, 6)
    )
    assert out[CHUNK].isnan().all()
    assert out[CHUNK + 1].isfinite().all()
    assert out[:CHUNK].isfinite().all()


def test_sizes_are_those_of_c() -> None:
    assert sizes()[1:] == (CHUNK, P, WIDEST)


@pytest.mark.parametrize("n_bytes", [1, MOST + 1])
def test_the_way_back_is_that_of_the_way_there(n_bytes: int) -> None:
    x, weight, scale, angles = torch.randn(5, 8), torch.randn(16, 8), 1 + torch.rand(8), angles_of(5)
    grad = torch.randn(5, 16)
    found = []
    for n_threads in (1, 2):
        torch.set_num_threads(1)
        path = _path(n_bytes, x)
        _, normed, rstd = path.qkv_forward(x, weight.clone(), scale, None, angles, EPSILON)
        torch.set_num_threads(n_threads)
        found.append(path.qkv_backward(grad.clone(), normed, rstd, weight.clone(), scale, angles, has_bias=False))
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, atol=1e-5)


def test_the_fused_kernel_applies_only_to_small_contiguous_float32_inputs() -> None:
    x = torch.ones(3, 4)
    assert fused_mlp_qkv.applies(x, n_bytes=MOST) == LayerKernels().attends
    assert not fused_mlp_qkv.applies(x, n_bytes=MOST + 1)
    assert not fused_mlp_qkv.applies(x.t(), n_bytes=1)
    assert not fused_mlp_qkv.applies(x.double(), n_bytes=1)
    torch.set_num_threads(2)
    assert not fused_mlp_qkv.applies(x, n_bytes=1)


def angles_of(n: int, width: int = 4, n_heads: int = 3) -> RopeAngles:
    return RopeAngles(torch.ones(n, width), torch.zeros(n, width), n_heads)


def test_other_shapes_of_a_projection_are_refused() -> None:
    right: dict[str, Any] = {
        "x": torch.ones(5, 8), "weight": torch.ones(16, 8), "scale": torch.ones(8), "bias": torch.ones(16),
        "angles": angles_of(5),
    }  # fmt: skip
    fused_mlp_qkv.qkv_forward(*right.values(), EPSILON)
    for changed in (
        {"weight": torch.ones(16, 7)},
        {"scale": torch.ones(7)},
        {"bias": torch.ones(15)},
        {"bias": torch.ones(16, dtype=torch.float64)},
        {"angles": angles_of(6)},
        {"angles": angles_of(5, 3)},
        {"angles": angles_of(5, 4, 5)},
        {"x": torch.ones(8, 5).t()},
    ):
        with pytest.raises(ValueError, match=r"one shape|contiguous float32|heads of even width"):
            fused_mlp_qkv.qkv_forward(*(right | changed).values(), EPSILON)


def test_other_shapes_of_a_feed_forward_are_refused() -> None:
    right: dict[str, Any] = {
        "x": torch.ones(5, 8), "attn": torch.ones(5, 6), "epsilon": EPSILON, "scale": torch.ones(8),
        "out": torch.ones(8, 6), "gate_up": torch.ones(20, 8), "down": torch.ones(8, 10),
    }  # fmt: skip
    _, kept = fused_mlp_qkv.mlp_forward(*right.values())
    for changed in (
        {"attn": torch.ones(4, 6)},
        {"scale": torch.ones(7)},
        {"out": torch.ones(8, 7)},
        {"gate_up": torch.ones(21, 8)},
        {"down": torch.ones(9, 10)},
        {"x": torch.ones(5, 8, dtype=torch.float64)},
    ):
        with pytest.raises(ValueError, match=r"one shape|contiguous float32"):
            fused_mlp_qkv.mlp_forward(*(right | changed).values())
    rest = [right[name] for name in ("scale", "out", "gate_up", "down")]
    for grad, of_gates in ((torch.ones(4, 8), kept[2]), (torch.ones(5, 8), kept[2][:, :10].contiguous())):
        with pytest.raises(ValueError, match="one shape"):
            fused_mlp_qkv.mlp_backward(grad, right["attn"], (kept[0], kept[1], of_gates), *rest)
