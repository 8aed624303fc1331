"""Bodies of the Tinker API that are protocol buffers: reads data of a forward pass, writes log-probs and samples.

The format of protocol buffers: each field is a key (number and type) and a value; a length precedes bytes. The numbers
are those of the messages of the `tinker` package, version 0.38. T positions of a datum, K targets of a position.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_serve.rejection import Rejected

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5  # types of a field
DTYPES: Mapping[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4"), 4: np.dtype("<u2")}
FLOAT32, BFLOAT16 = 1, 4
MOST_ELEMENTS = 1 << 24  # of a tensor: a sparse one may claim any shape
STOP, LENGTH = 0, 1  # why a sequence ended
VERSIONS = 1001  # field of a sampled sequence that the SDK skips: the version of the weights of each token, int32
Numbers = NDArray[Any]
Field = tuple[int, int | memoryview]


@dataclass(frozen=True, slots=True)
class Datum:
    """Tokens that the model reads, and a tensor for each input of the loss."""

    ids_T: Numbers
    inputs: dict[str, Numbers]


@dataclass(slots=True)
class PassRequest:
    """A forward pass over data, with a backward pass unless `forward_only`."""

    model_id: str = ""
    seq_id: int = 0
    loss_fn: str = ""
    forward_only: bool = False
    config: dict[str, float | str] = field(default_factory=dict)
    data: list[Datum] = field(default_factory=list)


def read_pass(body: bytes, *, with_data: bool = True) -> PassRequest:
    """Raises Rejected for bytes that are no such request. Without data, only its other fields."""
    found = PassRequest()
    try:
        for number, value in fields(memoryview(body)):
            _take(found, number, value, with_data=with_data)
    except (IndexError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise Rejected(f"invalid body: a request of a forward pass is a protocol buffer: {error}") from None
    return found


def _take(found: PassRequest, number: int, value: int | memoryview, *, with_data: bool) -> None:
    if number == 1:
        found.model_id = text(value)
    elif number == 2:
        found.seq_id = whole(value)
    elif number == 3 and with_data:
        found.data.append(_datum(raw(value), len(found.data)))
    elif number == 4:
        found.loss_fn = text(value)
    elif number == 5:
        pair = dict(fields(raw(value)))
        found.config.setdefault(text(pair.get(1, b"")), double(pair.get(2, bytes(8))))
    elif number == 6:
        found.forward_only = bool(value)
    elif number == 7:
        pair = dict(fields(raw(value)))
        inner = dict(fields(raw(pair.get(2, memoryview(b"")))))
        found.config[text(pair.get(1, b""))] = text(inner[2]) if 2 in inner else double(inner.get(1, bytes(8)))


def _datum(data: memoryview, index: int) -> Datum:
    parts: list[Numbers] = []
    inputs: dict[str, Numbers] = {}
    for number, value in fields(data):
        if number == 1:
            parts.append(_chunk(raw(value), index))
        elif number == 2:
            pair = dict(fields(raw(value)))
            inputs[text(pair.get(1, b""))] = tensor(raw(pair.get(2, memoryview(b""))))
    return Datum(np.concatenate(parts) if parts else np.empty(0, np.int64), inputs)


def _chunk(data: memoryview, index: int) -> Numbers:
    for number, value in fields(data):
        if number != 1:
            raise Rejected(f"unsupported input in datum {index}: this server takes tokens, no images and no audio")
        inner = dict(fields(raw(value)))
        return np.frombuffer(raw(inner.get(1, memoryview(b""))), "<i4").astype(np.int64)
    return np.empty(0, np.int64)


def tensor(data: memoryview) -> Numbers:
    """A tensor; a sparse one with zeros at the other places. Raises ValueError for sizes that do not fit."""
    shape: list[int] = []
    dtype, dense, sparse = 0, memoryview(b""), None
    for number, value in fields(data):
        if number == 1:
            dense = raw(value)
        elif number == 2:
            sparse = dict(fields(raw(value)))
        elif number == 3:
            dtype = whole(value)
        elif number == 4:
            shape += [value] if isinstance(value, int) else list(packed(value))
    if dtype not in DTYPES or math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"a tensor has a known type and at most {MOST_ELEMENTS} elements: type {dtype}, shape {shape}")
    if sparse is None:
        values = _widened(np.frombuffer(dense, DTYPES[dtype]), dtype)
        return values.reshape(shape) if shape else values
    return _densified(sparse, dtype, shape)


def _densified(sparse: Mapping[int, int | memoryview], dtype: int, shape: Sequence[int]) -> Numbers:
    values = _widened(np.frombuffer(raw(sparse.get(1, memoryview(b""))), DTYPES[dtype]), dtype)
    rows, columns = (np.frombuffer(raw(sparse.get(number, memoryview(b""))), "<i8") for number in (2, 3))
    counts = np.diff(rows)
    if len(shape) != 2 or len(counts) != shape[0] or (counts < 0).any() or counts.sum() != len(values):
        raise ValueError(f"the rows of a sparse tensor add up to its values: shape {list(shape)}")
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise ValueError(f"each value of a sparse tensor has a column below {shape[1]}")
    found = np.zeros(tuple(shape), values.dtype)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


def _widened(values: Numbers, dtype: int) -> Numbers:
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values if dtype == FLOAT32 else values.astype(np.int64)


def fields(data: memoryview) -> Iterator[Field]:
    """The fields of a message, in order. Raises ValueError or IndexError for bytes that are none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (BYTES, EIGHT_BYTES, FOUR_BYTES):
            raise ValueError(f"unknown type {kind} of a field")
        size, at = _varint(data, at) if kind == BYTES else (8 if kind == EIGHT_BYTES else 4, at)
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def packed(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a whole number has more than 64 bits")


def raw(value: int | memoryview | bytes) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where bytes are expected")
    return memoryview(value)


def text(value: int | memoryview | bytes) -> str:
    return str(raw(value), "utf-8")


def whole(value: int | memoryview) -> int:
    """A signed 32-bit number."""
    if not isinstance(value, int):
        raise ValueError("bytes stand where a whole number is expected")
    return value - (1 << 64) if value >> 63 else value


def double(value: int | memoryview | bytes) -> float:
    return float(struct.unpack("<d", raw(value))[0])


# writing


def pass_output(outputs: Sequence[Mapping[str, Numbers]], metrics: Mapping[str, float]) -> bytes:
    """The result of a forward pass: an array record for each datum, and the metrics."""
    body = _field(1, b"ArrayRecord")
    for datum in outputs:
        arrays = b"".join(_field(2, _field(1, name.encode()) + _field(2, _batched(a))) for name, a in datum.items())
        body += _field(2, _field(1, b"ArrayRecord") + arrays + _number(3, 1))
    pairs = (
        _field(1, name.encode()) + _key(2, EIGHT_BYTES) + struct.pack("<d", value) for name, value in metrics.items()
    )
    return body + b"".join(_field(3, pair) for pair in pairs)


def _batched(values: Numbers) -> bytes:
    """The array of one datum: float32, its first dimension is that of the datum."""
    data = np.ascontiguousarray(values, "<f4").tobytes()
    offsets = np.array([0, len(data)], "<i8").tobytes()
    trailing = b"".join(_encoded(n) for n in values.shape[1:])
    return _field(1, data) + _field(2, offsets) + _number(3, FLOAT32) + (_field(4, trailing) if trailing else b"")


def sample_output(sequences: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any]) -> bytes:
    """The result of a sampling request. A sequence: ids, logps, stop, top; the prompt: logps, top, targets, others."""
    body = b"".join(_field(1, _sequence(sequence)) for sequence in sequences)
    if prompt.get("logps") is not None:
        body += _field(2, np.asarray(prompt["logps"], "<f4").tobytes())
    if prompt.get("top") is not None:
        body += _field(3, _top(*prompt["top"]))
    if prompt.get("targets") is not None:
        body += _field(5, _dense(prompt["targets"]))
    if prompt.get("others") is not None:
        ids, logps = prompt["others"]
        body += _field(6, _field(1, _dense(ids)) + _field(2, _dense(logps)))
    return body


