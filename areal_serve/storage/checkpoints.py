"""Checkpoints by path (tinker://MODEL/weights/NAME, tinker://MODEL/sampler_weights/NAME), and their records."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_bus.storage.atomic_file import write_atomic
from areal_serve.rejection import Rejected

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
SCHEME = "tinker://"
TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}  # folder -> type of the checkpoint
META = "meta.json"
TTL_S = (3600, 10 * 366 * 86400)


def place(models: Path, model_id: str, kind: str, name: str) -> Path:
    """The folder of a checkpoint, existing or not. Raises Rejected for a name that is none."""
    if kind not in TYPES:
        raise Rejected(f"unknown kind of checkpoint {kind!r}: this server has {', '.join(TYPES)}", status=404)
    for part in (model_id, name):
        if not NAME.fullmatch(part):
            raise Rejected(f"invalid name {part!r}: letters, digits, '.', '_' and '-', at most 128, no '.' in front")
    return models / model_id / kind / name


def find(models: Path, path: str) -> tuple[str, Path]:
    """(model id, folder) of a checkpoint. Raises Rejected."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3:
        raise Rejected(f"invalid path {path!r}: a checkpoint is {SCHEME}MODEL/weights/NAME")
    folder = place(models, *parts)
    if not (folder / META).is_file() or _has_expired(folder):
        raise Rejected(f"missing checkpoint {path}: it was never saved, deleted, or has expired", status=404)
    return parts[0], folder


def model_of(models: Path, folder: str) -> str:
    """The model whose weights a folder holds; "" for the base model, which has no folder."""
    return Path(folder).relative_to(models).parts[0] if folder else ""


def listed(model: Path) -> list[dict[str, Any]]:
    """The records of a model's checkpoints, newest first."""
    folders = [folder for kind in TYPES for folder in (model / kind).glob("*") if (folder / META).is_file()]
    found = []
    for folder in folders:
        with contextlib.suppress(OSError, Rejected):  # the trainer writes it again, or it was deleted just now
            if not _has_expired(folder):
                found.append(((folder / META).stat().st_mtime, record(folder)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True)]


def record(folder: Path) -> dict[str, Any]:
    """What the API says of a checkpoint."""
    meta, kind = read(folder), folder.parent.name
    expires = meta.get("expires")
    return {
        "checkpoint_id": f"{kind}/{folder.name}",
        "checkpoint_type": TYPES[kind],
        "time": moment(meta.get("created") or (folder / META).stat().st_mtime),
        "tinker_path": f"{SCHEME}{folder.parents[1].name}/{kind}/{folder.name}",
        "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "public": False,
        "user_metadata": meta.get("user_metadata"),
        "expires_at": None if expires is None else moment(expires),
    }


def expiry(ttl_seconds: Any) -> float | None:
    """The time at which a checkpoint ends. Raises Rejected."""
    if ttl_seconds is None:
        return None
    if type(ttl_seconds) is not int or not TTL_S[0] <= ttl_seconds <= TTL_S[1]:
        raise Rejected(f"invalid ttl_seconds: from {TTL_S[0]} to {TTL_S[1]}, got {ttl_seconds!r}")
    return time.time() + ttl_seconds


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path) -> dict[str, Any]:
    """Raises Rejected."""
    try:
        return dict(json.loads((folder / META).read_text(encoding="utf-8")))
    except OSError:
        raise Rejected(f"missing checkpoint {folder.name}: it was deleted, or is being written", status=404) from None


def write(folder: Path, meta: Mapping[str, Any]) -> None:
    write_atomic(folder / META, json.dumps(meta))


def moment(seconds: float) -> str:
    """As the API writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _has_expired(folder: Path) -> bool:
    expires = read(folder).get("expires")
    if expires is None or expires > time.time():
        return False
    delete(folder)
    return True
