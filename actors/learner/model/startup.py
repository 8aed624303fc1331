"""Start of a learner: loads policy and critic, and runs the supervised warm-up."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from actors.data.loading import load_rows
from actors.learner.batching import pack
from actors.learner.model.adapters import Adapters, check_folder
from actors.learner.model.critic import ValueModel
from actors.learner.model.policy import ModelSettings, Policy
from actors.models.loading import check_model_path, load_base, load_model, turn_end
from actors.models.model_config import base_of, is_adapter_folder
from actors.models.packed_row import SequencePiece
from actors.runtime.context import Context, HeartbeatState
from actors.runtime.stages import stages_of
from actors.workflows.prompts import prompt_ids, prompt_of
from actors.workflows.protocol import Row
from areal_bus.config.data import DataConfig
from areal_bus.config.learner import WarmupConfig
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.core.parts.stages import stage_at
from areal_bus.errors import ConfigError, NonFinite
from areal_bus.storage.journal import Journal
from areal_bus.storage.versioned_dirs import temporary_folder

WARMUP_BATCH = 64  # demonstrations of a supervised step
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of a prompt and of the completion to imitate, with the token that ends it."""

    prompt: Sequence[int]
    completion: Sequence[int]

    def piece(self) -> SequencePiece:
        ids_T = torch.tensor([*self.prompt, *self.completion], dtype=torch.int64)
        return SequencePiece(ids_T=ids_T, places_K=torch.arange(len(self.prompt), len(ids_T)))


def demonstrate(rows: Sequence[Row], tokenizer: Any, data: DataConfig) -> list[Demonstration]:
    """The demonstrations of the rows: prompt, answer and the token that ends a turn of the template, or a text."""
    turn = turn_end(tokenizer) if data.chat_template else None
    end = tokenizer.eos_token_id if turn is None else turn
    return [
        Demonstration(
            prompt=prompt_ids(prompt_of(row, data), data, tokenizer),
            completion=ended(tokenizer(row["demonstration"], add_special_tokens=False)["input_ids"], end),
        )
        for row in rows
        if row.get("demonstration")
    ]


def ended(ids: Sequence[int], end: int) -> list[int]:
    """The tokens with the end behind them, once."""
    return [*ids] if ids and ids[-1] == end else [*ids, end]


def warm_up(
    policy: Policy,
    demonstrations: Sequence[Demonstration],
    settings: WarmupConfig,
    *,
    seed: int,
    capacity: int,
    journal: Journal,
    heartbeat: HeartbeatState,
    tick: Callable[[], None] = lambda: None,
) -> list[float]:
    """`settings.steps` AdamW steps on the mean log-prob of the completions; returns the losses. `tick`: at every step.

    Each rank takes its share of the same batches (`seed`). Raises NonFinite, and ConfigError without demonstrations.
    """
    if not demonstrations:
        raise ConfigError("missing demonstrations in the data: learner.warmup needs them; set learner.warmup.steps = 0")
    draw = random.Random(f"warmup {seed}")
    torch.manual_seed(random.Random(f"warmup {seed} {policy.ranks.index}").getrandbits(63))  # of adapters' dropout
    optimizer = torch.optim.AdamW(list(policy.parameters().values()), lr=settings.lr, weight_decay=0.0)
    order: list[int] = []
    losses: list[float] = []
    for step in range(settings.steps):
        while len(order) < WARMUP_BATCH:
            order += draw.sample(range(len(demonstrations)), len(demonstrations))
        chosen, order = order[:WARMUP_BATCH], order[WARMUP_BATCH:]
        share = [demonstrations[i].piece() for i in chosen[policy.ranks.share :: policy.ranks.n_shares]]
        optimizer.zero_grad()
        losses.append(_gradient(policy, share, capacity=capacity))
        if not math.isfinite(losses[-1]):
            raise NonFinite(f"a warm-up loss must be finite: {losses[-1]} at step {step}; lower learner.warmup.lr")
        clip_grad_norm_(policy.parameters().values(), MAX_GRAD_NORM)
        optimizer.step()
        heartbeat.progress += 1
        heartbeat.note = f"warm-up step {step + 1} of {settings.steps}, loss {losses[-1]:.3f}"
        if policy.ranks.index == 0:
            journal.write(Event.WARMUP, step=step, loss=losses[-1])
        journal.mark("warmup")
        tick()
    return losses


