"""The process of a sweep's job that is forked from a job server: it waits for the fork and ends with it.

python -P -m areal_lab.sweep.job_attendant ADDRESS MODULE ARGUMENT ...

The fork runs MODULE.main() with the arguments, environment and standard streams of this process. Signals go to it, and
its exit code comes back (128 + N after signal N). It is killed when this process is. ADDRESS: abstract address of the
server (areal_lab/sweep/job_fork_server.py).
"""

import socket
import sys

from launch.fork.attendant import attend


def main() -> int:
    """Exit code when the job does not start; else this process becomes another one."""
    address, sys.argv = f"\0{sys.argv[1]}", sys.argv[2:]
    return attend(lambda: connected(address))


def connected(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(address)
    return server


if __name__ == "__main__":
    sys.exit(main())
