"""What the C kernels compute is what torch computes, for all shapes; and without a compiler all goes on."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from actors.engines.builtin.sampler import sample
from areal_bus import native
from areal_cpu import build
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.paged_attention import WIDEST, Decode, P, Tables
from areal_cpu.sampler import sampled

pytestmark = pytest.mark.usefixtures("as_kernels_run")
needs_library = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine")


SMALL = (  # other sources, which are compiled sooner
    "from pathlib import Path; from areal_bus import native; assert native.library(Path(native.__file__).parent)"
)


def run(code: str, **environment: str) -> str:
    """A process of its own, with this environment alone: what it says."""
    whole = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])} | environment
    ended = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(n, heads, D) by the angles of the first halves."""
    half = x.shape[-1] // 2
    a, b, cosine, sine = x[..., :half], x[..., half:], cos[:, None, :half], sin[:, None, :half]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


@needs_library
@given(
    rows=st.lists(st.tuples(st.integers(0, 3 * P), st.integers(0, 3)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3)]),
    width=st.sampled_from([2, 8, 16, 32, 64, 80, 128, 256]),
    seed=st.integers(0, 99),
)
@example(rows=[(P - 1, 0), (P, 1), (0, 0)], heads=(4, 4), width=32, seed=0)  # last of a block, first of the next
def test_decode_is_rotation_and_attention(
    rows: list[tuple[int, int]], heads: tuple[int, int], width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    n_query, n_key = heads
    n, scale = len(rows), width**-0.5
    n_common = [min(common, at // P) for at, common in rows]
    far = torch.randn(2, 3, n_key, P, width)
    n_own = [at // P + 1 - common for (at, _), common in zip(rows, n_common, strict=True)]
    near = torch.randn(2, sum(n_own) + 1, n_key, P, width)
    order = torch.randperm(sum(n_own)).tolist()
    own = [[order.pop() for _ in range(count)] for count in n_own]
    qkv = torch.randn(n, n_query + 2 * n_key, width)
    cos, sin = torch.randn(n, width), torch.randn(n, width)
    given_qkv, before = qkv.clone(), near.clone()
    tables = Tables([list(range(count)) for count in n_common], own)
    out = Decode(tables, [at for at, _ in rows], n_query, n_key).attended(qkv, cos, sin, near, far, scale)
    n_both = n_query + n_key
    turned = rotated(given_qkv[:, :n_both].double(), cos.double(), sin.double())
    for row, (at, _) in enumerate(rows):
        new = torch.stack([turned[row, n_query:], given_qkv[row, n_both:].double()])
        before[:, own[row][-1], :, at % P] = new.float()
        blocks = torch.cat([far[:, : n_common[row]], before[:, own[row]]], dim=1).double()
        keys, values = blocks.transpose(1, 2).reshape(2, n_key, -1, width)[:, :, : at + 1]
        attn = F.scaled_dot_product_attention(
            turned[row, None, :n_query, None], keys[None], values[None], scale=scale, enable_gqa=True
        )
        torch.testing.assert_close(out[row].double(), attn.flatten(), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(near, before)  # its own cells, and no other


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_decode_keeps_nan_and_infinity_within_their_row(bad: float) -> None:
    near, qkv, ones = torch.randn(2, 2, 1, P, 32), torch.randn(2, 3, 32), torch.ones(2, 32)
    near[0, 0, 0, 3] = bad
    out = Decode(Tables([[]] * 2, [[0], [1]]), [5, 5], 1, 1).attended(qkv, ones, 0 * ones, near, None, 1.0)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@needs_library
@given(at=st.integers(0, 5 * P), first=st.integers(0, 3), n_own=st.integers(1, 3))
def test_a_position_outside_a_rows_own_blocks_is_refused(at: int, first: int, n_own: int) -> None:
    tables = Tables([list(range(first))], [list(range(n_own))])
    if first * P <= at < (first + n_own) * P:
        Decode(tables, [at], 1, 1)
    else:
        with pytest.raises(ValueError, match="in its own blocks"):
            Decode(tables, [at], 1, 1)


@pytest.mark.slow
def test_without_a_compiler_no_library_is_loaded_and_a_warning_is_logged() -> None:
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from areal_cpu.build import applies, library\n"
        "assert library() is None and not applies(torch.float32, torch.device('cpu'))"
    )
    assert "C compiler not found" in run(code, PATH="/nowhere")


@pytest.mark.slow
@needs_library
def test_a_compiler_that_fails_is_reported_and_left(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho it broke >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = "from areal_cpu.build import library; assert library() is None"
    assert "it broke" in run(code, CC=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert not list((tmp_path / "areal-bus").glob("*"))


@needs_library
def test_small_numbers_are_not_flushed_to_zero_in_this_process() -> None:
    tiny = torch.tensor([1e-40])
    assert float(tiny * 0.5) > 0


@needs_library
@given(
    n=st.integers(1, 4),
    width=st.sampled_from([1, 2, 63, 64, 65, 512, 1000, 5000]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 300.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    hidden=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_sampled_token_is_where_the_running_sum_passes_the_uniform(
    n: int, width: int, spread: float, temperature: float, hidden: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = spread * torch.randn(n, width)
    if hidden:
        logits[:, 1::2] = -torch.inf
    uniforms = [*torch.rand(n, dtype=torch.float64).tolist(), 0.0, 1 - 2**-53][-n:]
    tokens, logps = sampled(logits, [temperature] * n, uniforms)
    heat = temperature or 1.0
    logp = torch.log_softmax(logits.double() / heat, dim=-1)
    cdf = logp.exp().cumsum(-1)
    for row, (token, found, uniform) in enumerate(zip(tokens, logps, uniforms, strict=True)):
        assert found <= 1e-6
        assert abs(found - float(logp[row, token])) < 2e-6 * (1 + spread)
        assert not hidden or token % 2 == 0
        if temperature == 0:
            assert token == int(logits[row].argmax())
        else:
            share = float(logp[row, token].exp())
            assert share > 0
            assert float(cdf[row, token]) - share - 1e-6 <= uniform <= float(cdf[row, token]) + 1e-6


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(3, 70)
    logits[1] = bad
    with pytest.raises(ValueError, match="those of row 1 are not"):
        sampled(logits, [1.0] * 3, [0.5] * 3)
    logits[1] = 0.0
    logits[1, 66] = float("nan")
    with pytest.raises(ValueError, match="those of row 1 are not"):
        sampled(logits, [0.0] * 3, [0.5] * 3)


@needs_library
def test_other_shapes_are_refused() -> None:
    tables, near, ones = Tables([[], []], [[0], [1]]), torch.randn(2, 2, 2, P, 32), torch.ones(2, 32)
    decode, qkv = Decode(tables, [3, 3], 4, 2), torch.randn(2, 8, 32)
    for given_qkv, cos, pool in (
        (torch.randn(3, 8, 32), torch.ones(3, 32), near),  # a row more than tables
        (torch.randn(2, 7, 32), ones, near),
        (qkv, torch.ones(2, 16), near),
        (qkv.double(), ones, near),
        (qkv, ones, near.transpose(3, 4)),
        (qkv.transpose(0, 1).contiguous().transpose(0, 1), ones, near),
        (torch.randn(2, 8, WIDEST + 2), torch.ones(2, WIDEST + 2), torch.randn(2, 2, 2, P, WIDEST + 2)),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            decode.attended(given_qkv, cos, ones if cos is ones else cos, pool, None, 1.0)
    with pytest.raises(ValueError, match="must be a multiple of that of key heads"):
        Decode(tables, [3, 3], 3, 2)
    with pytest.raises(ValueError, match="2 rows have 1 temperatures"):
        sampled(torch.zeros(2, 9), [1.0], [0.5, 0.5])
    for logits in (torch.zeros(9).expand(2, 9), torch.zeros(2, 9, dtype=torch.float64)):
        with pytest.raises(ValueError, match="contiguous float32"):
            sampled(logits, [1.0] * 2, [0.5] * 2)


@needs_library
def test_the_exponential_is_within_two_units_of_the_last_place() -> None:
    """Seen through silu: e^-x is all of it where x is small beside it."""
    below = torch.linspace(-80.0, -20.0, 20_001)
    both = torch.stack([below, torch.ones_like(below)], dim=1)
    exact = F.silu(below.double())
    error = (LayerKernels().gate(both)[:, 0].double() / exact - 1).abs().max()
    assert error < 6 * 2**-24


@needs_library
def test_a_token_does_not_depend_on_top_p_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    torch.manual_seed(3)
    for _ in range(200):
        logits, uniform = torch.randn(1, 300), [random.random()]
        alone = sample(logits, temperatures=[1.0], top_ps=[1.0], uniforms=uniform)
        beside = sample(logits.repeat(2, 1), temperatures=[1.0] * 2, top_ps=[1.0, 0.9], uniforms=uniform * 2)
        assert (alone[0][0], alone[1][0]) == (beside[0][0], beside[1][0])


@pytest.mark.slow
@needs_library
def test_the_library_is_compiled_once_and_again_when_it_was_truncated(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        run(SMALL, XDG_CACHE_HOME=str(tmp_path))
        (path,) = (tmp_path / "areal-bus").iterdir()
        made.append((path.name, path.stat().st_mtime_ns))
    assert made[0] == made[1]
    whole = path.stat().st_size
    for left in (0, 4096):
        path.write_bytes(path.read_bytes()[:left])
        run(SMALL, XDG_CACHE_HOME=str(tmp_path))
        assert path.stat().st_size == whole > left


def test_code_is_not_loaded_from_a_folder_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "areal-bus").mkdir(mode=0o700)
    assert native._folder() == tmp_path / "areal-bus"
    (tmp_path / "areal-bus").chmod(0o777)
    assert native._folder() is None


@pytest.mark.slow
@needs_library
def test_a_library_without_march_flags_logs_a_warning(tmp_path: Path) -> None:
    compiler = tmp_path / "with space"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-march=*) echo "no such processor" >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    said = run(SMALL, CC=f"'{compiler}' -pipe", XDG_CACHE_HOME=str(tmp_path))
    assert "no such processor" in said
    assert "only" in said
