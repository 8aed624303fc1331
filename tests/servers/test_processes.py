"""The helpers of tests that need a real server are run here without one, as CI has none."""

import sys
from pathlib import Path

from actors.engines.servers.server_process import ServerProcess
from tests.servers.processes import servers_of, session
from tests.support.polling import wait_until

NAME = "some.server"


def test_a_server_of_a_run_is_found_without_the_process_that_watches_it(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    model = str(run / "scratch-model")
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)", NAME, model], run / "s.txt", {})
    try:
        found = wait_until(lambda: servers_of(run, NAME), "the server runs")
        assert found[0] != server.pid
        assert sorted(session(server.pid)) == sorted([server.pid, *found])
        assert servers_of(other, NAME) == servers_of(run, "another.server") == []
    finally:
        server.close()
