"""Work in a thread beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from graphpipe.runtime.watchdog import writing_files


class Background:
    """Work in a thread that does not keep the process alive: it may wait for a rank that is gone."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_done = False
        self._then: Callable[[], None] | None = None

        def run() -> None:
            try:
                with writing_files():
                    work()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._is_done = True
                if self._then is not None:
                    self._then()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def at_end(self, work: Callable[[], None]) -> None:
        """Do something once this has ended, or now if it has."""
        with self._lock:
            if self._is_done:
                work()
            else:
                self._then = work

    def join(self) -> None:
        """Wait for the end, and raise what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
