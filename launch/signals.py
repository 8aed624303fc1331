"""Signals as events that a loop can wait for; knows nothing of what they lead to."""

import select
import signal
import socket

HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hold_back() -> None:
    """SIGUSR1 waits, here and in processes started from now on, until `Signals` takes it: it would kill those."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


class Signals:
    """SIGTERM, SIGINT, SIGUSR1 and SIGCHLD end a `wait`, which returns the numbers of the first three."""

    def __enter__(self) -> "Signals":
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (*HEEDED, signal.SIGCHLD)}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        numbers = self._read.recv(512) if ready else b""
        return [signal.Signals(number) for number in numbers if number in HEEDED]

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()
