"""Many small computations at once, each with one thread, instead of one after the other with all threads.

Threads that share the work of small tensors mostly wait for each other. Where there are many such computations, it is
faster to give each a thread of its own; what comes out then does not depend on the number of threads either.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # items begun for each thread, while the first waits to be fetched


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `work` makes of each item, in their order; as many at a time as torch has threads, few of them ahead."""
    n_threads, waiting = torch.get_num_threads(), deque[Future[Result]]()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > _AHEAD * n_threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for one in waiting:
                    one.cancel()
    finally:
        torch.set_num_threads(n_threads)
