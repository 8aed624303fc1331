"""Opens a page in headless Chromium, where one is on the path."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")


def browse(url: str, folder: Path, *options: str, light: bool = True) -> str:
    """Standard output of Chromium, which had nothing to say on the console. Its profile is below the folder."""
    line = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--hide-scrollbars", f"--blink-settings=preferredColorScheme={int(light)}",
            f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", *options, url]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout
