"""A draw's key and its bits' uniform numbers: known values, even spread, no relation between neighbours."""

from specsot_worker.core.accept import draw_key, uniform


def test_known_values_never_change():
    assert draw_key(1, 2, 3) == round(0.17809617154294355 * 2**53)
    first = 0xE220A8397B1DCDAF  # splitmix64's first number of seed 0, in every published implementation
    assert uniform(0, 1) == (first >> 11) * 2.0**-53
    assert uniform(0, 2) == (0x6E789E6AA1B965F4 >> 11) * 2.0**-53


def test_spread_is_even_along_every_counter():
    keys = [lambda i: draw_key(i, 0, 0), lambda i: draw_key(7, i, 0), lambda i: draw_key(7, 0, i)]
    for draw in (
        *(lambda i, key=key: key(i) * 2.0**-53 for key in keys),
        lambda i: uniform(draw_key(7, 0, i), 8),
    ):
        counts = [0] * 10
        for i in range(10_000):
            counts[int(draw(i) * 10)] += 1
        chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
        assert chi_square < 35  # 9 degrees of freedom: p about 6e-5


def test_the_bits_of_one_draw_are_independent():
    """All sixteen pairs of quarters of two neighbouring bits' numbers come equally often."""
    for half in (1, 128, 65536):
        counts = [0] * 16
        for position in range(16_000):
            key = draw_key(7, 0, position)
            counts[int(uniform(key, half) * 4) * 4 + int(uniform(key, 2 * half) * 4)] += 1
        assert sum((count - 1000) ** 2 / 1000 for count in counts) < 46  # 15 degrees of freedom: p about 5e-5
