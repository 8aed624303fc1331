"""Waits for the supervisor of a rank: `python -I -S rank_waiter.py SOCKET PROCESS ...`. An attendant execs it.

There is one for each rank of a host, so it imports only `os` and `signal`: 3.5 MiB of private memory instead of 8.
SOCKET: descriptor of the connection to the fork server, which sends the exit code. PROCESS: pidfd of the supervisor,
which gets the signals that this process gets. They are blocked at its start. Further arguments are for `ps`.
"""

import os
import signal
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NUMBER_BYTES = 4
LOST = b"error: the fork server of this host is lost: its connection ended\n"


def main(server: int, process: int) -> int:
    """Exit code of the rank; 128 + N after signal N; 1 without an answer."""

    def forward(number: int, _: object) -> None:
        try:
            signal.pidfd_send_signal(process, number)
        except OSError:  # it has ended
            return

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    answer = b""
    try:
        while len(answer) < NUMBER_BYTES and (part := os.read(server, NUMBER_BYTES - len(answer))):
            answer += part
    except ConnectionError:
        answer = b""
    if len(answer) < NUMBER_BYTES:
        report_loss()
        return 1
    code = int.from_bytes(answer, "little", signed=True)
    return code if code >= 0 else 128 - code


def report_loss() -> None:
    try:
        os.write(2, LOST)
    except OSError:  # the reader is gone
        return


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
