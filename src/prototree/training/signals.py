"""A signal that asks a training to stop: it saves what it has and says so. No torch here."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(BaseException):
    """A signal arrived; the state was saved."""


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set when SIGINT or SIGTERM arrives, so that a loop can save and stop between two batches."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.is_set():  # asked twice: at once
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM end what is done within as Ctrl+C does: nothing is left half done, and something can be said."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