def _gradient(policy: Policy, pieces: list[SequencePiece], *, capacity: int) -> float:
    """Accumulate the gradient of the mean token loss over all ranks; returns that loss."""
    (n_tokens,) = policy.ranks.sum([float(sum(len(piece.places_K) for piece in pieces))])
    parts = pack([piece.n_read for piece in pieces], capacity=policy.row_tokens(capacity))
    (most,) = policy.ranks.max([float(len(parts))])
    total = 0.0
    for part in parts:
        logp_N, _ = policy.logprobs([pieces[i] for i in part])
        loss = -logp_N.sum() / n_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    for _ in range(int(most) - len(parts)):
        policy.idle_pass()
    (mean,) = policy.ranks.sum([total])
    return mean


def load_policy(config: Config, model: str, settings: ModelSettings, *, checkpoint: str = "") -> Policy:
    """The weights of the checkpoint, else of the folder `model`. With actor.lora: the base of `model`, and the adapters
    of the checkpoint, of `model`, or new ones. Raises ConfigError; CheckpointError: those do not fit actor.lora.
    """
    lora, seed = config.actor.lora, config.run.seed
    is_scratch = config.model.scratch is not None
    held = Path(checkpoint) / "model"
    if checkpoint:
        check_folder(held, has_lora=lora is not None)
    if lora is None:
        folder = str(held) if checkpoint else model
        random_seed = seed if is_scratch and not checkpoint else None
        return Policy(load_model(folder, "float32", _place(settings), random_seed=random_seed), **settings)
    on_host, place = config.actor.offload == "base", _place(settings)
    base = load_base(
        config, model, "cpu" if on_host or "nf4" in lora.variant else place
    )  # `Policy` moves what may move
    if is_scratch and settings["ranks"].index == 0:
        write_base(base, base_folder(model))
    named = base_folder(model) if is_scratch else base_of(model)
    adapters = Adapters(base, lora, seed=seed, base=named, on_host=on_host)
    if checkpoint or is_adapter_folder(Path(model)):
        adapters.read(held if checkpoint else Path(model))
    return Policy(base, adapters, **settings)


def base_folder(model: str) -> str:
    """Where a model from scratch is written, beside its description, so that adapters can be loaded elsewhere."""
    return str(Path(model).resolve().with_name("base"))


def write_base(model: Any, folder: str) -> None:
    """Write the model as a transformers folder, once."""
    final = Path(folder)
    if not final.exists():
        with temporary_folder(final) as building:
            model.save_pretrained(building)
            building.rename(final)


def load_critic(config: Config, model: str, settings: ModelSettings, *, config_folder: Path) -> ValueModel | None:
    """The critic of actor.advantage = "gae": critic.path, or the run's model. A checkpoint is restored later."""
    if config.actor.advantage != "gae":
        return None
    is_scratch = config.model.scratch is not None and not config.critic.path
    if config.critic.path:
        model = check_model_path(config.critic.path, config_folder, key="critic.path")
    seed = config.run.seed if is_scratch else None
    return ValueModel(load_model(model, "float32", _place(settings), random_seed=seed), **settings)


def _place(settings: ModelSettings) -> str:
    """Where the weights are loaded: sharding moves them from the host layer by layer."""
    return "cpu" if settings["ranks"].size > 1 or settings.get("offload", False) else settings["device"]


def warm(
    policy: Policy,
    config: Config,
    context: Context,
    *,
    tokenizer: Any,
    journal: Journal,
    heartbeat: HeartbeatState,
    tick: Callable[[], None],
) -> None:
    """Run the configured supervised steps before version 0."""
    rows = load_rows(config, context.config_folder)
    warm_up(
        policy,
        demonstrate(rows, tokenizer, config.data),
        config.learner.warmup,
        seed=config.run.seed,
        capacity=stage_at(stages_of(config), 0).max_tokens_per_mb,
        journal=journal,
        heartbeat=heartbeat,
        tick=tick,
    )
