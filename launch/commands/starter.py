"""Writes the starter of `areal-bus init FOLDER`: a config, data and a reward that learn in two minutes on two cores."""

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT, start_command

USAGE = f"""\
usage: {SCRIPT} init FOLDER

Writes a config, data and a reward into a new folder. They learn in about two minutes on two CPU cores."""

N_TRAIN, N_HELD_OUT = 2000, 64
CONFIG = "config.toml"
SETTINGS = """\
# A small character model from scratch learns to sort the letters of a word.
# Start: areal-bus run {folder}/config.toml -np 4      All keys: areal-bus run --explain SECTION, for example actor

[run]
name = "starter"
total_train_steps = 100

# Your own model instead of [model.scratch] (then also data.chat_template = true, and no [learner.warmup]):
# model.path = "Qwen/Qwen2.5-0.5B-Instruct"       # a folder, or a Hugging Face id
[model.scratch]
hidden_size = 128
layers = 2
heads = 4
max_positions = 32

[data]
path = "train.jsonl"
prompt = "{{question}}>"          # may use every field of a row
chat_template = false
batch_size = 32                 # prompts of an update
max_prompt_tokens = 16

[gconfig]
n_samples = 8                   # answers to each prompt
max_new_tokens = 10

[rollout]
max_head_offpolicyness = 1      # eta: no trained token is older than this many updates
max_concurrent_rollouts = 256

[reward]
function = "my_reward:score"    # my_reward.py, beside this file

[actor]
advantage = "rloo"
lr = 3e-4
lr_warmup_steps = 10

[learner.warmup]                # supervised steps first, on the field "demonstration"
steps = 100
lr = 3e-3

[evaluate]
path = "held-out.jsonl"
before = true
after = true
"""
REWARD = '''\
"""The reward of config.toml: how much of the answer is right. Any of prompt, completion and row may be a parameter."""

from actors.rewards.protocol import Score


def score(completion, row):
    given, gold = completion.strip(), row["answer"]
    n_right = sum(a == b for a, b in zip(given, gold))
    is_right = given == gold
    return Score(0.5 * n_right / max(len(given), len(gold)) + 0.5 * is_right, correct=is_right)
'''


def main(words: Sequence[str]) -> int:
    """Write the starter, and print how to run it. Raises ConfigError."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"init takes the name of one new folder: {SCRIPT} init mine/")
    folder = Path(words[0])
    print(f"{folder} has {', '.join(write_starter(folder))}")
    print(f"start it with: {start_command([str(folder / CONFIG)], 4, by_script=True)}")
    return 0


def write_starter(folder: Path) -> list[str]:
    """Write the files; returns their names. Raises ConfigError unless the folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"not a folder: {folder} is a file; init writes into a new or empty one")
    if folder.is_dir() and (there := sorted(path.name for path in folder.iterdir())):
        names = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
        raise ConfigError(f"folder not empty: {folder} has {names}; init writes into a new or empty one")
    rows = make_rows(N_TRAIN + N_HELD_OUT)
    files = {
        CONFIG: SETTINGS.format(folder=folder),
        "my_reward.py": REWARD,
        "train.jsonl": as_lines(rows[N_HELD_OUT:]),
        "held-out.jsonl": as_lines(rows[:N_HELD_OUT]),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"init writes into a folder: {folder}: {error.strerror}") from None
    return list(files)


def make_rows(n: int) -> list[dict[str, str]]:
    """Distinct words of 3 to 8 letters, always the same ones; the answer has their letters in order."""
    draw = random.Random("starter")
    words: dict[str, None] = {}  # an ordered set
    while len(words) < n:
        words["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8)))] = None
    answers = {word: "".join(sorted(word)) for word in words}
    return [{"question": word, "answer": answer, "demonstration": answer} for word, answer in answers.items()]


def as_lines(rows: list[dict[str, str]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
