"""The planner beside the paper's tables."""

import json
from dataclasses import replace

import pytest

from areal_lab.simulate import paper


def test_a_golden_section_finds_the_smallest_value() -> None:
    assert paper.smallest(lambda x: (x - 0.53) ** 2, *paper.RATIOS) == pytest.approx(0.53, abs=0.02)


@pytest.mark.soak
def test_three_fitted_rows_predict_the_other_three_within_8_percent(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    errors = {int(eta): k_tokens / paper.PUBLISHED[int(eta)] - 1 for eta, k_tokens in found["simulated"].items()}
    assert set(errors) == set(paper.PUBLISHED)
    assert paper.RATIOS[0] < found["ratio"] < paper.RATIOS[1]
    assert all(abs(error) < 0.08 for error in errors.values()), errors


@pytest.mark.slow
def test_throughput_grows_nearly_in_proportion_to_the_devices() -> None:
    """A sixteenth of the paper's batch and devices: 2 to 32 devices, 32 prompts a batch."""
    small = replace(paper.scheduled(0.575, 8), batch_size=32, slots=256)
    k_tokens = {
        gpus: paper.throughput(replace(small, n_generators=gpus * 3 // 4, train_tokens_per_s=28_000.0 * gpus / 4))
        for gpus in (4, 32)
    }
    assert 0.8 < k_tokens[32] / k_tokens[4] / 8 <= 1.05
    together = paper.lines(
        paper.PaperFit(0.5, 1.0, paper.PUBLISHED),
        [paper.Scale(4, k_tokens[4], 1.0), paper.Scale(32, k_tokens[32], 1.0)],
    )
    assert together[-1].split()[:2] == ["32", f"{k_tokens[32]:,.0f}"]
