"""Several messages as one ZeroMQ message, and apart again: bytes alone, what they say is for `areal_bus.wire.codec`.

A bundle has four frames: a mark, the number of frames of each message (a byte each), the bytes of each frame
(little-endian, 4 bytes each), and all of these frames joined. It is cut only once these numbers agree and are within
the limits; each message in it is whole, and is judged as one that comes alone.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import msgpack

from areal_bus.errors import WireError
from areal_bus.messages import PROTOCOL
from areal_bus.wire.codec import MAX_FRAMES

MAX_MESSAGES = 256
MAX_BYTES = 64 << 10  # of all frames
MAX_HEADERS_BYTES = 16 << 10  # of their headers: what becomes 35 times as large in memory, and is read value by value
ALONE_BYTES = 16 << 10  # a larger message goes alone: joining would cost more than the frames that it saves

MARK: bytes = msgpack.packb({"p": PROTOCOL, "bundle": True})  # to another protocol it says that it is one, too
N_FRAMES = 4

Frames = list[bytes]


def join(messages: Iterable[Frames]) -> tuple[Frames, int]:
    """The first of these, of which there is one, and those after it that may go with it; how many they are."""
    together = _together(messages)
    if len(together) == 1:
        return together[0], 1
    frames = list(chain.from_iterable(together))
    lengths = struct.pack(f"<{len(frames)}I", *map(len, frames))
    return [MARK, bytes(map(len, together)), lengths, b"".join(frames)], len(together)


def split(frames: Sequence[bytes]) -> list[Sequence[bytes]]:
    """The messages of a bundle, in order; what is no bundle is one message. Raises WireError."""
    if not frames or frames[0] != MARK:
        return [frames]
    if len(frames) != N_FRAMES:
        raise WireError(f"a bundle has {N_FRAMES} frames; this one has {len(frames)}", "frames")
    _, counts, lengths, joined = frames
    sizes = _sizes(counts, lengths, joined)
    pieces = [joined[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [pieces[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]


def _together(messages: Iterable[Frames]) -> list[Frames]:
    taken: list[Frames] = []
    n_bytes = n_headers = 0
    for frames in messages:
        n = sum(map(len, frames))
        n_bytes, n_headers = n_bytes + n, n_headers + len(frames[0])
        if taken and (n > ALONE_BYTES or n_bytes > MAX_BYTES or n_headers > MAX_HEADERS_BYTES):
            break
        taken.append(frames)
        if n > ALONE_BYTES or len(taken) == MAX_MESSAGES:
            break
    return taken


def _sizes(counts: bytes, lengths: bytes, joined: bytes) -> tuple[int, ...]:
    """Bytes of each frame. Raises WireError before anything is cut that is over a limit or does not add up."""
    if not 2 <= len(counts) <= MAX_MESSAGES:
        raise WireError(f"a bundle has 2 to {MAX_MESSAGES} messages; this one has {len(counts)}", "size")
    if len(joined) > MAX_BYTES:
        raise WireError(f"the messages of a bundle have at most {MAX_BYTES} bytes; these have {len(joined)}", "size")
    if not 1 <= min(counts) <= max(counts) <= MAX_FRAMES:
        raise WireError(f"each message of a bundle has 1 to {MAX_FRAMES} frames; one has not", "frames")
    n_frames = sum(counts)
    if len(lengths) != 4 * n_frames:
        raise WireError(f"a bundle of {n_frames} frames has as many lengths; {len(lengths)} bytes came", "frames")
    sizes = struct.unpack(f"<{n_frames}I", lengths)
    if sum(sizes) != len(joined):
        raise WireError(f"a bundle declares {sum(sizes)} bytes of messages; {len(joined)} came", "frames")
    n_headers = sum(sizes[end - n] for n, end in zip(counts, accumulate(counts), strict=True))
    if n_headers > MAX_HEADERS_BYTES:
        raise WireError(f"a bundle has at most {MAX_HEADERS_BYTES} bytes of headers; this one has {n_headers}", "size")
    return sizes
