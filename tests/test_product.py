"""Products by oneDNN are those that torch computes, whatever their shape and however the weight is kept."""

import pytest
import torch
import torch.nn.functional as F

from actors.models import product as module
from actors.models.product import Weight


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
