"""The reward `judge`: a language model behind an OpenAI-compatible URL grades the completion.

`scoring.py` fills the prompt and reads the grade, `client.py` makes the calls and holds what the workers of
a host share: cache, budget and concurrency. docs/judge.md.
"""

from actors.rewards.judge.scoring import score

__all__ = ["score"]
