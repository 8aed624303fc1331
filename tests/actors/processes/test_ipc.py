"""Frames between a process and its workers."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.processes.ipc import LENGTH, PRINTED_BYTES, pack, unpack

PRINTS = """
import os, sys
from actors.processes.ipc import keep_prints, limit_prints_always
keep_prints(sys.argv[1])
limit_prints_always()
written = 0
while os.fstat(1).st_size and written < 1 << 32 or not written:
    written += os.write(1, bytes(1 << 20))
"""


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    frames = pack({"a": 1}, cap_bytes=100) + pack({"b": "é"}, cap_bytes=100)
    buffer, records = bytearray(), []
    for byte in frames:
        buffer.append(byte)
        while (record := unpack(buffer, cap_bytes=100)) is not None:
            records.append(record)
    assert records == [{"a": 1}, {"b": "é"}]


def test_frames_over_the_cap_or_without_an_object_are_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="and at most 10 are allowed"):
        pack({"a": "x" * 20}, cap_bytes=10)
    with pytest.raises(ValueError, match="claims 1000"):
        unpack(bytearray(LENGTH.pack(1000)), cap_bytes=10)
    with pytest.raises(ValueError, match="one JSON object"):
        unpack(bytearray(LENGTH.pack(2) + b"[]"), cap_bytes=10)
    with pytest.raises(ValueError, match="nested too deep"):
        unpack(bytearray(LENGTH.pack(60_000) + b'{"a":' * 12_000), cap_bytes=60_000)


def test_prints_of_one_long_call_end_within_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    subprocess.run([sys.executable, "-c", PRINTS, str(path)], check=True)
    assert PRINTED_BYTES < path.stat().st_size < 1 << 32
    assert b"later output is discarded" in path.read_bytes()
