"""The counter-based uniform: known values, even spread, no relation between neighbours."""

from specsot_worker.core.accept import uniform


def test_known_values_never_change():
    assert uniform(0, 0, 0) == uniform(0, 0, 0)
    assert abs(uniform(1, 2, 3) - 0.17809617154294355) < 1e-15


def test_spread_is_even_along_every_counter():
    for draw in (lambda i: uniform(i, 0, 0), lambda i: uniform(7, i, 0), lambda i: uniform(7, 0, i)):
        counts = [0] * 10
        for i in range(10_000):
            counts[int(draw(i) * 10)] += 1
        chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
        assert chi_square < 35  # 9 degrees of freedom: p about 6e-5
