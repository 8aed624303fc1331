"""What only rank 0 does before anything starts: check data, model and the user's functions, then make the run folder.

A process of its own (`python -m launch.prepare`, a JSON line in, a JSON line out), so that the user's modules and the
data leave no trace in the supervisor. All checks come before the first file is written.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.data.loading import place_problems, place_rows
from actors.models.loading import check_model_path
from actors.models.scratch import check_shape, write_scratch_folder
from actors.rewards.loading import check_reward
from actors.workflows.loading import load_workflow
from areal_bus.config import Config, LearnerConfig, WorkflowConfig
from areal_bus.errors import ArealBusError, ConfigError
from launch.prompts import check_prompts
from launch.runs import make_run_folder
from launch.supervise import environment


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where the run lies and which model it starts from."""

    run_folder: str
    model_folder: str


def prepare(config: Config, config_file: Path) -> Prepared:
    """All checks that need the world; then the run folder, with the settings in it. Raises ConfigError."""
    folder = config_file.resolve().parent
    sys.path.insert(0, str(folder))
    model = check_model(config, folder)
    check_functions(config, folder)
    check_rows(config, folder, model)
    if config.journal.dir:
        check_journal_folder(config.journal.dir)
    run = make_run_folder(config.run.folder, config.run.name or config_file.stem)
    (run / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    shutil.copyfile(config_file, run / "config.toml")
    origin = {"config": str(config_file.resolve()), "folder": str(folder), "working_folder": str(Path.cwd())}
    (run / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")
    if config.model.scratch is not None:
        write_scratch_folder(run / "scratch-model", config.model.scratch)
        model = str(run / "scratch-model")
    return Prepared(str(run), model)


def check_model(config: Config, folder: Path) -> str:
    """The model's folder or id; "" for one from scratch, whose folder comes with the run's. Raises ConfigError."""
    if config.model.scratch is None:
        return check_model_path(config.model.path, folder)
    check_shape(config.model.scratch)
    return ""


def check_rows(config: Config, folder: Path, model: str) -> None:
    """Training rows and evaluation problems are whole, and their prompts can be sampled. Raises ConfigError."""
    rows = place_rows(config, folder)
    if config.evaluate.before or config.evaluate.after:
        rows = rows + place_problems(config, folder)
    if config.workflow.function == WorkflowConfig().function:
        check_prompts(config, rows, model)


def check_journal_folder(path: str) -> None:
    """On this node; those of the others are seen by their own processes. Raises ConfigError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"journal.dir must be a folder that can be written: {path}: {error.strerror}") from None


def check_functions(config: Config, folder: Path) -> None:
    """Reward, workflow and loop import and can be called. Raises ConfigError."""
    check_reward(config, folder)
    load_workflow(config)
    if config.learner.loop != LearnerConfig().loop:
        from actors.training.loop import find_loop  # brings torch: only where there is something to look at

        find_loop(config.learner.loop)


def prepare_apart(config: Config, config_file: Path) -> Prepared:
    """`prepare` in a process of its own. Raises ConfigError with its sentence."""
    question = json.dumps({"config": config.model_dump(mode="json"), "file": str(config_file)})
    done = subprocess.run(
        [sys.executable, "-m", "launch.prepare"],
        input=question,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(os.environ, gpus=(), cpu=True),
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ArealBusError(f"checking the settings ended with exit code {done.returncode}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return Prepared(**answer)


def main() -> None:
    question = json.loads(sys.stdin.read())
    config = Config.model_validate_json(json.dumps(question["config"]))
    try:
        answer = asdict(prepare(config, Path(question["file"])))
    except ConfigError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}", flush=True)  # a line of its own, whatever the user's module has printed


if __name__ == "__main__":
    main()
