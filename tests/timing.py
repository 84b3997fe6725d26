"""What tests that measure time share."""

from __future__ import annotations

import pytest

#: A host that others use now and then takes what it likes, seconds long: a measured time that is wrong is measured
#: again a little later, against the same bar. Nothing else is tried again, and pytest's last line counts the tries.
on_a_busy_host = pytest.mark.flaky(reruns=6, reruns_delay=1, only_rerun=["AssertionError"])
