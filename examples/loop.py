"""Asynchronous RL in one file: the algorithm of AReaL-Bus without its processes. Read it from `train` at the end.

    python examples/loop.py --eta 2 --steps 60

A small transformer learns to turn words of letters round. One process plays all roles in turn:

    gate       admits a prompt only if its batch will be trained at most eta versions after now (paper, eq. 3)
    sampler    has a copy of the weights that lags behind; records each token's log-prob and version
    reward     scores a finished answer
    learner    RLOO advantages, decoupled PPO (paper, eq. 5), AdamW; then the sampler gets the new weights

The paper is arXiv 2505.24298. Shapes: B sequences, T positions, V words. It needs torch only.
"""

import argparse
import copy
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LETTERS, N_GIVEN, N_NEW = "abcdefgh", 7, 7  # letters and ">" are given; letters and the end are new
WORDS = LETTERS + ">."  # ">" ends a prompt, "." ends an answer
BATCH, SAMPLES = 16, 8  # prompts of an update, answers of a prompt
EPS_CLIP, MAX_WEIGHT, LR, WARM_UP = 0.2, 5.0, 1e-3, 40


class Model(nn.Module):
    """A causal transformer: ids (B, T) to the log-probs of the next word (B, T, V)."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(WORDS), width), nn.Embedding(N_GIVEN + N_NEW, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(WORDS))

    def forward(self, ids_BT: Tensor) -> Tensor:
        n = ids_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        hidden = self.layers(self.words(ids_BT) + self.places(torch.arange(n)), mask=mask, is_causal=True)
        return torch.log_softmax(self.out(hidden), dim=-1)


@dataclass
class Sample:
    """One answer: what the sampler sends, then its reward."""

    prompt: str
    answer: str
    ids: list[int]  # prompt and answer
    logps: list[float]  # of the answer, under the weights that sampled it
    version: int  # of these weights. In the ring each token has its own, since updates arrive between tokens
    reward: float


class Gate:
    """Admits prompts so that none is trained more than eta versions after it was sampled."""

    def __init__(self, eta: int) -> None:
        self.eta, self.admitted = eta, 0

    def admit(self, version: int) -> bool:
        """Whether one more prompt may be sampled by these weights. The n-th prompt is in batch (n - 1) // BATCH."""
        if self.admitted // BATCH > version + self.eta:
            return False
        self.admitted += 1
        return True


def prompts(seed: int) -> Iterator[str]:
    """Endless words to turn round."""
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choices(LETTERS, k=rng.randint(2, N_GIVEN - 1)))


@torch.no_grad()
def sample(model: Model, version: int, word: str, generator: torch.Generator) -> list[Sample]:
    """SAMPLES answers to one prompt at temperature 1, with the log-probs that the sampler used."""
    given = [WORDS.index(letter) for letter in word + ">"]
    ids_BT = torch.tensor([given] * SAMPLES)
    logps: list[Tensor] = []
    for _ in range(N_NEW):
        logp_BV = model(ids_BT)[:, -1]
        new_B1 = torch.multinomial(logp_BV.exp(), 1, generator=generator)
        logps.append(logp_BV.gather(1, new_B1))
        ids_BT = torch.cat([ids_BT, new_B1], dim=1)
    logp_BK = torch.cat(logps, dim=1)
    found = []
    for ids, row in zip(ids_BT.tolist(), logp_BK.tolist(), strict=True):
        text = "".join(WORDS[i] for i in ids[len(given) :])
        n = text.index(".") + 1 if "." in text else N_NEW
        found.append(Sample(word, text[:n], ids[: len(given) + n], row[:n], version, reward(word, text[:n])))
    return found


def reward(word: str, answer: str) -> float:
    """The share of places that are right: a small model gets some of it at once."""
    right = word[::-1] + "."
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(right), len(answer))


def advantages(group: list[Sample]) -> list[float]:
    """RLOO: the reward minus the mean of the other answers to the same prompt."""
    total = sum(one.reward for one in group)
    return [one.reward - (total - one.reward) / (len(group) - 1) for one in group]


