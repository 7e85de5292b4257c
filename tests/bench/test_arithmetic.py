# SPDX-License-Identifier: Apache-2.0
"""Sizes, aggregation over ranks, bus bandwidth and ratios."""

from __future__ import annotations

import pytest

from tdcoll.bench.arithmetic import (
    calls_per_launch,
    format_bytes,
    message_sizes,
    ratio,
    sent_bytes,
    summarize,
)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    # Every rank is fast in most iterations; only the maximum over ranks shows that no iteration is.
    times = [[9.0, 1.0, 1.0, 1.0], [1.0, 8.0, 1.0, 5.0], [1.0, 1.0, 7.0, 1.0]]
    summary = summarize(times)
    assert (summary.median_us, summary.min_us, summary.p90_us) == (7.5, 5.0, 9.0)
    assert summary.skew_us == 6.5  # of 8, 7, 6 and 4


def test_the_p90_is_a_time_that_was_measured() -> None:
    assert summarize([[float(i) for i in range(1, 101)]]).p90_us == 90.0
    assert summarize([[3.0]]).p90_us == 3.0


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_ranks_without_times_or_with_different_numbers_of_them(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="same number of times"):
        summarize(times)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 8 ranks, 64 MB each, 1377 us: 7 segments in and out of each rank.
    assert sent_bytes("all_gather", 64 << 20, 8) == 7 * (64 << 20)
    assert sent_bytes("reduce_scatter", 1 << 20, 1) == 0
    assert sent_bytes("all_reduce", 64 << 20, 8) == 7 * (16 << 20)


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    assert ratio(15.0, 3.0) == 5.0
    assert ratio(3.0, 6.0) == 0.5
    assert ratio(None, 3.0) is None
    assert ratio(3.0, None) is None


def test_sizes_go_from_begin_to_end() -> None:
    assert message_sizes("1K", "1M", "4", 4) == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    assert message_sizes("1K", "5000", "2", 2) == [1024, 2048, 4096]
    assert message_sizes("8", "8", "2", 8) == [8]


@pytest.mark.parametrize(
    ("begin", "end", "factor", "message"),
    [
        ("0", "1K", "2", "-b must be a positive number of bytes"),
        ("1Q", "1K", "2", "-b must be a positive number of bytes"),
        ("1K", "-1", "2", "-e must be a positive number of bytes"),
        ("2K", "1K", "2", "-b must be at most -e"),
        ("1K", "1M", "1", "-f must be a whole number of at least 2"),
        ("1K", "1M", "1.5", "-f must be a whole number of at least 2"),
        ("1K", "1M", "9" * 5000, "-f must be a whole number of at least 2"),
        ("1", "1M", "2", "multiple of the dtype's 4 bytes"),
    ],
)
def test_a_wrong_range_says_which_option_is_wrong(begin: str, end: str, factor: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        message_sizes(begin, end, factor, 4)


@pytest.mark.parametrize(
    ("nbytes", "world", "calls"),
    [(1, 1, (20, 21)), (1 << 20, 8, (20, 21)), (16 << 20, 8, (8, 9)), (1 << 30, 8, (2, 3))],
)
def test_launches_have_an_even_and_an_odd_number_of_calls(nbytes: int, world: int, calls: tuple[int, int]) -> None:
    assert calls_per_launch(nbytes, world) == calls


def test_sizes_are_written_exactly() -> None:
    assert [format_bytes(n) for n in (0, 512, 1024, 1025, 3 << 20, 1 << 30)] == [
        *("0 B", "512 B", "1 KB", "1025 B", "3 MB", "1 GB")
    ]
