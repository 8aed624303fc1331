"""The setting of the end-to-end benches for both sides: model, prompts, reward, optimizer.

Standard library only, so that every side's interpreter can import it. Every completion has exactly N_NEW tokens: the
end-of-text token is outside the model's vocabulary, so it is never sampled.
"""

import random
import zlib
from collections.abc import Mapping
from typing import Any

from benchmarks.generate import requests

SHAPE: dict[str, Any] = {**requests.SHAPE, "intermediate_size": 344}  # 857,216 parameters
N_GIVEN, N_NEW = requests.N_GIVEN, requests.N_NEW  # tokens of a prompt, of a completion
GROUPS, SAMPLES = 8, 8  # prompts of a batch, completions of a prompt
TOKENS = GROUPS * SAMPLES * N_NEW  # that enter a backward pass, a step
N_QUESTIONS = 512
PAD, EOS = 0, int(SHAPE["vocab_size"])  # token ids; EOS is one beyond
FIRST = 0x4E00  # the character of token 1; tokenizers leave these characters alone
SEED = 1

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.0  # AdamW, constant rate
CLIP_NORM, CLIP_RATIO = 1.0, 0.2


def character(token: int) -> str:
    return chr(FIRST + token - 1)


def vocabulary() -> dict[str, int]:
    """One token a character; padding first, end of text last."""
    characters = {character(token): token for token in range(1, EOS)}
    return {"<pad>": PAD, **characters, "<eos>": EOS}


def questions() -> list[str]:
    """Prompts of N_GIVEN tokens."""
    draw = random.Random(SEED)
    return ["".join(character(draw.randrange(1, EOS)) for _ in range(N_GIVEN)) for _ in range(N_QUESTIONS)]


def worth(completion: str) -> float:
    """The share of early characters, and a grain by the whole text that is smaller than one character's share.

    Two completions with the same reward are the same text, near enough, so no group is without advantage.
    """
    early = sum(letter < character(EOS // 2) for letter in completion)
    return (early + zlib.crc32(completion.encode()) / 2**32) / N_NEW


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Our reward function."""
    return worth(completion)
