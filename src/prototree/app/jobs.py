"""A queue with limits: so many jobs and so many bytes may wait for one thread; the rest are asked to come again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class BusyError(Exception):
    """Too much is waiting already."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("too many requests are waiting; try again in a moment")
        self.retry_after = retry_after


class Queue:
    """One thread, and a bounded number of requests that wait for it."""

    def __init__(self, max_jobs: int, max_bytes: int, seconds_each: float = 0.25) -> None:
        self._max_jobs, self._max_bytes, self._seconds_each = max_jobs, max_bytes, seconds_each
        self._thread = ThreadPoolExecutor(1)
        self.n_jobs, self.n_bytes = 0, 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in the queue. Take it once the whole request has arrived, so that slow senders block nobody."""
        if self.n_jobs >= self._max_jobs:
            raise self._busy()
        self.n_jobs += 1
        try:
            yield
        finally:
            self.n_jobs -= 1

    @contextmanager
    def memory(self) -> Iterator["Memory"]:
        """What a request holds in memory, counted as it arrives: a promise takes no room."""
        held = Memory(self)
        try:
            yield held
        finally:
            self.n_bytes -= held.n_bytes

    def hold(self, n_bytes: int) -> None:
        """Counts bytes that have arrived, or refuses them."""
        if self.n_bytes + n_bytes > self._max_bytes:
            raise self._busy()
        self.n_bytes += n_bytes

    def _busy(self) -> BusyError:
        return BusyError(max(1, round(self.n_jobs * self._seconds_each)))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Does the work in the thread, after all that came before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Waits for what is running, drops what is waiting."""
        self._thread.shutdown(cancel_futures=True)


class Memory:
    """The bytes of one request."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self.n_bytes = queue, 0

    def add(self, n_bytes: int) -> None:
        """Some more have arrived."""
        self._queue.hold(n_bytes)
        self.n_bytes += n_bytes