def _sequence(sequence: Mapping[str, Any]) -> bytes:
    body = _number(1, STOP if sequence["stop"] else LENGTH)
    body += _field(2, np.asarray(sequence["ids"], "<i4").tobytes())
    body += _field(3, np.asarray(sequence["logps"], "<f4").tobytes())
    if sequence.get("top") is not None:
        body += _field(4, _top(*sequence["top"]))
    return body + _field(VERSIONS, np.full(len(sequence["ids"]), sequence["version"], "<i4").tobytes())


def _top(ids_TK: Numbers, logps_TK: Numbers) -> bytes:
    n, k = ids_TK.shape
    data = _field(1, np.ascontiguousarray(ids_TK, "<i4").tobytes()) + _field(
        2, np.ascontiguousarray(logps_TK, "<f4").tobytes()
    )
    return data + _number(3, k) + _number(4, n)


def _dense(values: Numbers) -> bytes:
    is_float = values.dtype.kind == "f"
    data = np.ascontiguousarray(values, "<f4" if is_float else "<i8").tobytes()
    return _field(1, data) + _number(3, FLOAT32 if is_float else 2) + _field(4, b"".join(map(_encoded, values.shape)))


def _field(number: int, body: bytes) -> bytes:
    return _key(number, BYTES) + _encoded(len(body)) + body


def _number(number: int, value: int) -> bytes:
    return _key(number, VARINT) + _encoded(value)


def _key(number: int, kind: int) -> bytes:
    return _encoded(number << 3 | kind)


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
