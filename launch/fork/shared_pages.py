"""Prepares the memory of a fork server: its forks share more of its pages, and copy fewer of them.

A fork shares a page until one of the two processes writes to it. Python also writes to objects that it only reads: it
counts references, and during the first calls of a function it fills caches in the function's code. A new object takes
the first free slot, often in a page of older objects. So code that every fork runs is run once before, and the free
slots are filled.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from areal_bus.config.loader import resolve

LARGEST_SLOT = 512  # bytes of an object in one of Python's pools; malloc has the larger ones
SLOT_STEP = 16  # bytes between the sizes of slots
POOL_BYTES = (1 << 14) - 64  # of the slots of a pool
MOST_BYTES = 1 << 21  # of the objects of one size
LARGEST_HOLE = 1 << 16  # bytes
SMALLEST_HOLE = 32
BYTES_HEADER = sys.getsizeof(b"")
MALLOC_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                 "keepcost")  # fmt: skip
EXAMPLE: dict[str, Any] = {
    "data": {"task": "sums", "chat_template": False},
    "model": {"scratch": {}},
    "launch": {"start": "fork", "bootstrap": "env"},
}


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, in bytes and chunks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLOC_FIELDS)


def share_pages() -> list[object]:
    """Call it after the imports. Keep the result: its objects are in the slots."""
    run_once()
    gc.collect()
    held = fill_slots()
    fill_holes()
    gc.freeze()  # a collection in a child would write to every shared page
    return held


def run_once() -> None:
    """What each supervisor and each actor does: read settings."""
    config = resolve(EXAMPLE, "the example of a fork server", ["run.seed=1"], {})
    type(config).model_validate_json(config.model_dump_json())


def fill_slots() -> list[object]:
    """Objects in all free slots of Python's pools."""
    makers: dict[int, Callable[[], object]] = {sys.getsizeof(make()): make for make in (object, lambda: complex(1.0))}
    for size in range(3 * SLOT_STEP, LARGEST_SLOT + 1, SLOT_STEP):
        makers[size] = partial(bytes, size - BYTES_HEADER)
    return [_fill(make, size) for size, make in makers.items()]


def _fill(make: Callable[[], object], size: int) -> list[object]:
    """Objects of one size until a whole pool has them side by side: then all older pools are full.

    Slots of the size of an integer are filled up to MOST_BYTES: the addresses themselves take some of them.
    With another allocator (PYTHONMALLOC, -X dev) objects never lie side by side, and each size takes MOST_BYTES.
    """
    held: list[object] = []
    n_adjacent = last = 0
    while n_adjacent < POOL_BYTES // size - 1 and len(held) * size < MOST_BYTES:
        held.append(make())
        address = id(held[-1])
        n_adjacent = n_adjacent + 1 if address == last + size else 0
        last = address
    return held


def fill_holes() -> int:
    """Allocate the holes between the chunks of malloc, for ever. Returns their number; 0 without glibc 2.33."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    top = libc.sbrk(0) - info.keepcost  # memory above was never allocated
    n_holes, size = 0, LARGEST_HOLE
    while size >= SMALLEST_HOLE:
        chunk = libc.malloc(size)
        if chunk and top - info.arena <= chunk < top:
            n_holes += 1
            continue
        libc.free(chunk)
        size = size * 3 // 4 if size > LARGEST_SLOT else size - SLOT_STEP
    return n_holes
