"""Small real parts for learner tests: a random Llama, trajectories as the head sends them, an actor and its updates."""

import array
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.learner.batching import Batch, build
from actors.learner.checkpoint import checkpoint
from actors.learner.checkpoint.memory_copy import state_of
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.adapters import Adapters
from actors.learner.model.critic import ValueModel
from actors.learner.model.frozen_model import FrozenModel, FrozenModels, PolicyBase
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.runtime.context import HeartbeatState
from areal_bus.config.algorithms import uses_reference, uses_teacher
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.messages import ShardItem
from areal_bus.storage.journal import Journal

VOCABULARY = 23
PLAIN: dict[str, Any] = {"task": "sums", "chat_template": False}  # [data] of a config that `check` accepts


def tiny_model(seed: int = 0, *, key_heads: int = 2, tied: bool = False, n_layers: int = 2) -> Any:
    """A small Llama with grouped keys."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=n_layers,
            num_attention_heads=4,
            num_key_value_heads=key_heads,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config)


def settings(**sections: dict[str, Any]) -> Config:
    """A config with [model.scratch] and the sections given."""
    base: dict[str, Any] = {"model": {"scratch": {}}, "data": {"task": "sums"}, "gconfig": {"n_samples": 4}}
    return Config.model_validate(base | sections)


def tiny_actor(
    folder: Path,
    config: Config | None = None,
    *,
    model: Any = None,
    ranks: LearnerRanks | None = None,
    adapters_from: Path | None = None,
) -> PPOActor:
    """`adapters_from`: the model folder of a checkpoint."""
    config = config or settings()
    model = model or tiny_model()
    lora = config.actor.lora
    adapters = None if lora is None else Adapters(model, lora, seed=config.run.seed, base="base")
    if adapters is not None and adapters_from is not None:
        adapters.read(adapters_from)
    policy = Policy(
        model,
        adapters,
        ranks=ranks or LearnerRanks(),
        device="cpu",
        temperature=config.gconfig.temperature,
        dtype=config.model.dtype,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        compile=config.learner.compile,
        offload=config.actor.offload == "all",
    )
    reference = PolicyBase(policy, adapters) if adapters is not None else None
    frozen = FrozenModels(
        (reference or frozen_model(policy, seed=1)) if uses_reference(config.actor) else None,
        frozen_model(policy, seed=2) if uses_teacher(config.actor) else None,
    )
    journal = Journal(folder / "journal", role="learner", index=policy.ranks.index, incarnation=0)
    offload = config.actor.offload == "all"
    how: dict[str, Any] = {"ranks": policy.ranks, "device": "cpu", "dtype": config.model.dtype, "offload": offload}
    critic = ValueModel(tiny_model(7), temperature=1.0, **how) if config.actor.advantage == "gae" else None
    return PPOActor(policy, config, UpdateContext(journal, HeartbeatState(), folder), frozen=frozen, critic=critic)


def frozen_model(policy: Policy, *, seed: int) -> FrozenModel:
    """A reference or teacher for this policy: equal to a policy of `tiny_model(seed)`."""
    return FrozenModel(
        tiny_model(seed).to(policy.dtype),
        ranks=policy.ranks,
        device="cpu",
        temperature=policy.temperature,
        dtype=str(policy.dtype).removeprefix("torch."),
    )


def shard_item(
    *,
    group: int = 0,
    sample: int = 0,
    reward: float = 0.0,
    prompt: list[int] | None = None,
    sampled: list[int] | None = None,
    logps: list[float] | None = None,
    spans: list[list[int]] | None = None,
    segments: list[list[int]] | None = None,
    clock: int = 0,
    n_groups: int = 1,
    finish: str = "stop",
    correct: bool | None = None,
) -> ShardItem:
    """One trajectory; by default a prompt of three tokens and a completion of four by version `clock`."""
    prompt = [5, 6, 7] if prompt is None else prompt
    sampled = [2, 3, 4, 1] if sampled is None else sampled
    n = len(sampled)
    return ShardItem(
        step=clock,
        clock=clock,
        group=group,
        n_groups=n_groups,
        uid=group,
        sample=sample,
        reward=reward,
        correct=correct,
        finish=finish,
        segments=[[len(prompt), n]] if segments is None else segments,
        spans=[[clock, n]] if spans is None else spans,
        ids=array.array("i", [*prompt, *sampled]).tobytes(),
        logps=array.array("f", [-3.0] * n if logps is None else logps).tobytes(),
        text=f"sample {sample} of group {group}",
    )


def random_shard(
    seed: int, *, n_groups: int = 3, n_samples: int = 4, clock: int = 0, old: bool = False
) -> list[ShardItem]:
    """Groups of random lengths, tokens, log-probs and rewards; with `old`, half of the tokens are by version 0."""
    draw = random.Random(seed)
    items = []
    for group in range(n_groups):
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(2, 9))]
        for sample in range(n_samples):
            n = draw.randint(2, 12)
            spans = [[0, n // 2], [clock, n - n // 2]] if old else [[clock, n]]
            items.append(
                shard_item(
                    group=group,
                    sample=sample,
                    n_groups=n_groups,
                    reward=draw.choice([0.0, 0.25, 1.0]) + sample * 1e-3,
                    prompt=prompt,
                    sampled=[draw.randrange(1, VOCABULARY) for _ in range(n)],
                    logps=[draw.uniform(-5, -1) for _ in range(n)],
                    spans=spans,
                    clock=clock,
                )
            )
    return items


def masked_log_probs_lowered(shard: Sequence[ShardItem]) -> list[ShardItem]:
    """The items with other log-probs for the tokens of their first span."""
    changed = []
    for item in shard:
        logps = torch.frombuffer(bytearray(item.logps), dtype=torch.float32)
        logps[: item.spans[0][1]] -= 7.0
        changed.append(replace(item, logps=logps.numpy().tobytes()))
    return changed


def batch_of(shard: Sequence[ShardItem], *, clock: int = 0, eta: int = 1) -> Batch:
    return build(shard, step=clock, clock=clock, n_groups=shard[0].n_groups if shard else 0, eta=eta)


def prepared(actor: PPOActor, shard: Sequence[ShardItem], *, eta: int = 1) -> Batch:
    """The batch with its advantages; the actor is put at the version that the shard was taken at."""
    actor.version = shard[0].clock if shard else 0
    return actor.compute_advantages_and_returns(batch_of(shard, clock=actor.version, eta=eta))


def update(actor: PPOActor, shard: Sequence[ShardItem], *, eta: int = 1) -> dict[str, float]:
    """The figures of one update, at the version that the shard was taken at."""
    return actor.ppo_update(prepared(actor, shard, eta=eta))


def train(actor: PPOActor, versions: range) -> list[dict[str, float]]:
    """The figures of updates from these versions on, without the time that they took."""
    made = []
    for version in versions:
        batch = batch_of(random_shard(version, clock=version), clock=version)
        made.append(actor.ppo_update(actor.compute_advantages_and_returns(batch)) | {"update_s": 0.0})
    return made


def watch_gradients(actor: PPOActor) -> list[Tensor]:
    """Gets those of the next optimizer step of the policy, as the optimizer gets them, and of a critic's."""
    pairs = [(actor.policy, actor.optimizer)]
    pairs += [] if actor.critic is None else [(actor.critic.model, actor.critic.optimizer)]
    found: list[Tensor] = []
    seen: set[int] = set()
    for model, optimizer in pairs:

        def look(*_: Any, model: Policy = model) -> None:
            if id(model) not in seen:
                seen.add(id(model))
                found.extend(p.grad.clone() for p in model.parameters().values() if p.grad is not None)

        optimizer.register_step_pre_hook(look)
    return found


