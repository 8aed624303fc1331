"""How old the tokens of one trajectory were when it was trained; knows only versions, counts and the clock c."""

from collections.abc import Iterable, Sequence

Spans = list[tuple[int, int]]  # (version, number of sampled tokens in a row), in order


def pairs(flat: Sequence[int]) -> Spans:
    """Spans from the journal's flat form [version, n, version, n, ...]. Raises ValueError on an odd length."""
    if len(flat) % 2:
        raise ValueError(f"flat spans are pairs of version and count: {len(flat)} numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))


def trained(spans: Iterable[Sequence[int]], n_masked: int) -> Spans:
    """The spans without their first n_masked tokens: versions never decrease (I5), so the masked ones come first."""
    left = n_masked
    rest = []
    for version, n in spans:
        masked = min(left, n)
        left -= masked
        if n > masked:
            rest.append((version, n - masked))
    return rest


def max_trained_lag(spans: Iterable[Sequence[int]], *, clock: int, n_masked: int) -> int | None:
    """Largest c - ver(t) over the tokens that were trained (I2); None when none was."""
    return max((clock - version for version, _ in trained(spans, n_masked)), default=None)
