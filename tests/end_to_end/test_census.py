"""A sample of the census (see ``tests/campaigns/census``): classes of transformers, judged as the program judges them."""

from __future__ import annotations

import transformers

from campaigns.census.classes import LIST, auto_classes, listed, sample
from campaigns.census.pool import census
from epload.mapping.transformers import SUPPORTED

COUNT = 15


def test_a_sample_loads_as_the_library_does() -> None:
    newest = transformers.__version__.startswith(f"{SUPPORTED[1]}.")
    verdicts = census([name for name in sample(COUNT) if newest or name in auto_classes()], 1, None, False)
    assert len(verdicts) >= COUNT // 2
    wrong = {name: verdict["findings"] for name, verdict in verdicts.items() if verdict["kind"] != "right"}
    assert not wrong, "\n".join(f"{name}: {text}" for name, texts in wrong.items() for text in texts)


def test_the_list_is_sorted() -> None:
    assert LIST.read_text() == "".join(f"{name}\n" for name in sorted(set(listed())))
    assert set(sample(COUNT)) <= set(listed())