def gradients(actor: PPOActor, shard: Sequence[ShardItem]) -> list[Tensor]:
    """Of the first optimizer step of an update."""
    found = watch_gradients(actor)
    update(actor, shard)
    return found


def weights(model: Any) -> dict[str, Tensor]:
    """Copies, of a policy, a critic's model or a frozen model."""
    return {name: parameter.detach().clone() for name, parameter in model.parameters().items()}


class NoTokenizer:
    """Stands where a tokenizer does in an export."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "words.json").write_text("{}")


def scratch_tokenizer(folder: Path) -> Any:
    """Of the characters of the tasks, from the folder of a model without weights."""
    write_scratch_folder(folder, ScratchConfig())
    return load_tokenizer(str(folder))


def save(actor: PPOActor, folder: Path, *, tokenizer: Any = None, keep: int = 2, **more: Any) -> Path:
    """FOLDER/step-VERSION."""
    return checkpoint.save(
        folder,
        policy=actor.policy,
        optimizer=actor.optimizer,
        version=actor.version,
        tokenizer=tokenizer or NoTokenizer(),
        keep=keep,
        critic=actor.critic,
        reference=actor.kept_reference,
        **more,
    )


def resume(actor: PPOActor, folder: Path) -> None:
    """All of a checkpoint but the weights of a float32 policy, which are in its model folder."""
    state = checkpoint.load(folder)
    checkpoint.restore(state, policy=actor.policy, optimizer=actor.optimizer)
    if actor.critic is not None:
        checkpoint.restore_critic(folder, actor.critic)
    actor.version = state.version


def begun_at(
    folder: Path, config: Config, checkpoint: Path | None = None, *, ranks: LearnerRanks | None = None
) -> PPOActor:
    """An actor that continues from a checkpoint; without one a new actor."""
    if checkpoint is None:
        return tiny_actor(folder, config, ranks=ranks)
    model, has_lora = checkpoint / "model", config.actor.lora is not None
    whole = tiny_model() if has_lora else load_model(str(model), "float32", "cpu")
    actor = tiny_actor(folder, config, model=whole, ranks=ranks, adapters_from=model if has_lora else None)
    resume(actor, checkpoint)
    return actor


def check_equal_states(one: PPOActor, other: PPOActor) -> None:
    """Weights, optimizer states and running statistics, of a critic and a kept reference, too, bit for bit."""
    mine, others = state_of(one), state_of(other)
    assert mine.keys() == others.keys()
    assert [key for key in mine if not torch.equal(mine[key], others[key])] == []


# states of a run that must survive a stop

LORA: dict[str, Any] = {"rank": 4, "dropout": 0.1}
RESUMED: dict[str, dict[str, Any]] = {
    "adamw of groups": {"optimizer": "adamw", "group": [{"match": "norm", "weight_decay": 0.0}], "weight_decay": 0.1},
    "critic": {"advantage": "gae", "gae_lambda": 0.9, "lr_warmup_steps": 9},
    "critic alone": {"advantage": "gae", "warmup_updates": 4},
    "four bits": {"lora": {"rank": 4, "variant": ["nf4", "rslora"]}},
    "lora": {"lora": LORA, "kl_ctl": 0.1},
    "muon": {"optimizer": "muon", "adamw_lr": 1e-4, "weight_decay": 0.1},
    "muon of lora": {"optimizer": "muon", "lora": LORA, "weight_decay": 0.1},
    "own": {"optimizer": f"{__name__}:own"},
    "own in bfloat16": {"optimizer": f"{__name__}:own_in_bfloat16"},
    "nadam": {"optimizer": f"{__name__}:nadam"},
    "running rewards": {"reward_scaling": "running", "advantage": "rloo"},
    "running returns": {"reward_scaling": "running", "advantage": "gae"},
    "schedule": {"lr": 1e-2, "lr_schedule": "cosine", "lr_warmup_steps": 3, "ppo_n_minibatches": 2},
    "sgd": {"optimizer": "sgd", "weight_decay": 0.1},
}  # [actor], and `warmup_updates` of [critic]


def resumed_config(kind: str, dtype: str = "float32") -> Config:
    actor = {"lr": 1e-3, "ppo_epochs": 2, **RESUMED[kind]}
    critic = {"eps_clip": 0.1, "warmup_updates": actor.pop("warmup_updates", 0)} if "critic" in kind else {}
    model, run = {"scratch": {}, "dtype": dtype}, {"total_train_steps": 6}
    return settings(model=model, actor=actor, critic=critic, run=run)


class Own(torch.optim.Optimizer):
    """Momentum, with numbers of Python in its state, as many have them, and a state of this dtype."""

    def __init__(self, parameters: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(list(parameters), {"lr": 1e-2})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                momentum = torch.zeros_like(parameter, dtype=self._dtype)
                state |= {"step": 0, "beta": 0.9, "is_warm": True, "m": momentum}
            state["step"] += 1
            state["m"].mul_(state["beta"]).add_(parameter.grad)
            parameter.sub_(state["m"], alpha=1e-2 / state["step"])


def own(parameters: dict[str, Tensor], actor: Any) -> Own:
    return Own(parameters.values())


def own_in_bfloat16(parameters: dict[str, Tensor], actor: Any) -> Own:
    return Own(parameters.values(), torch.bfloat16)


def nadam(parameters: dict[str, Tensor], actor: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters.values(), lr=1e-2)
