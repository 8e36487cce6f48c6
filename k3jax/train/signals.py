"""SIGTERM and SIGINT as a request to stop after the current step."""

import os
import signal
import threading

AFTER_STEP = "stopping after this step, then saving"
STARTING = "still starting; stops as soon as that is done"
COMPILING = "still compiling; stops as soon as that returns"


class StopRequest:
    """While entered, the first SIGTERM or SIGINT is noted; the second one ends the process at once.

    Outside of the main thread signals cannot be caught, and nothing is changed.

    Attributes:
        received: the signal's number, or None so far.
        promise: what whoever sends a signal is told will happen; to be kept true.
    """

    def __init__(self):
        self.received: int | None = None
        self.promise = AFTER_STEP
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame) -> None:
        self.received = number
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        # os.write, because print may be what the signal interrupted.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: {self.promise}; again to stop at once\n".encode())
