"""Trains again from a checkpoint of a run with the batches that journal.replay recorded; no generators, no rewards.

python -m tools.offline.replay RUN --from K --out FOLDER

writes FOLDER/reference.jsonl with one line for each version from the checkpoint on, and the batches.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from actors.learner.batching import Batch, as_batch, batch_shares, read_batch
from actors.learner.checkpoint import checkpoint as checkpoints
from actors.runtime.process import leave
from areal_bus.config import loader, removed
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.run_files import read_rollback
from tools.offline.offline_learner import OfflineLearner
from tools.offline.synchronous_reference import ReferenceStep, exit_code, write_lines

SECTIONS = ("actor", "critic", "reference", "teacher", "learner")  # of a learner; the batches decide the rest


class Replay(OfflineLearner):
    """The learner of a run, at the start point of its replay."""

    def __init__(self, run: Path, out: Path, *, before: int, overrides: list[str]) -> None:
        """From the newest whole checkpoint below version `before`. Raises ConfigError, CheckpointError."""
        if other := [word for word in overrides if word.partition(".")[0] not in SECTIONS]:
            raise ConfigError(
                f"unsupported setting of a replay: {other[0]}: its batches are recorded, so --set changes "
                f"{', '.join(SECTIONS)} only"
            )
        tree = removed.left_out(json.loads((run / "config.json").read_text(encoding="utf-8")))
        config = loader.resolve(tree, str(run / "config.json"), [*overrides, "journal.replay=true"], {})
        folder = Path(json.loads((run / "origin.json").read_text(encoding="utf-8"))["folder"])  # of the user's modules
        self._run = run
        checkpoint = newest_below(run, before)
        super().__init__(config, folder, out, journal_role="replay", checkpoint=checkpoint)
        self._actor.rollback = read_rollback(run)

    def run(self, last: int | None) -> Iterator[ReferenceStep]:
        """The updates up to version `last`, or to the last recorded batch."""
        while (last is None or self._actor.version < last) and (batch := self._batch(self._actor.version)) is not None:
            stats = self._actor.ppo_update(self._actor.compute_advantages_and_returns(batch))
            yield ReferenceStep(self._actor.version, stats, self.digest, ())

    def _batch(self, step: int) -> Batch | None:
        """The whole batch of a step, of all ranks' shares; None where none is recorded."""
        shares = [read_batch(folder) for folder in batch_shares(self._run, step)]
        if not shares:
            return None
        items = sorted((item for share in shares for item in share.items), key=lambda item: (item.group, item.sample))
        batch = as_batch(items, step=step, clock=step, n_groups=shares[0].n_groups)
        batch.shares = [set(share.groups) for share in shares]
        return batch


def newest_below(run: Path, version: int) -> str:
    """The folder of the newest whole checkpoint below this version; "" for version 0, which the config makes."""
    for found, path in versioned_dirs.versions(run / "checkpoints").items():
        try:
            if found < version:
                checkpoints.verify(path)
                return str(path)
        except CheckpointError as error:
            print(f"an older checkpoint is used: {error}", file=sys.stderr)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tools.offline.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--from", type=int, dest="first", required=True, metavar="K")
    parser.add_argument("--to", type=int, metavar="VERSION")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()

    def train() -> None:
        args.out.mkdir(parents=True)
        replay = Replay(args.run, args.out, before=args.first, overrides=args.set)
        write_lines(replay, replay.run(args.to), args.out)
        replay.journal.close()

    return exit_code(train)


if __name__ == "__main__":
    leave(main())
