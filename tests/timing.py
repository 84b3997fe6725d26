"""What tests that measure time share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class WrongTime(AssertionError):
    """A measured time is not what it should be; on a busy host that may be the host's doing."""


@contextmanager
def on_the_clock() -> Iterator[None]:
    """What is asserted inside is about time."""
    try:
        yield
    except AssertionError as error:
        raise WrongTime(str(error)) from error


#: A host that others use now and then takes what it likes, seconds long: a measured time that is wrong is measured
#: again a little later, against the same bar. Any other failure is final, and pytest's last line counts the tries.
on_a_busy_host = pytest.mark.flaky(reruns=6, reruns_delay=1, only_rerun=["WrongTime"])
