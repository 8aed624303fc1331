"""How fast one generator samples, as a law of how many samples are live; knows no sample, version or clock.

A decode step reads all the weights once, whoever is live, and then costs a bit for each sample: its time is affine in
their number, and the tokens a second rise to a limit. Longer contexts cost no more here, and prefills stop decoding.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one generator."""

    decode_tokens_per_s: float  # of all live samples together, at the limit of many
    half_slots: float  # live samples that reach half of it; 0: one reaches all of it
    prefill_tokens_per_s: float
    update_s: float  # it stands still so long when it swaps in weights

    def step_s(self, n_live: int) -> float:
        """One token for each live sample."""
        return (n_live + self.half_slots) / self.decode_tokens_per_s

    def prefill_s(self, n_tokens: int) -> float:
        return n_tokens / self.prefill_tokens_per_s

    def tokens_per_s(self, n_live: int) -> float:
        """Of all live samples together."""
        return n_live / self.step_s(n_live) if n_live else 0.0
