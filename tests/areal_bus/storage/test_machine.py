"""Folders that the processes of one machine share, where machines have one host name."""

import subprocess
import sys
from pathlib import Path

from areal_bus.storage import machine as module
from areal_bus.storage.machine import machine, machine_folder

HOLDER = """
import sys
from pathlib import Path
from areal_bus.storage import machine
machine.BOOT_ID = sys.argv[2]
print(machine.machine_folder(Path(sys.argv[1])).name, flush=True)
sys.stdin.read()
"""


class Process:
    """A process of the machine that booted with this id. It holds its folder until it is ended."""

    def __init__(self, parent: Path, boot: str) -> None:
        boot_id = parent.parent / f"boot-{boot}"
        boot_id.write_text(boot, encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(parent), str(boot_id)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.folder = self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_machines_with_one_host_name_have_folders_of_their_own(tmp_path: Path) -> None:
    parent = tmp_path / "judge"
    first, second, third, again = (Process(parent, boot) for boot in ("A", "B", "C", "B"))
    host = first.folder
    assert [second.folder, third.folder, again.folder] == [f"{host}-2", f"{host}-3", f"{host}-2"]
    second.end()
    kept = Process(parent, "B")
    assert kept.folder == f"{host}-2"  # another process of its machine holds it
    for process in (first, third, again, kept):
        process.end()


def test_a_machine_finds_its_folder_again_in_the_process_in_a_later_start_and_after_a_reboot(tmp_path: Path) -> None:
    folders = []
    for boot in ("A", "A", "B"):
        process = Process(tmp_path / "judge", boot)
        folders.append(process.folder)
        process.end()
    assert len(set(folders)) == 1
    folder = machine_folder(tmp_path)
    assert machine_folder(tmp_path) == folder
    assert (folder / module.OWNER).read_text(encoding="utf-8") == machine()
