"""Short runs of the tiny task in one process, with a planted failure: a wrong reward, or a bad setting.

They write the journal and the samples that a ring writes, apart from the lines of actors.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.head.sample_log import SampleLog
from actors.rewards.actor import scored
from actors.rewards.functions.builtin import reverse_score
from actors.rewards.pool import Verdict
from actors.rewards.protocol import Score
from areal_bus.core.effects import Keep
from areal_bus.core.events import Event
from areal_bus.messages import VerdictStatus
from areal_lab.loops.exact_lag import ExactLagLoop
from areal_lab.settings import load
from tools.offline.synchronous_reference import Group

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.scratch.hidden_size": 64,
    "model.scratch.layers": 2,
    "data.largest": 4,
    "data.batch_size": 16,
    "data.held_out": 64,
    "rollout.exact_lag": 1,
    "gconfig.max_new_tokens": 12,
    "actor.lr_warmup_steps": 2,
    "actor.lr": 5e-4,
    "learner.warmup.steps": 120,
    "evaluate.every_steps": 5,
    "evaluate.before": True,
    "run.total_train_steps": 20,
}


def run_planted(folder: Path, settings: Mapping[str, Any], *, warm_ups: Path | None = None) -> Path:
    """Train the small task with these settings; returns the run's folder."""
    folder.mkdir(parents=True)
    chosen = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **settings}.items()]
    config = load(ROOT / "configs" / "tiny.toml", chosen)
    (folder / "config.json").write_text(config.model_dump_json())
    loop = RecordedLoop(config, ROOT, folder, warm_ups=warm_ups)
    loop.sample_log = SampleLog(folder)
    for _ in loop.train():
        pass
    loop.sample_log.close()
    loop.journal.close()
    return folder


class RecordedLoop(ExactLagLoop):
    """Writes each batch before its update, as a head does."""

    sample_log: SampleLog

    def _sample_batch(self) -> list[Group]:
        groups, step = super()._sample_batch(), self._actor.version
        self.journal.keep(Event.BATCH, step=step, clock=step)
        for t, reward, correct in (member for group in groups for member in group):
            verdict = Verdict((t.uid, t.sample), VerdictStatus.VALUE, reward, correct, "", 0.0)
            self.sample_log.keep(Keep(scored(t, verdict), step=step, clock=step, n_masked=0))
            flat = [number for span in t.spans for number in span]
            fields = {"reward": reward, "n_tokens": sum(flat[1::2]), "versions": flat}
            self.journal.keep(Event.TRAJECTORY, step=step, clock=step, uid=t.uid, sample=t.sample, **fields)
        self.sample_log.flush()
        return groups


def pays_for_length(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    return Score(len(completion) / 12, correct=reverse_score(prompt, completion, row).correct)


def pays_for_repeats(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    n_same = sum(a == b for a, b in pairwise(completion))
    return Score(n_same / 3, correct=reverse_score(prompt, completion, row).correct)


def pays_for_one_text(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    n_same = sum(a == b for a, b in zip(completion, "oo", strict=False))
    return Score(n_same - 0.25 * abs(len(completion) - 2), correct=reverse_score(prompt, completion, row).correct)


def pays_always(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    return Score(1.0, correct=reverse_score(prompt, completion, row).correct)
