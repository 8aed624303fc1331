"""Writes TensorBoard event files, with the package tensorboard alone: neither torch nor TensorFlow is imported."""

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tools.trackers.protocol import Target
from tools.trackers.series import Row


class TensorboardWriter:
    """One event file for each start. Readers drop rows from the step of a later session start on."""

    takes_undo = True
    is_rewritten = False
    takes_samples = False

    def __init__(self, target: Target) -> None:
        self._file = EventFileWriter(str(target.folder))
        self._begin_session(target.first_step)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._file.add_event(Event(wall_time=row.wall, step=row.step, summary=Summary(value=values)))
        self._file.flush()

    def undo(self, version: int) -> None:
        self._begin_session(version + 1)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _begin_session(self, step: int) -> None:
        self._file.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
