"""Frames between a process and its workers."""

import pytest

from actors.processes.ipc import LENGTH, pack, unpack


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
