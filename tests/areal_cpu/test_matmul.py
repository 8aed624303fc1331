"""Products by oneDNN are those that torch computes, whatever their shape and however the weight is kept."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from areal_cpu import matmul as module
from areal_cpu.matmul import LEAST_STEP, Weight, stepped

CPU = torch.device("cpu")


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("n_rows", [1, 33, 600])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_weight_multiplies_as_torch_does(
    packs: bool, n_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IS_FASTER", True)
    dice = torch.Generator().manual_seed(n_rows)
    x_NE, weight_FE = (torch.randn(n, 96, generator=dice) for n in (n_rows, 80))
    bias_F, to_NF = torch.randn(80, generator=dice) if has_bias else None, torch.randn(n_rows, 80, generator=dice)
    weight = Weight(weight_FE, bias_F, packs=packs)
    expected_NF = F.linear(x_NE, weight_FE, bias_F)
    torch.testing.assert_close(weight(x_NE), expected_NF)
    torch.testing.assert_close(weight.added(x_NE, to_NF), expected_NF + to_NF)


@given(n=st.integers(1, 1 << 20))
def test_numbers_of_rows_are_few_and_near(n: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IS_FASTER", True)
        asked = stepped(n, CPU)
        assert n <= asked <= n + max(LEAST_STEP - 1, n // 32)
        assert stepped(asked, CPU) == asked, "what was filled up stays"
        assert stepped(n + 1, CPU) >= asked
        assert stepped(n, torch.device("cuda")) == n, "nothing is compiled for it there"
        assert stepped(0, CPU) == 0
        patch.setattr(module, "IS_FASTER", False)
        assert stepped(n, CPU) == n


def test_full_micro_batches_are_of_a_handful_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IS_FASTER", True)
    assert len({stepped(n, CPU) for n in range(3700, 4097)}) <= 7
    assert len({stepped(n, CPU) for n in range(1, 4097)}) <= 170
