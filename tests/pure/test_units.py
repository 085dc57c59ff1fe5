"""Human units at the border."""

import pytest

from partita.units import format_bytes, format_count, format_time, parse_bytes


@pytest.mark.case
@pytest.mark.parametrize(
    ("text", "size"), [("70 GiB", 70 << 30), ("80GB", 80 * 10**9), ("1.5 KiB", 1536), ("12", 12), (7, 7), ("3 B", 3)]
)
def test_sizes_are_read_with_their_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.case
@pytest.mark.parametrize("text", ["", "GiB", "70 gib", "-1 GiB", "1e3", "70 GiBB"])
def test_what_is_no_size_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match="GiB"):
        parse_bytes(text)


@pytest.mark.golden
def test_figures_are_printed_with_a_fitting_unit():
    assert format_bytes(1536) == "1.5 KiB"
    assert format_time(0.0123) == "12.3 ms"
    assert format_time(0) == "0 ns"
    assert format_count(1.2e12) == "1.2 T"
    assert format_count(12) == "12"
