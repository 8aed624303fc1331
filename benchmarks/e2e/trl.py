"""TRL's side of the end-to-end benches: GRPOTrainer, paused between two steps until the next request.

The trainer runs in the main thread, as in user code; another thread answers requests. bf16 and gradient checkpointing,
on by default, are off: on CPU both only cost time.
"""

import importlib
import threading
import time
from queue import SimpleQueue
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.e2e.setting import (
    BETAS,
    CLIP_NORM,
    CLIP_RATIO,
    DECAY,
    EPS,
    GROUPS,
    LR,
    N_NEW,
    SAMPLES,
    SEED,
    TOKENS,
    questions,
    worth,
)
from benchmarks.harness.worker_main import serve

trl: Any = importlib.import_module("trl")
WARM = 2  # steps that are not counted
begins: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
orders: SimpleQueue[int] = SimpleQueue()  # number of steps to make; 0 ends
answers: SimpleQueue[dict[str, Any]] = SimpleQueue()


def begin(**how: Any) -> dict[str, Any]:
    """Build the trainer and make its first steps."""
    begins.put(how)
    return steps(WARM)


def steps(n: int) -> dict[str, Any]:
    """Wall and CPU seconds of the next steps, and their trained tokens."""
    orders.put(n)
    answer = answers.get(timeout=500)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


class PacedSteps(TrainerCallback):
    """Holds the trainer before each step that nobody asked for."""

    def __init__(self) -> None:
        self._left = 0
        self._began = (0.0, 0.0)
        self._seen: list[dict[str, Any]] = []
        self._held: torch.Tensor | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        weight = others["model"].lm_head.weight
        if self._held is not None and torch.equal(self._held, weight):
            raise RuntimeError(f"every step moves the weights: step {state.global_step} did not")
        self._held = weight.detach().clone()
        if self._left == 0:
            self._answer()
            self._left = orders.get()
            if self._left == 0:
                control.should_training_stop = True
                return
            self._began = (time.monotonic(), time.process_time())
        self._left -= 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "num_tokens" in logs:
            check(logs)
            self._seen.append(logs)

    def _answer(self) -> None:
        if self._seen:
            wall_s, cpu_s = time.monotonic() - self._began[0], time.process_time() - self._began[1]
            n = len(self._seen)
            answers.put({"wall_s": wall_s, "cpu_s": cpu_s, "n_tokens": n * TOKENS, "reward": self._seen[-1]["reward"]})
            self._seen = []


def check(logs: dict[str, Any]) -> None:
    """Raises RuntimeError unless the step did the requested work."""
    expected = {
        "completions/min_length": N_NEW,
        "completions/max_length": N_NEW,
        "completions/mean_length": N_NEW,
        "frac_reward_zero_std": 0.0,
        "learning_rate": LR,
    }
    found = {name: float(logs[name]) for name in expected}
    if found != expected:
        raise RuntimeError(f"every step trains {TOKENS} tokens of groups with advantage: {found}, not {expected}")


class Recomputing(trl.GRPOTrainer):  # type: ignore[misc]
    """Scores a batch as if it were trained twice, which is when TRL asks for the log-probs before the update; trains
    it once.
    """

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.num_iterations = 2
        try:
            scored = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = 1
        if "old_per_token_logps" not in scored:
            raise RuntimeError("TRL computes the log-probs before the update for this row: it has not")
        return scored


def trainer(folder: str, out: str, *, threads: int, recompute: bool) -> Any:
    """With `recompute` it computes the log-probs of each batch before the update, as TRL does of samples that may be of
    an older version.
    """
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    config = trl.GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=GROUPS * SAMPLES,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=SAMPLES,
        max_completion_length=N_NEW,
        temperature=1.0,
        loss_type="bnpo",
        beta=0.0,
        epsilon=CLIP_RATIO,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP_NORM,
        max_steps=1_000_000,
        seed=SEED,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    kind = Recomputing if recompute else trl.GRPOTrainer
    return kind(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question} for question in questions()]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[PacedSteps()],
    )


def rewards(completions: list[str], **others: Any) -> list[float]:
    return [worth(completion) for completion in completions]


def answer_all() -> None:
    serve({"begin": begin, "steps": steps})
    begins.put(None)
    orders.put(0)


if __name__ == "__main__":
    threading.Thread(target=answer_all, daemon=True).start()
    how = begins.get()
    if how is not None:
        try:
            trainer(**how).train()
        except Exception as error:
            answers.put({"error": f"{type(error).__name__}: {error}"})
            raise
