"""Stop strings in sampled tokens, also where a character has several tokens and the text of earlier ones changes."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from actors.engines.protocol import SamplingControls
from actors.engines.stop_strings import StopStrings

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "▁ab", "ba", "END", "▁STOP", "€", "</s>"]


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    vocabulary = {piece: n for n, piece in enumerate([*BYTES, *PIECES])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["</s>"])
    return SimpleNamespace(backend_tokenizer=backend)


def first_with(tokenizer: Any, ids: list[int], stops: tuple[str, ...]) -> int | None:
    """Tokens up to the first one whose whole text holds a stop string."""
    texts = (tokenizer.backend_tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(1, len(ids) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)


@pytest.mark.parametrize("seed", range(60))
def test_a_stop_string_is_found_in_any_sequence_of_bytes_and_pieces(byte_fallback: Any, seed: int) -> None:
    dice = random.Random(seed)
    stops = dice.sample(["END", "STOP", "ab a", "€", "b€", "</s>", "AB"], 2)
    euro = [0xE2, 0x82, 0xAC]
    choices = [*range(256, 256 + len(PIECES)), 0x41, 0x42, 0xFF, 0xC3, *euro]
    ids: list[int] = []
    while len(ids) < 200:
        ids += euro[: dice.randint(1, 3)] if dice.random() < 0.2 else [dice.choice(choices[:4] + choices[9:])]
    ids += [dice.choice(choices) for _ in range(60)]
    strings = StopStrings(byte_fallback, SamplingControls(stop=tuple(stops)))
    given: list[int] = []
    found = None
    while found is None and len(given) < len(ids):
        given += ids[len(given) : len(given) + dice.randint(1, 3)]
        found = strings.end(given)
    assert found == first_with(byte_fallback, ids, tuple(stops))


def test_a_stop_string_within_the_least_tokens_does_not_count(byte_fallback: Any) -> None:
    end, a = 256 + PIECES.index("END"), 256 + PIECES.index("a")
    strings = StopStrings(byte_fallback, SamplingControls(stop=("END",), min_new_tokens=3))
    assert strings.end([end, a]) is None
    assert strings.end([end, a, a, a]) is None
    assert strings.end([end, a, a, a, end]) == 5


def test_stop_strings_are_looked_for_in_linear_time(byte_fallback: Any) -> None:
    decoded: list[int] = []

    def decode(ids: list[int], **options: bool) -> str:
        decoded.append(len(ids))
        return str(byte_fallback.backend_tokenizer.decode(ids, **options))

    tokenizer: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(decode=decode))
    strings = StopStrings(tokenizer, SamplingControls(stop=("END",)))
    assert strings.end([257, 0xE2, 0x82] * 1_000) is None
    assert sum(decoded) < 100 * 3_000  # of the whole text for each token: 4,500,000
