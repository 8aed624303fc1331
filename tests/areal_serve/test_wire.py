import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_serve.rejection import Rejected
from areal_serve.wire import fields, pass_output, read_pass, tensor


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def part(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def dense(values: np.ndarray, dtype: int) -> bytes:  # type: ignore[type-arg]
    return part(1, values.tobytes()) + varint(3 << 3) + varint(dtype) + part(4, b"".join(map(varint, values.shape)))


def body(ids: list[int], **inputs: bytes) -> bytes:
    tokens = part(1, part(1, part(1, np.array(ids, "<i4").tobytes())))
    datum = tokens + b"".join(part(2, part(1, name.encode()) + part(2, value)) for name, value in inputs.items())
    number = varint(1 << 3 | 1) + struct.pack("<d", 0.3)
    config = part(7, part(1, b"beta") + part(2, number)) + part(7, part(1, b"kind") + part(2, part(2, b"text")))
    head = part(1, b"model") + varint(2 << 3) + varint(300) + part(4, b"ppo") + varint(6 << 3) + varint(1)
    return head + config + part(3, datum)


def test_request_of_a_pass_is_read() -> None:
    targets = np.array([[1, 2], [3, 4]], "<i8")
    found = read_pass(body([5, 300], target_tokens=dense(targets, 2), weights=dense(np.ones(2, "<f4"), 1)))
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("model", 300, "ppo", True)
    assert found.config == {"beta": 0.3, "kind": "text"}
    (datum,) = found.data
    assert datum.ids_T.tolist() == [5, 300]
    assert datum.inputs["target_tokens"].tolist() == targets.tolist()
    assert not read_pass(body([5]), with_data=False).data


def test_sparse_tensor_is_filled_with_zeros_and_bfloat16_widened() -> None:
    assert tensor(memoryview(sparse([2, 0, 1]))).tolist() == [[0, 0, 7], [8, 9, 0]]
    halves = (np.array([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2")
    assert tensor(memoryview(dense(halves, 4))).tolist() == [1.5, -2.0]


def sparse(columns: list[int]) -> bytes:
    """Three values in a tensor of 2 x 3."""
    rows, values = np.array([0, 1, 3], "<i8"), np.array([7, 8, 9], "<i8")
    parts = (part(1, values.tobytes()), part(2, rows.tobytes()), part(3, np.array(columns, "<i8").tobytes()))
    return part(2, b"".join(parts)) + varint(3 << 3) + varint(2) + part(4, bytes([2, 3]))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (sparse([2, 0, 3]), "column"),
        (sparse([2, 0, -1]), "column"),
        (varint(3 << 3) + varint(2) + part(4, varint(0) + varint(1 << 63)), "elements"),
        (part(2, b"") + varint(3 << 3) + varint(1) + part(4, varint(1 << 40) + varint(1 << 20)), "at most"),
    ],
    ids=["column-over", "column-below", "empty-of-impossible-size", "claimed-size"],
)
def test_tensor_of_an_impossible_form_is_refused(given: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tensor(memoryview(given))


@given(st.integers(0, 200), st.binary(max_size=3), st.booleans())
def test_damaged_body_is_refused_or_read_never_an_error_of_ours(at: int, noise: bytes, cut: bool) -> None:
    whole = body([5, 6, 7], target_tokens=dense(np.arange(3, dtype="<i8"), 2))
    damaged = whole[:at] if cut else whole[:at] + noise + whole[at + len(noise) :]
    with contextlib.suppress(Rejected):
        read_pass(damaged)


def test_result_of_a_pass_has_a_record_for_each_datum() -> None:
    outputs = [{"logprobs": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)}, {"logprobs": np.zeros((1, 2), np.float32)}]
    parts = list(fields(memoryview(pass_output(outputs, {"loss:sum": 2.5}))))
    assert [number for number, _ in parts] == [1, 2, 2, 3]
    record = dict(fields(parts[1][1]))  # type: ignore[arg-type]
    array = dict(fields(dict(fields(record[2]))[2]))  # type: ignore[arg-type]
    assert record[3] == 1
    assert bytes(array[4]) == b"\x02"
    assert np.frombuffer(array[1], "<f4").tolist() == [1, 2, 3, 4]  # type: ignore[call-overload]
    assert np.frombuffer(array[2], "<i8").tolist() == [0, 16]  # type: ignore[call-overload]
