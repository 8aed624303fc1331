"""Linear layers by oneDNN have the values and the gradients of torch's own."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from areal_cpu import linear, matmul


@pytest.fixture(params=[1, 2])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels transpose for one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("n_threads")
@pytest.mark.parametrize(("n_in", "n_out", "has_bias"), [(24, 56, True), (56, 24, False), (40, 40, True)])
def test_values_and_gradients_are_those_of_torch(
    n_in: int, n_out: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "IS_FASTER", True)
    torch.manual_seed(n_in)
    plain = nn.Linear(n_in, n_out, bias=has_bias)
    other = nn.Linear(n_in, n_out, bias=has_bias)
    other.load_state_dict(plain.state_dict())
    linear.replace(other)
    assert type(other) is linear.Linear
    x, grad = torch.randn(2, 37, n_in), torch.randn(2, 37, n_out)
    found = []
    for layer in (plain, other):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.backward(grad)
        found.append([out, given.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(found[1], found[0])
    assert all(p.grad is not None and p.grad.is_contiguous() for p in other.parameters())


def test_another_type_than_float32_goes_torchs_way() -> None:
    layer = nn.Linear(8, 8).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = layer(x)
    linear.replace(layer)
    assert torch.equal(layer(x), expected)
