"""TRL's side of the bench `parity`: GRPOTrainer over given rows in a given order, one process, one thread.

It counts seconds from the start of training: loading and evaluation are outside. bf16 and gradient checkpointing, on by
default, are off: the comparison is in float32.
"""

import importlib
import time
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.harness.worker_main import serve
from benchmarks.parity.setting import (
    ANSWERS,
    BETAS,
    CLIP_NORM,
    CLIP_RATIO,
    DECAY,
    EPS,
    TASKS,
    Row,
    Task,
    read,
    reward_of,
)

trl: Any = importlib.import_module("trl")


class Updates(TrainerCallback):
    """Reward, length and seconds at the end of each update."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "num_tokens" in logs:
            names = {"reward": "reward", "length": "completions/mean_length", "norm": "grad_norm", "loss": "loss"}
            line = {name: float(logs[key]) for name, key in names.items()}
            self.lines.append(line | {"s": time.monotonic() - self._began})


class FirstStep(trl.GRPOTrainer):  # type: ignore[misc]
    """Keeps the batch of a single step, its loss and its clipped gradient."""

    kept: dict[str, Any]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        self.kept = {name: inputs[name].tolist() for name in names} | {"loss": float(loss)}
        return loss


class KeepsGradient(TrainerCallback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """After clipping."""
        save_file({name: value.grad.contiguous() for name, value in model.named_parameters()}, self._path)


def trainer(
    task: Task, folder: str, rows: list[Row], out: str, *, seed: int, n: int, callbacks: list[Any], kind: Any
) -> Any:
    """A trainer of `n` updates over the rows in their order."""
    score = reward_of(task)

    def rewards(prompts: list[str], completions: list[str], row: list[int], **others: Any) -> list[float]:
        asked = zip(prompts, completions, row, strict=True)
        return [float(score(prompt, completion, rows[i]).reward) for prompt, completion, i in asked]

    config = trl.GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=task.batch,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=task.samples,
        max_completion_length=task.n_new,
        temperature=1.0,
        loss_type="bnpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=CLIP_RATIO,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP_NORM,
        max_steps=n,
        seed=seed,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": one["text"], "row": i} for i, one in enumerate(rows)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=callbacks,
    )


def train(name: str, folder: str, rows: str, held_out: str, out: str, seed: int, n: int) -> dict[str, Any]:
    """Train `n` updates. Returns the lines of its updates and the held-out scores, before with seed 1 only."""
    task, updates = TASKS[name], Updates()
    mine = trainer(task, folder, read(rows), out, seed=seed, n=n, callbacks=[updates], kind=trl.GRPOTrainer)
    before = evaluate(task, mine, read(held_out)) if seed == 1 else None
    mine.train()
    return {"updates": updates.lines, "before": before, "after": evaluate(task, mine, read(held_out))}


@torch.inference_mode()
def evaluate(task: Task, mine: Any, rows: list[Row]) -> float:
    """Share of right answers, ANSWERS to each problem, sampled at temperature 1."""
    tokenizer, model, score = mine.processing_class, mine.model, reward_of(task)
    many = [row for row in rows for _ in range(ANSWERS)]
    asked = tokenizer([row["text"] for row in many], return_tensors="pt", padding=True, padding_side="left")
    given = {"input_ids": asked["input_ids"], "attention_mask": asked["attention_mask"]}
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.eval()
    made = model.generate(**given, **how, max_new_tokens=task.n_new, pad_token_id=tokenizer.pad_token_id)
    model.train()
    texts = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(bool(score(row["text"], text, row).correct) for row, text in zip(many, texts, strict=True)) / len(many)


def step(name: str, folder: str, rows: str, out: str, gradient: str) -> dict[str, Any]:
    """One step: its batch, loss and gradient norm; the gradient goes to a file."""
    updates, task = Updates(), TASKS[name]
    callbacks = [updates, KeepsGradient(gradient)]
    mine = trainer(task, folder, read(rows), out, seed=1, n=1, callbacks=callbacks, kind=FirstStep)
    mine.train()
    return {**mine.kept, "norm": updates.lines[0]["norm"]}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"train": train, "step": step})
