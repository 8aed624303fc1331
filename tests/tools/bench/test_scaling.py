"""The bench of curves: what each point measures runs, and the pictures show every point."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.bench.scaling import bench as curves
from tools.bench.scaling import ours
from tools.bench.scaling.bench import Curve, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_every_point_and_name() -> None:
    lines = {"a < b": [(1, 10.0), (4, 20.0), (2, 15.0)], "c": [(1, 1.0), (4, 100.0)]}
    picture = ET.fromstring(svg("Title", "slots", "ms", lines))
    assert len(picture.findall(f"{SVG}circle")) == 5
    words = [element.text for element in picture.findall(f"{SVG}text")]
    assert {"Title", "slots", "ms", "a < b", "c", "100"} <= set(words)
    first = picture.findall(f"{SVG}polyline")[0].attrib["points"].split()
    across = [float(point.split(",")[0]) for point in first]
    assert across == sorted(across), "a line goes from left to right"
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2), "doubling is a step of one length"
    down = [float(point.split(",")[1]) for point in first]
    assert down == sorted(down, reverse=True), "more is higher up"


def test_what_is_not_above_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        svg("", "", "", {"a": [(0, 1.0)]})
    with pytest.raises(ValueError, match="one point"):
        svg("", "", "", {})


def test_ticks_are_round() -> None:
    assert ticks(1, 30) == [1, 2, 5, 10, 20]
    assert ticks(1, 1000) == [1, 10, 100, 1000]


def test_every_point_is_a_cost() -> None:
    assert ours.engine(slots=2, context=8) > 0
    assert ours.packing(64) > 0
    assert ours.head(ranks=16, steps=1, rounds=1) > 0


def test_curves_are_asked_for_point_by_point_and_written(tmp_path: Path) -> None:
    class Exact:
        def ask(self, do: str, **arguments: int) -> float:
            return 1e-6 * sum(arguments.values())

    drawn = curves.draw(Exact())
    curves.write(drawn, tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["engine-context", "engine-slots", "head", "packing"]
    found = curves.figures(drawn)
    assert found["packing: pack at 8192"] == pytest.approx(8.192)
    assert found["engine-slots: 64 positions at 32"] == pytest.approx(0.096)
    assert found["engine-context: 8 slots at 2048"] == pytest.approx(2.056)
    assert curves.figures([Curve("f", "", "", "", {"l": [(2, 3.0)]})]) == {"bench": "curves", "f: l at 2": 3.0}
