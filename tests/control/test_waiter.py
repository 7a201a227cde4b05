"""What wakes the thread that runs the rounds."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

from epload.control.waiter import Alarm


def test_an_alarm_that_another_thread_sets_is_not_closed_meanwhile() -> None:
    """The thread of another load sets it while the watch of this one ends."""
    alarm = Alarm()
    alarm.open()
    write, closed_meanwhile = os.eventfd_write, []
    closing = threading.Thread(target=alarm.close)

    def slow(fd: int, value: int) -> Any:
        closing.start()
        closing.join(0.2)
        closed_meanwhile.append(not closing.is_alive())
        return write(fd, value)

    with mock.patch.object(os, "eventfd_write", slow):
        alarm.set()
        closing.join()
        alarm.set()
    assert closed_meanwhile == [False]
    assert alarm.fileno() == -1
