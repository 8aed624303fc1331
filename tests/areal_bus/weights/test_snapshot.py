"""Snapshots and their digests: what is copied, what is reused, and what the digest depends on."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.errors import PushFailed
from areal_bus.weights.manifest import Manifest, first_difference
from areal_bus.weights.receiver import ReceiveBuffers
from areal_bus.weights.snapshot import Snapshot, digest_of, forms_of, take_snapshot

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def snapshot(parameters: dict[str, torch.Tensor], **more: object) -> Snapshot:
    taken = take_snapshot(3, parameters, **{"bucket_bytes": 100} | more)  # type: ignore[arg-type]
    assert taken is not None
    return taken


def land(sent: Snapshot, into: dict[str, torch.Tensor] | None = None) -> ReceiveBuffers:
    buffers = ReceiveBuffers(sent.layout, into, CPU)
    for start, stop in sent.layout.buckets():
        buffers.write(start, sent.data[start:stop])
    buffers.finish()
    return buffers


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=8
    ),
    bucket_bytes=st.integers(1, 700),
    seed=st.integers(0, 99),
)
def test_any_tensors_come_down_bit_equal_in_buckets_of_any_size(
    shapes: list[tuple[list[int], torch.dtype]], bucket_bytes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    parameters = {str(i): (torch.randn(shape) * 9).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    sent = snapshot(parameters, bucket_bytes=bucket_bytes)
    buffers = land(sent)
    assert buffers.wrong == []
    assert list(buffers.tensors) == list(parameters)
    for name, tensor in parameters.items():
        assert buffers.tensors[name].dtype == tensor.dtype
        assert buffers.tensors[name].shape == tensor.shape
        assert torch.equal(buffers.tensors[name], tensor)
    assert digest_of(buffers.tensors) == sent.digest == buffers.digest


def test_the_digest_is_of_names_shapes_dtypes_and_bytes_only() -> None:
    a, b = torch.randn(6, 4), torch.randn(3).bfloat16()
    digest = digest_of({"a": a, "b": b})
    assert digest == digest_of({"b": b.clone(), "a": a.t().contiguous().t()})
    assert digest == snapshot({"a": a, "b": b}, bucket_bytes=7).digest
    others = [
        {"a": a, "c": b},
        {"a": a.reshape(4, 6), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": -a, "b": b},
        {"a": a},
    ]
    assert digest not in [digest_of(other) for other in others]


def test_a_snapshot_of_another_type_is_rounded_and_so_is_its_digest() -> None:
    masters = {"w": torch.randn(50, 3), "n": torch.tensor([1, 2])}
    sent = snapshot(masters, dtype=torch.bfloat16)
    rounded = {"w": masters["w"].bfloat16(), "n": masters["n"]}
    assert forms_of(sent.tensors()) == forms_of(rounded) == forms_of(masters, torch.bfloat16)
    assert all(torch.equal(sent.tensors()[name], tensor) for name, tensor in rounded.items())
    assert sent.n_bytes < snapshot(masters).n_bytes
    assert sent.digest == digest_of(rounded) == digest_of(masters, torch.bfloat16) != digest_of(masters)


def test_tied_names_are_sent_once_under_the_first() -> None:
    head = torch.randn(4, 4)
    assert list(snapshot({"embedding": head, "lm_head": head.detach()}).tensors()) == ["embedding"]
    assert list(snapshot({"a": head, "turned": head.t()}).tensors()) == ["a", "turned"], "the same memory, another form"


def test_a_discarded_snapshot_gives_its_memory_to_the_next() -> None:
    old = snapshot({"w": torch.ones(100)})
    where = old.data.data_ptr()
    new = snapshot({"w": torch.zeros(100)}, previous=old)
    assert new.data.data_ptr() == where
    assert old.data.numel() == 0
    assert new.digest == digest_of({"w": torch.zeros(100)})
    other = snapshot({"w": torch.zeros(101)}, previous=new)
    assert other.data.data_ptr() != where


def test_memory_to_receive_into_is_used_when_it_fits() -> None:
    sent = snapshot({"w": torch.randn(30), "b": torch.tensor(2.0)})
    spare = {"w": torch.empty(30), "b": torch.empty(()), "buffer": torch.empty(1)}
    buffers = land(sent, spare)
    assert buffers.tensors["w"] is spare["w"]
    assert torch.equal(spare["w"], sent.tensors()["w"])
    for unfit in (
        {"w": torch.empty(30), "b": torch.empty((), dtype=torch.bfloat16)},
        {"w": torch.empty(60)[::2], "b": torch.empty(())},
        {"b": torch.empty(())},
    ):
        buffers = land(sent, unfit)
        assert buffers.tensors["b"] is not unfit["b"]
        assert torch.equal(buffers.tensors["w"], sent.tensors()["w"])


def test_every_tensor_with_a_wrong_bit_is_named() -> None:
    sent = snapshot({name: torch.randn(40) for name in "abcd"})
    for name in "bd":
        sent.tensors()[name].view(torch.uint8)[159] ^= 1
    assert land(sent).wrong == ["b", "d"]


def test_a_push_that_ends_early_is_no_model() -> None:
    sent = snapshot({"a": torch.randn(40), "b": torch.randn(40)})
    buffers = ReceiveBuffers(sent.layout, None, CPU)
    buffers.write(0, sent.data[:100])
    with pytest.raises(PushFailed, match="a is incomplete"):
        buffers.finish()


def test_a_manifest_survives_the_wire_and_a_changed_one_is_refused() -> None:
    sent = snapshot({"w": torch.randn(3, 4), "b": torch.tensor(1)})
    assert Manifest.decode(json.dumps(sent.manifest)) == sent.layout
    changed = sent.manifest | {"tensors": [["w", [3, 5], "float32", 1], ["b", [], "int64", 2]]}
    with pytest.raises(PushFailed, match="mismatch within a manifest"):
        Manifest.decode(json.dumps(changed))
    for broken in ("{}", "[]", "no", json.dumps(sent.manifest | {"tensors": [["w", [1], "Tensor", 0]]})):
        with pytest.raises(PushFailed, match="manifest"):
            Manifest.decode(broken)


def test_the_first_difference_of_two_models_is_a_sentence() -> None:
    parameters = {"w": torch.randn(3, 4), "b": torch.randn(4).bfloat16()}
    manifest = snapshot(parameters).layout
    held = forms_of(parameters)
    assert first_difference(held, manifest) is None
    assert first_difference(held | {"x": ((1,), "float32")}, manifest) == "x is held and not in the push"
    assert first_difference({"w": held["w"]}, manifest) == "b is in the push and not held"
    changed = first_difference(held | {"b": ((4,), "float32")}, manifest)
    assert changed == "b is float32 [4] here and bfloat16 [4] in the push"


def test_a_bucket_holds_at_least_a_byte() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        snapshot({"w": torch.ones(1)}, bucket_bytes=0)
