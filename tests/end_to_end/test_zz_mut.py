import sys
from unittest import mock
import pytest
from support import fakedev, ranks
from epload.transfer.device import DeviceStaging
sys.path.insert(0,"/root/wt/h/tests/end_to_end")
import test_accelerator_streams as t
def mutated(rank, rule):
    with mock.patch.object(DeviceStaging, rule):
        return t.in_order(rank)
@pytest.mark.parametrize("rule", ("wait_until_used", "wait_until_filled", "enter", "leave"))
def test_m(rule):
    from support.fakedev import build
    build.library()
    [found]=ranks.run(1, mutated, rule, setup=fakedev.setup)
    assert found, rule
