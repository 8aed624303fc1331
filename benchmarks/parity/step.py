"""Our half of the one-step check: an update of the learner's actor on the completions that TRL has sampled."""

import array
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model, load_tokenizer
from actors.runtime.context import HeartbeatState
from areal_bus.config.sections import Config
from areal_bus.messages import ShardItem
from areal_bus.storage.journal import Journal
from benchmarks.harness.worker_main import serve
from benchmarks.parity import setting
from benchmarks.parity.setting import TASKS, Row, Task, read, reward_of


def compare(name: str, folder: str, rows: str, batch: dict[str, Any], gradient: str) -> dict[str, float]:
    """Our update on TRL's batch: the largest difference of advantages, and relative ones of loss, norm and gradient
    (L2 over all parameters).
    """
    task = TASKS[name]
    actor = PPOActor(
        Policy(load_model(folder, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0),
        Config.model_validate(settings(task)),
        context(Path(tempfile.mkdtemp())),
    )
    shard, given = items(task, batch, read(rows), load_tokenizer(folder))
    trained = build(shard, step=0, clock=0, n_groups=task.groups, eta=0, n_samples=task.samples)
    stats = actor.ppo_update(actor.compute_advantages_and_returns(trained))
    loss = stats["loss"] * stats["n_tokens_trained"] / stats["loss_denominator"]  # the journal's is of trained tokens
    if trained.advantages is None:
        raise RuntimeError("missing advantages after an update")
    theirs: dict[str, Tensor] = load_file(gradient)
    mine = {key: value.grad for key, value in actor.policy.parameters().items() if value.grad is not None}
    if mine.keys() != theirs.keys():
        raise RuntimeError(f"mismatch of parameters: {sorted(mine.keys() ^ theirs.keys())[:4]} are on one side")
    apart = sum(float((mine[key] - theirs[key]).double().square().sum()) for key in theirs)
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    return {
        "n_with_signal": int((torch.tensor(given) != 0).sum()),
        "loss": loss,
        "norm": stats["grad_norm"],
        "advantage_difference": float((trained.advantages - torch.tensor(given)).abs().max()),
        "loss_difference": abs(loss - batch["loss"]),
        "norm_difference": abs(stats["grad_norm"] / batch["norm"] - 1),
        "gradient_difference": (apart / size) ** 0.5,
    }


def settings(task: Task) -> dict[str, Any]:
    """Those of the job, without decoupling: TRL keeps no log-probs of the sampler."""
    return {
        "model": {"scratch": {}},  # not built: the model is given
        "data": {"task": "sums", "batch_size": task.groups},
        "gconfig": {"n_samples": task.samples},
        "actor": {
            "use_decoupled_loss": False,
            "advantage": "grpo",
            "std_eps": setting.STD_EPS,
            "lr": task.lr,
            "eps_clip": setting.CLIP_RATIO,
            "max_grad_norm": setting.CLIP_NORM,
        },
    }


def context(folder: Path) -> UpdateContext:
    journal = Journal(folder / "journal", role="learner", index=0, incarnation=0)
    return UpdateContext(journal, HeartbeatState(), folder)


def items(task: Task, batch: dict[str, Any], rows: list[Row], tokenizer: Any) -> tuple[list[ShardItem], list[float]]:
    """The batch as the head sends it, group by group, and TRL's advantages in that order."""
    score, by_text = reward_of(task), {row["text"]: row for row in rows}
    drawn = []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    for prompt, prompt_mask, ids, mask, advantage in zip(*(batch[name] for name in names), strict=True):
        asked, sampled = kept(prompt, prompt_mask), kept(ids, mask)
        text = tokenizer.decode(asked)
        reward = float(score(text, tokenizer.decode(sampled, skip_special_tokens=True), by_text[text]).reward)
        drawn.append((asked, sampled, reward, advantage))
    drawn.sort(key=lambda one: one[0])
    made = []
    for i, (asked, sampled, reward, _) in enumerate(drawn):
        group, sample = divmod(i, task.samples)
        made.append(item(task, group, sample, asked, sampled, reward))
    return made, [advantage for *_, advantage in drawn]


def kept(ids: list[int], mask: list[int]) -> list[int]:
    return [one for one, is_kept in zip(ids, mask, strict=True) if is_kept]


def item(task: Task, group: int, sample: int, asked: list[int], sampled: list[int], reward: float) -> ShardItem:
    n = len(sampled)
    return ShardItem(
        step=0, clock=0, group=group, n_groups=task.groups, uid=group, sample=sample, reward=reward, correct=None,
        finish="stop", segments=[[len(asked), n]], spans=[[0, n]], ids=array.array("i", asked + sampled).tobytes(),
        logps=array.array("f", [-1.0] * n).tobytes(), text="",
    )  # fmt: skip


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"compare": compare})
