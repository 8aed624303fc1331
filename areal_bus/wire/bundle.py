"""Bundles: several small messages as one ZeroMQ message. Handles bytes only; `codec.py` decodes the messages.

A bundle has four frames: a mark, the number of frames of each message (one byte each), the length of each frame
(little-endian, 4 bytes each), and all frames joined. It is split after these numbers have been checked against each
other and the limits. Each message in it is complete and is validated like a single one.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import msgpack

from areal_bus.errors import WireError
from areal_bus.messages import PROTOCOL
from areal_bus.wire.codec import MAX_FRAMES

MAX_MESSAGES = 256
MAX_BYTES = 68 << 10  # of all frames: a share of 64 answers is one bundle
MAX_HEADERS_BYTES = 16 << 10  # of all headers, which unpack to 35 times their size
ALONE_BYTES = 16 << 10  # a larger message is sent alone: joining it costs more than it saves

# names the protocol, so that a peer of another one can tell
MARK: bytes = msgpack.packb({"p": PROTOCOL, "bundle": True})
N_FRAMES = 4

Frames = list[bytes]


def join(messages: Iterable[Frames]) -> tuple[Frames, int]:
    """Frames of the first message together with those that fit in its bundle, and how many messages that is."""
    together = _together(messages)
    if len(together) == 1:
        return together[0], 1
    frames = list(chain.from_iterable(together))
    lengths = struct.pack(f"<{len(frames)}I", *map(len, frames))
    return [MARK, bytes(map(len, together)), lengths, b"".join(frames)], len(together)


def split(frames: Sequence[bytes]) -> list[Sequence[bytes]]:
    """The messages of a bundle, in order. Anything else is one message. Raises WireError."""
    if not frames or frames[0] != MARK:
        return [frames]
    if len(frames) != N_FRAMES:
        raise WireError(f"invalid bundle of {len(frames)} frames: it must have {N_FRAMES}", "frames")
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
    """Length of each frame. Raises WireError when a limit is exceeded or the numbers disagree."""
    if not 2 <= len(counts) <= MAX_MESSAGES:
        raise WireError(f"invalid bundle of {len(counts)} messages: it must have 2 to {MAX_MESSAGES}", "size")
    if len(joined) > MAX_BYTES:
        raise WireError(f"the messages of a bundle have at most {MAX_BYTES} bytes; these have {len(joined)}", "size")
    if not 1 <= min(counts) <= max(counts) <= MAX_FRAMES:
        given = f"{min(counts)} to {max(counts)} in a message of a bundle"
        raise WireError(f"invalid number of frames: {given} (1 to {MAX_FRAMES})", "frames")
    n_frames = sum(counts)
    if len(lengths) != 4 * n_frames:
        rule = f"a bundle of {n_frames} frames has {4 * n_frames} bytes of lengths"
        raise WireError(f"{rule}; got {len(lengths)}", "frames")
    sizes = struct.unpack(f"<{n_frames}I", lengths)
    if sum(sizes) != len(joined):
        raise WireError(f"size mismatch: a bundle declares {sum(sizes)} bytes and has {len(joined)}", "frames")
    n_headers = sum(sizes[end - n] for n, end in zip(counts, accumulate(counts), strict=True))
    if n_headers > MAX_HEADERS_BYTES:
        raise WireError(f"too many bytes of headers in a bundle: {n_headers}, at most {MAX_HEADERS_BYTES}", "size")
    return sizes