def logprobs(model: Model, batch: list[Sample]) -> Tensor:
    """Log-probs of all sampled words of a batch, one after the other: (N,)."""
    rows = nn.utils.rnn.pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True)
    logp_BTV = model(rows[:, :-1])
    logp_BT = logp_BTV.gather(2, rows[:, 1:, None])[:, :, 0]
    parts = [logp_BT[i, len(one.ids) - 1 - len(one.logps) : len(one.ids) - 1] for i, one in enumerate(batch)]
    return torch.cat(parts)


def decoupled_ppo(theta_N: Tensor, prox_N: Tensor, behav_N: Tensor, advantage_N: Tensor) -> Tensor:
    """Eq. 5: the clip is around the policy just before this update (prox), the weight corrects for the sampler (behav).

    Plain PPO would clip around the sampler, and so keep the policy near weights that are old.
    """
    ratio_N = (theta_N - prox_N).exp()
    weight_N = (prox_N - behav_N).exp().clamp(max=MAX_WEIGHT)
    plain_N, bounded_N = ratio_N * advantage_N, ratio_N.clamp(1 - EPS_CLIP, 1 + EPS_CLIP) * advantage_N
    return -(weight_N * torch.minimum(plain_N, bounded_N)).mean()


def update(model: Model, optimizer: torch.optim.Optimizer, groups: list[list[Sample]], n_minibatches: int = 2) -> None:
    """One version: some steps of the optimizer over one batch."""
    pairs = [(one, value) for group in groups for one, value in zip(group, advantages(group), strict=True)]
    with torch.no_grad():
        prox = {id(one): logprobs(model, [one]) for one, _ in pairs}
    for i in range(n_minibatches):
        part = pairs[i::n_minibatches]
        batch = [one for one, _ in part]
        behav_N = torch.tensor([logp for one in batch for logp in one.logps])
        advantage_N = torch.tensor([value for one, value in part for _ in one.logps])
        theta_N = logprobs(model, batch)
        loss = decoupled_ppo(theta_N, torch.cat([prox[id(one)] for one in batch]), behav_N, advantage_N)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def warm_up(model: Model, words: Iterator[str]) -> None:
    """A few supervised steps: a model that never gets a reward learns nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(WARM_UP):
        batch = []
        for word in (next(words) for _ in range(32)):
            right = word[::-1] + "."
            batch.append(Sample(word, right, [WORDS.index(x) for x in word + ">" + right], [0.0] * len(right), 0, 1.0))
        optimizer.zero_grad()
        (-logprobs(model, batch).mean()).backward()
        optimizer.step()


def train(eta: int, steps: int, seed: int = 1) -> list[tuple[float, int]]:
    """Mean reward and largest lag of each update."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator, words = torch.Generator().manual_seed(seed), prompts(seed)
    model = Model()
    warm_up(model, words)
    sampler, gate = copy.deepcopy(model), Gate(eta)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    finished: deque[list[Sample]] = deque()  # groups, the oldest first
    history = []
    for version in range(steps):
        while gate.admit(version):  # in the ring this happens while the learner trains
            finished.append(sample(sampler, version, next(words), generator))
        batch = [finished.popleft() for _ in range(BATCH)]
        lag = max(version - group[0].version for group in batch)
        update(model, optimizer, batch)
        sampler.load_state_dict(model.state_dict())  # the push: the sampler has version + 1 now
        history.append((sum(one.reward for group in batch for one in group) / (BATCH * SAMPLES), lag))
        print(f"version {version + 1:3}  reward {history[-1][0]:.3f}  lag {lag} (at most {eta})", flush=True)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Asynchronous RL in one file.")
    parser.add_argument("--eta", type=int, default=1, help="largest lag, in versions (1)")
    parser.add_argument("--steps", type=int, default=60, help="updates (60)")
    given = parser.parse_args()
    train(given.eta, given.steps)
