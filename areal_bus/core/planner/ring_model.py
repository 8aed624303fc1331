"""A small fluid model of a ring: how many updates a second a split and an eta give. Pure: no I/O.

Three limits bound a ring (docs/adapt.md): the learner, the slots of the generators, and the credits of the gate. By
Little's law, credits = updates/s * the time for which a group holds its credit: it is sampled, scored, waits for its
batch, is trained, and its version is published. `areal_lab/simulate` is the discrete-event model to compare with.
"""

from dataclasses import dataclass

SHARPNESS = 8.0  # of the soft minimum of the limits: random times cost a few per cent where two limits are equal
WAITS_FOR_BATCH = 0.5  # batches that are complete on average while the next batch fills
N_BISECTIONS = 30


@dataclass(frozen=True, slots=True)
class RingFigures:
    """The measured figures of a ring that do not depend on its split or its eta."""

    batch_size: int  # B, groups
    n_samples: int  # of a group
    slots: int  # of a generator
    mean_tokens: float  # sampled tokens of a sample
    longest_tokens: float  # of the longest sample of a group, on average
    decode_s: float  # time of a decode step that does not depend on the live samples
    decode_sample_s: float  # time that each live sample adds to a decode step
    train_s: float  # time of an update that does not depend on its tokens
    train_token_s: float  # time of one sampled token on one learner rank
    push_s: float = 0.0  # from the end of an update to the publication of its version
    reward_s: float = 0.0  # from the last sample of a group to its last score

    @property
    def batch_tokens(self) -> float:
        """Sampled tokens of a batch."""
        return self.batch_size * self.n_samples * self.mean_tokens

    def step_s(self, n_live: float) -> float:
        """Time of a decode step with `n_live` samples."""
        return self.decode_s + self.decode_sample_s * n_live

    def update_s(self, learners: int) -> float:
        """Time of an update."""
        return self.train_s + self.train_token_s * self.batch_tokens / learners


def updates_per_s(ring: RingFigures, *, learners: int, generators: int, eta: int) -> float:
    """Predicted updates a second in the steady state. The slots bind at eta > 0.

    Raises ValueError for a split without a learner or generator.
    """
    if learners < 1 or generators < 1:
        raise ValueError(f"a ring needs a learner and a generator; got {learners} and {generators}")
    if eta == 0:
        return 1 / (_synchronous_s(ring, generators) + _after_sampling_s(ring, learners))
    learner = 1 / ring.update_s(learners)
    sampled = _sampled_per_s(ring, generators, ring.slots)
    credits = _credit_limit(ring, learners, generators, eta)
    return float(sum(limit**-SHARPNESS for limit in (learner, sampled, credits)) ** (-1 / SHARPNESS))


def _sampled_per_s(ring: RingFigures, generators: int, n_live: float) -> float:
    """Batches a second that the generators sample, each with `n_live` live samples."""
    return generators * n_live / ring.step_s(n_live) / ring.batch_tokens


def _after_sampling_s(ring: RingFigures, learners: int) -> float:
    """Seconds from the last sample of a batch to the publication of its version."""
    return ring.reward_s + ring.update_s(learners) + ring.push_s


def _credit_limit(ring: RingFigures, learners: int, generators: int, eta: int) -> float:
    """Updates a second that the gate permits: the number of live samples where both sides of Little's law agree."""
    after_s, n_batches = _after_sampling_s(ring, learners), eta + 1 - WAITS_FOR_BATCH
    low, high = 0.0, float(ring.batch_size * ring.n_samples * (eta + 1))  # live samples of one generator
    for _ in range(N_BISECTIONS):
        n_live = (low + high) / 2
        permitted = n_batches / (ring.longest_tokens * ring.step_s(n_live) + after_s)
        if _sampled_per_s(ring, generators, n_live) < permitted:
            low = n_live
        else:
            high = n_live
    return n_batches / (ring.longest_tokens * ring.step_s(low) + after_s)


def _synchronous_s(ring: RingFigures, generators: int) -> float:
    """eta = 0: seconds to sample a whole batch from idle generators. Every share ends with its longest sample."""
    n_samples = ring.batch_size * ring.n_samples / generators
    waves_tokens = max(0.0, n_samples - ring.slots) / ring.slots * ring.mean_tokens  # before the last wave begins
    n_steps = waves_tokens + ring.longest_tokens
    return n_steps * ring.decode_s + n_samples * ring.mean_tokens * ring.decode_sample_s
