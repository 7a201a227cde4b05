"""The choice of readers from invented measurements."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from epload.planning.choose import LoadProfile, WaveMeasurement, choose_readers
from epload.planning.costs import MEMORY_RATE
from epload.planning.schedule import READERS

GB = 10**9
WAVE = 64 * 10**6


def profile(
    nodes: Sequence[int] = (2, 2), total: int = 40 * GB, waves: int = 600, wave_bytes: int = WAVE
) -> LoadProfile:
    """An evenly sharded load. ``nodes``: the number of ranks on each node."""
    node_of = [i for i, count in enumerate(nodes) for _ in range(count)]
    return LoadProfile(total, [total // len(node_of)] * len(node_of), node_of, 0, waves, wave_bytes, READERS)


class Cluster:
    """Storage and links as trials measure them. Rates are in bytes/s."""

    def __init__(self, nodes: Sequence[int], every: float, partitioned: float, link: float = 0.0) -> None:
        """``every`` and ``partitioned``: the rate at which each rank reads in that mode. ``link``: 0 for no link."""
        self._nodes, self._rate, self._link = nodes, {"every": every, "partitioned": partitioned}, link
        self.trials: list[str] = []

    def __call__(self, readers: str) -> list[WaveMeasurement]:
        self.trials.append(readers)
        ranks = sum(self._nodes)
        share = WAVE // ranks
        seen = []
        for count in self._nodes:
            crossing = WAVE // 2 if self._link and readers == "partitioned" else 0
            for local in range(count):
                link = (crossing, crossing / self._link) if crossing and local == 0 else (0, 0.0)
                seen.append(WaveMeasurement(share, share / self._rate[readers], *link))
        return seen


def predictions(sentence: str) -> dict[str, float]:
    """Seconds by name, from e.g. ``auto -> every: predicted 2 s, one 3 s (why)``."""
    first, *rest = sentence[: sentence.rindex("(")].replace("auto -> ", "").split(", ")
    predicted = [first.replace(": predicted", ""), *rest]
    return {name: float(seconds) for name, seconds, _ in (text.split() for text in predicted)}


def test_a_load_that_will_end_soon_has_one_trial() -> None:
    cluster = Cluster((2, 2), every=GB, partitioned=100 * GB)
    chosen, why = choose_readers(profile(total=3 * GB), cluster)
    assert (chosen, cluster.trials) == ("every", ["every"])
    assert predictions(why) == {"every": pytest.approx(0.75, rel=0.05)}


def test_two_waves_are_too_few_for_a_second_trial() -> None:
    cluster = Cluster((2, 2), every=1e6, partitioned=GB, link=GB)
    assert choose_readers(profile(waves=2), cluster)[0] == "every"
    assert cluster.trials == ["every"]


CASES = {
    # a rank's rate on its regions, a rank's rate on sequential shares, the link's rate
    "storage equally fast in both modes": ((2, 2), GB, GB, 10 * GB, "every", 10.0),
    "storage that is slow with many readers": ((4,), GB / 20, GB, 0, "partitioned", 10.0 + 10 * GB / MEMORY_RATE),
    "the same, between nodes": ((2, 2), GB / 20, GB, 10 * GB, "partitioned", 10.0 + 10 * GB / MEMORY_RATE),
    "a slow link between nodes": ((2, 2), GB / 20, GB, GB / 10, "per_node", 20.0 + 10 * GB / MEMORY_RATE),
    "a link slower than bad storage": ((1, 1, 1, 1), GB / 4, GB / 4, GB / 10, "every", 40.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cheapest_readers_are_chosen(case: str) -> None:
    nodes, every, partitioned, link, expected, seconds = CASES[case]
    cluster = Cluster(nodes, every, partitioned, link)
    chosen, why = choose_readers(profile(nodes), cluster)
    predicted = predictions(why)
    assert chosen == expected, why
    assert cluster.trials == ["every", "partitioned"]
    assert set(predicted) == {"every", "partitioned", "per_node", "one"}
    assert predicted[chosen] == min(predicted.values()), why
    assert predicted[chosen] == pytest.approx(seconds, rel=0.06), "two digits, without the two waves of the trials"
    assert why.startswith(f"auto -> {chosen}: predicted ")


def test_one_reader_if_the_other_ranks_read_slowly() -> None:
    """With equal shares, the slow ranks would delay the load."""
    rates = [GB, GB / 100, GB / 100, GB / 100]

    def trial(readers: str) -> list[WaveMeasurement]:
        return [WaveMeasurement(WAVE // 4, WAVE / 4 / rate, WAVE // 2, WAVE / 2 / (GB / 10)) for rate in rates]

    chosen, why = choose_readers(profile((1, 1, 1, 1), total=3 * GB, waves=3, wave_bytes=GB), trial)
    assert chosen == "one", why
    assert predictions(why) == {
        "every": pytest.approx(50, rel=0.05),
        "partitioned": pytest.approx(50 + 25, rel=0.05),
        "per_node": pytest.approx(200, rel=0.05),
        "one": pytest.approx(20, rel=0.05),
    }


def test_predictions_exclude_what_the_trials_moved() -> None:
    """A first wave of half the load leaves half to read."""
    whole, half = (
        predictions(choose_readers(profile(total=8 * GB, wave_bytes=wave), Cluster((2, 2), GB / 5, GB / 5, GB))[1])[
            "every"
        ]
        for wave in (1, 4 * GB)
    )
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_the_slowest_link_decides() -> None:
    def trial(readers: str) -> list[WaveMeasurement]:
        links = [GB, GB // 50]
        return [WaveMeasurement(WAVE // 2, 0.1, WAVE // 2, WAVE / 2 / link) for link in links]

    predicted = predictions(choose_readers(profile((1, 1)), trial)[1])
    assert predicted["partitioned"] >= 20 / 0.02


def test_a_rank_that_read_nothing_in_a_trial_does_not_count_as_infinitely_fast() -> None:
    """A small wave has buckets for half of the ranks only."""

    def trial(readers: str) -> list[WaveMeasurement]:
        reads = (1, 1, 1, 1) if readers == "every" else (1, 0, 1, 0)
        share = WAVE // sum(reads)
        return [WaveMeasurement(share * r, share * r / (GB / 10), WAVE // 2, WAVE / 2 / GB) for r in reads]

    chosen, why = choose_readers(profile(), trial)
    predicted = predictions(why)
    assert predicted["per_node"] >= 40 / 0.2, f"two ranks of a node read 0.1 GB/s each at most: {why}"
    assert predicted["partitioned"] >= 40 / 0.4, why
    assert chosen == "every", why
