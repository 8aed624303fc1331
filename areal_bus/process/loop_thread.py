"""An asyncio event loop in a thread of its own, for code that is not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CLOSE_S = 5.0  # longest wait for the thread to end


class LoopThread:
    """Runs coroutines on its loop until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. To cancel its future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, act: Callable[[], object]) -> None:
        """Call it on the loop."""
        self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Cancel what still runs and end the thread. A thread that does not end stays until the process ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
