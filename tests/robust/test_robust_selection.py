"""Rules that compare whole models, against float64 and against a plain reading of the papers."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import BFLOAT16, REAL, random_array, same_bits

import flatweights as fw
from flatweights import robust
from flatweights.robust import Rule

Vectors = list[NDArray[Any]]


def exact_distances(sources: Vectors) -> NDArray[np.float64]:
    wide = [np.asarray(source).astype(np.longdouble) for source in sources]
    return np.array([[float(((a - b) ** 2).sum()) for b in wide] for a in wide])


def krum_order(sources: Vectors, byzantine: int) -> list[int]:
    """The sources by Blanchard's score, in wide numbers."""
    squares = exact_distances(sources)
    near = len(sources) - byzantine - 2
    scores = [np.sort(np.delete(row, k))[:near].sum() for k, row in enumerate(squares)]
    return [int(k) for k in np.argsort(scores, kind="stable")]


def around(rng: np.random.Generator, count: int, spread: float, size: int = 1000) -> Vectors:
    """float32 weights of about 1 that differ by ``spread``, each source by another length."""
    center = rng.choice([-1, 1], size) * rng.uniform(0.5, 2, size)
    return [
        (center + spread * (1 + k / count) * rng.normal(size=size)).astype(np.float32)
        for k in rng.permutation(count)
    ]


# Distances.


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_distances_are_those_of_wider_numbers(
    dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    tolerance = 1e-14 if dtype.itemsize == 8 else 2e-7
    for count in (1, 2, 3, 4, 5, 8, 9, 17):
        for size in (0, 1, 15, 16, 17, 511, 513, 1500):
            sources = [random_array(rng, size, dtype) for _ in range(count)]
            got = robust.distances(sources)
            assert got.shape == (count, count)
            assert np.array_equal(got, got.T)
            assert np.allclose(got, exact_distances(sources), rtol=tolerance, atol=0)


def test_distances_keep_their_digits_whatever_else_there_is(rng: np.random.Generator) -> None:
    for spread in (1e-3, 1e-6):
        sources = [*around(rng, 5, spread), np.full(1000, 1e19, np.float32)]
        sources.insert(0, -sources[-1])
        assert np.allclose(robust.distances(sources), exact_distances(sources), rtol=1e-6, atol=0)


def test_squares_beyond_float32_are_computed_in_float64() -> None:
    values = (1e30, -1e30, 1e-30, 3e-30, 3e-30, 0.0)
    for dtype in (np.dtype(np.float32), BFLOAT16):
        sources = [np.full(5, value, dtype) for value in values]
        assert np.allclose(robust.distances(sources), exact_distances(sources), rtol=1e-6, atol=0)


def test_distances_of_models_and_of_complex_numbers(rng: np.random.Generator) -> None:
    models = [
        {"a": rng.normal(size=(3, 4)), "n": np.array(k), "c": rng.normal(size=5) + 1j * k}
        for k in range(3)
    ]
    vectors = [
        np.concatenate([m["a"].ravel(), m["c"].real.ravel(), m["c"].imag.ravel()]) for m in models
    ]
    expected = exact_distances(vectors)
    trees = [[m["a"], {"c": m["c"]}] for m in models]
    for kind in (models, [fw.FlatWeights(m) for m in models], [list(m.values()) for m in models]):
        assert np.allclose(robust.distances(kind), expected, rtol=1e-13)
    assert np.allclose(robust.distances(trees), expected, rtol=1e-13)


def test_distances_of_large_models_on_several_threads(rng: np.random.Generator) -> None:
    sources = [random_array(rng, 300_000, np.dtype(np.float32)) for _ in range(5)]
    threads = fw.get_num_threads()
    found = []
    for count in (1, 2, 7):
        fw.set_num_threads(count)
        found.append(robust.distances(sources))
    fw.set_num_threads(threads)
    assert all(same_bits(one, found[0]) for one in found)
    assert np.allclose(found[0], exact_distances(sources), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distances_do_not_depend_on_alignment(
    dtype: type[np.floating[Any]], rng: np.random.Generator
) -> None:
    def shifted(source: NDArray[Any], by: int) -> NDArray[Any]:
        """A copy that begins ``by`` bytes behind a line of the caches, between NaN."""
        memory = np.full(source.nbytes + 192, 0xFF, np.uint8)
        begin = -memory.ctypes.data % 64 + 64 + by
        copy = memory[begin : begin + source.nbytes].view(dtype)
        copy[...] = source
        return copy

    for size in (9216, 9217, 9231, 9232, 20_000):
        # Of many magnitudes, so that each order of additions has other bits.
        values = rng.normal(size=(6, size)) * 2.0 ** rng.integers(-12, 12, (6, size))
        sources = [shifted(row, 0) for row in values.astype(dtype)]
        expected = robust.distances(sources)
        assert np.allclose(expected, exact_distances(sources), rtol=1e-6, atol=0)
        for by in range(4, 64, 4):
            assert same_bits(robust.distances([shifted(s, by) for s in sources]), expected)
        mixed = [shifted(source, 4 * k) for k, source in enumerate(sources)]
        assert same_bits(robust.distances(mixed), expected)


# Krum.


@pytest.mark.parametrize(
    "spread", [1.0, 1e-6, *(pytest.param(s, marks=pytest.mark.slow) for s in (1e-2, 1e-4))]
)
def test_krum_orders_as_float64_does(spread: float, rng: np.random.Generator) -> None:
    for count in (3, 5, 8, 16, 33, 64):
        byzantine = (count - 3) // 2
        sources = around(rng, count, spread)
        order = krum_order(sources, byzantine)
        outcome = robust.Krum(byzantine).apply(sources)
        assert outcome.scores is not None
        assert np.argsort(outcome.scores, kind="stable").tolist() == order
        assert outcome.used == order[:1]
        assert same_bits(outcome.weights, sources[order[0]])


ATTACKS = {
    "large": lambda honest: [np.full_like(honest[0], 1e30) for _ in range(3)],
    "shifted": lambda honest: [honest[k] + np.float32(0.01) for k in range(3)],
    "flipped": lambda honest: [-honest[k] for k in range(3)],
    "equal": lambda honest: [np.zeros_like(honest[0])] * 3,
    "nan": lambda honest: [np.full_like(honest[0], np.nan)] * 3,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "rule",
    [
        robust.Krum(3),
        robust.MultiKrum(3, 7),
        robust.Bulyan(3),
        robust.GeometricMedian(smoothing=1e-9),
        robust.CenteredClipping(1e-3),
        robust.Median(),
        robust.TrimmedMean(3),
        robust.MeanAroundMedian(15),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_hostile_sources_do_not_move_the_result(
    rule: robust.Rule, attack: str, rng: np.random.Generator
) -> None:
    honest = around(rng, 15, 1e-4)
    sources = [*ATTACKS[attack](honest), *honest]
    got = rule(sources, nonfinite="skip")
    # Not further from the honest mean than two of them are from each other.
    most = exact_distances(honest).max()
    mean = np.mean(np.stack(honest).astype(np.float64), axis=0)
    assert ((got.astype(np.float64) - mean) ** 2).sum() <= 2 * most


def test_multi_krum_averages_those_with_the_lowest_scores(rng: np.random.Generator) -> None:
    sources = around(rng, 9, 1e-3)
    best = sorted(krum_order(sources, 2)[:4])
    outcome = robust.MultiKrum(2, 4).apply(sources)
    assert outcome.used == best
    assert same_bits(outcome.weights, fw.average([sources[k] for k in best]))
    assert same_bits(robust.multi_krum(sources, 2, 4), outcome.weights)


def test_bulyan_chooses_one_after_the_other(rng: np.random.Generator) -> None:
    sources = around(rng, 12, 1e-3)
    left = list(range(12))
    chosen: list[int] = []
    while len(chosen) < 12 - 4:
        chosen.append(left.pop(krum_order([sources[k] for k in left], 2)[0]))
    outcome = robust.Bulyan(2).apply(sources)
    assert outcome.used == sorted(chosen)
    expected = robust.mean_around_median([sources[k] for k in sorted(chosen)], 12 - 8)
    assert same_bits(outcome.weights, expected)
    assert same_bits(robust.bulyan(sources, 2), expected)


# Centres.


def weiszfeld(sources: Vectors, weights: list[float], smoothing: float) -> NDArray[np.float64]:
    """RFA's algorithm on the models themselves."""
    wide = [source.astype(np.float64) for source in sources]
    center = np.average(wide, axis=0, weights=weights)
    for _ in range(200):
        pull = [
            w / max(smoothing, float(np.linalg.norm(x - center)))
            for w, x in zip(weights, wide, strict=True)
        ]
        center = np.average(wide, axis=0, weights=pull)
    return center


def test_the_geometric_median_is_that_of_the_models_themselves(rng: np.random.Generator) -> None:
    for weights in ([1.0] * 7, [1.0, 2.0, 3.0, 1.0, 0.5, 1.0, 1.0]):
        sources = [rng.normal(size=50) for _ in range(6)] + [rng.normal(size=50) + 100]
        got = robust.geometric_median(sources, weights, steps=200)
        assert np.allclose(got, weiszfeld(sources, weights, 1e-6), rtol=1e-9, atol=1e-9)


def slope(sources: Vectors, center: NDArray[np.float64]) -> float:
    """How fast the sum of distances falls, at most, per source and unit of length."""
    away = [center - source for source in sources]
    lengths = [float(np.linalg.norm(step)) for step in away]
    equal = sum(length == 0 for length in lengths)
    units = [step / length for step, length in zip(away, lengths, strict=True) if length]
    return float(np.linalg.norm(np.sum(units, axis=0)) - equal) / len(sources)


def test_the_sum_of_distances_falls_in_no_direction(rng: np.random.Generator) -> None:
    for _ in range(80):
        size, count = rng.integers(1, 4), rng.integers(3, 9)
        sources = list(rng.normal(size=(count, size)) * 10.0 ** rng.integers(0, 3, (count, 1)))
        center = robust.geometric_median(sources, smoothing=1e-12)
        nearest = min(sources, key=lambda x: float(np.linalg.norm(x - center)))
        if np.allclose(center, nearest, rtol=1e-9, atol=1e-9):
            center = nearest  # except for smoothing
        assert slope(sources, center) <= 1e-7


@pytest.mark.parametrize("scale", [1.0, pytest.param(1e7, marks=pytest.mark.slow), 1e150, 1e-150])
@pytest.mark.parametrize("smoothing", [1e-6, 1e-13, 1e-308, 5e-324])
@pytest.mark.parametrize("height", [0.01, 0.5])
def test_a_source_at_the_mean_of_all_is_left_if_it_is_not_the_median(
    scale: float, smoothing: float, height: float
) -> None:
    points = ((0.0, 0.0), (1.0, height), (1.0, 0.0), (1.0, -height), (-3.0, 0.0))
    sources = [scale * np.array(point) for point in points]
    center = robust.geometric_median(sources, smoothing=smoothing)
    if scale * 1e-3 < smoothing:  # then all distances count by their squares
        assert np.allclose(center / scale, 0.0)
        return
    expected = 1.0 - height / math.sqrt(3)  # where the outer three are seen under 120 degrees
    assert np.allclose(center / scale, [expected, 0.0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("smoothing", [1e-308, 5e-324, 1e-6, 1e308])
def test_any_smoothing_is_fine(smoothing: float) -> None:
    with np.errstate(all="raise"):
        equal = [np.array([3.0])] * 3
        assert robust.geometric_median(equal, smoothing=smoothing) == [3.0]
        sources = [np.array([x]) for x in (0.0, 1.0, 5.0)]
        expected = 2.0 if smoothing > 1 else 1.0
        assert np.allclose(robust.geometric_median(sources, smoothing=smoothing), expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 10), 5),
        ((0, 1, 2, 10), 1.5),
        ((0, 1, 5, 5.5, 90, 91), 5.25),
        ((0, 1, 1, 1, -3), 1),
        ((0, 0, 7, 7), 3.5),
    ],
)
def test_the_geometric_median_of_numbers_is_their_median(values: Any, expected: float) -> None:
    for some in itertools.islice(itertools.permutations(values), 0, None, 7):
        got = robust.geometric_median([np.array([float(x)]) for x in some], smoothing=1e-9)
        assert np.allclose(got, expected, atol=1e-8)


def test_centered_clipping_is_that_of_the_paper(rng: np.random.Generator) -> None:
    sources = [rng.normal(size=40) for _ in range(6)] + [rng.normal(size=40) + 50]
    for center in (np.zeros(40), rng.normal(size=40)):
        expected = center.copy()
        for _ in range(3):
            steps = [x - expected for x in sources]
            clipped = [s * min(1.0, 4.0 / float(np.linalg.norm(s))) for s in steps]
            expected = expected + np.mean(clipped, axis=0)
        got = robust.centered_clipping(sources, center, radius=4.0, steps=3)
        assert np.allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("equal", [2, 3, 5])
def test_sources_that_differ_from_many_equal_ones_move_the_centre(equal: int, dtype: str) -> None:
    center = np.zeros(4, dtype)
    moved = np.array([3.0, 0.0, 0.0, 4.0], dtype)
    sources = [center] * equal + [moved]
    expected = moved / np.float64(5 * (equal + 1))
    got = robust.centered_clipping(sources, center, radius=1.0, steps=1)
    assert np.allclose(got, expected, rtol=1e-6)
    got = robust.centered_clipping(sources, radius=1.0, steps=1)
    assert np.allclose(got, expected, rtol=1e-6)
    far = np.full(4, 1e9, dtype)  # its distances from the others show no direction
    if equal > 2:
        got = robust.centered_clipping([*sources, far], center, radius=1.0, steps=1)
        assert np.allclose(got, moved / np.float64(5 * (equal + 2)), rtol=1e-6)
    assert same_bits(robust.geometric_median(sources), center)


def test_all_sources_equal_are_their_own_centre() -> None:
    sources = [np.full(5, 3.0, np.float32)] * 4
    assert same_bits(robust.geometric_median(sources), sources[0])
    assert same_bits(robust.centered_clipping(sources, radius=1.0), sources[0])
    assert same_bits(robust.krum(sources, 0), sources[0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e200])
@pytest.mark.parametrize("place", range(5))
def test_clipping_starts_from_no_infinitely_far_source(place: int, bad: float) -> None:
    honest = [np.array([x]) for x in (1.0, 2.0, 3.0, 4.0)]
    sources = [*honest[:place], np.array([bad]), *honest[place:]]
    got = robust.centered_clipping(sources, radius=1.0)
    assert 1.0 <= got[0] <= 4.0


# Out, nonfinite, kinds, errors.

RULES = [
    robust.Krum(1),
    robust.MultiKrum(1, 3),
    robust.Bulyan(1),
    robust.GeometricMedian(),
    robust.CenteredClipping(1.0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_out_may_be_a_source_and_models_keep_their_kind(
    rule: robust.Rule, rng: np.random.Generator
) -> None:
    for k in (0, 3, 6):
        models = [{"a": rng.normal(size=(4, 3)), "n": np.array(i)} for i in range(7)]
        flat = [fw.FlatWeights(model) for model in models]
        outcome = rule.apply(models)
        expected = outcome.weights
        assert expected["n"] == models[outcome.used[0]]["n"]
        assert outcome.scores is not None
        assert len(outcome.scores) == 7
        assert rule(flat, out=flat[k]) is flat[k]
        assert same_bits(flat[k]["a"], expected["a"])
        assert same_bits(rule([list(m.values()) for m in models])[0], expected["a"])
        assert same_bits(rule([m["a"] for m in models]), expected["a"])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_sources_are_named_or_left_out_or_far_away(
    rule: robust.Rule, bad: float, rng: np.random.Generator
) -> None:
    sources = [rng.normal(size=9) for _ in range(8)]
    sources[2][4] = bad
    rest = [source for k, source in enumerate(sources) if k != 2]
    with pytest.raises(ValueError, match="source 2: holds NaN or infinity"):
        rule(sources, nonfinite="raise")
    outcome = rule.apply(sources, nonfinite="skip")
    assert same_bits(outcome.weights, rule(rest))
    assert 2 not in outcome.used
    assert outcome.scores is not None
    assert math.isnan(outcome.scores[2])
    if not isinstance(rule, robust.Bulyan):  # it has to choose six of eight
        assert np.isfinite(rule(sources)).all()


def test_wrong_numbers_are_refused() -> None:
    a = [np.ones(3)] * 6
    with pytest.raises(ValueError, match=r"at least 7 sources \(2 \* byzantine \+ 3\) for 2 byz"):
        robust.krum(a, 2)
    with pytest.raises(ValueError, match=r"at least 7 sources \(4 \* byzantine \+ 3\) for 1 byz"):
        robust.bulyan(a, 1)
    with pytest.raises(ValueError, match="byzantine: expected at least 0, got -1"):
        robust.krum(a, -1)
    with pytest.raises(ValueError, match="keep: expected at most the 6 sources, got 7"):
        robust.multi_krum(a, 1, 7)
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        robust.MultiKrum(1, 0)
    with pytest.raises(TypeError, match="Krum has no weights"):
        robust.Krum(1)(a, [1.0] * 6)
    with pytest.raises(TypeError, match="expected real numbers, got complex128"):
        robust.bulyan([np.ones(3, np.complex128)] * 7, 1)
    with pytest.raises(ValueError, match="smoothing: expected a finite number above 0, got 0"):
        robust.geometric_median(a, smoothing=0)
    with pytest.raises(ValueError, match="radius: expected a finite number above 0, got nan"):
        robust.centered_clipping(a, radius=math.nan)
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        robust.geometric_median(a, steps=0)
    with pytest.raises(ValueError, match=r"center: expected float64 \(3,\), got float64 \(4,\)"):
        robust.centered_clipping(a, np.ones(4), radius=1.0)
    with pytest.raises(ValueError, match="at least one source"):
        robust.distances([])


def test_counts_that_are_no_integers_and_lengths_that_are_no_numbers_are_named() -> None:
    a = [np.ones(3)] * 6
    calls: dict[str, Callable[[], Any]] = {
        "byzantine: expected an integer, got 1.0": lambda: robust.krum(a, 1.0),  # type: ignore[arg-type]
        "keep: expected an integer, got '2'": lambda: robust.multi_krum(a, 1, "2"),  # type: ignore[arg-type]
        "keep: expected an integer, got 1.5": lambda: robust.mean_around_median(a, 1.5),  # type: ignore[arg-type]
        "steps: expected an integer, got 2.5": lambda: robust.geometric_median(a, steps=2.5),  # type: ignore[arg-type]
        "radius: expected a real number, got str": lambda: robust.CenteredClipping("1"),  # type: ignore[arg-type]
        "trim: expected a real number, got str": lambda: robust.trimmed_mean(a, "1"),  # type: ignore[arg-type]
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=text):
            call()
    trimmed = robust.trimmed_mean([np.array([x]) for x in (0.0, 1.0, 2.0, 9.0)], np.float32(0.25))
    assert trimmed == [1.5]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (robust.TrimmedMean(1), robust.TrimmedMean(np.int64(1))),
        (robust.CenteredClipping(1), robust.CenteredClipping(np.float32(1), np.int8(5))),
        (robust.MultiKrum(1, 2), robust.MultiKrum(np.int32(1), np.int32(2))),
        (Rule.of(functools.partial(max, key=len)), Rule.of(max)),
    ],
)
def test_equal_rules_have_one_name(one: Any, same: Any) -> None:
    assert repr(one) == repr(same)  # by which members compare them


def test_a_tiny_radius_leaves_the_centre_where_it_is() -> None:
    sources = [np.array([x]) for x in (1.0, 2.0, 4.0)]
    assert robust.centered_clipping(sources, np.array([3.0]), radius=1e-310).tolist() == [3.0]


def test_too_few_sources_are_told_with_those_that_were_skipped() -> None:
    sources = [np.array([x]) for x in (1.0, np.nan, 2.0, np.nan, np.nan)]
    text = r"expected at least 5 sources .* got 2, without 3 that hold NaN or infinity$"
    with pytest.raises(ValueError, match=text):
        robust.krum(sources, 1, nonfinite="skip")


@pytest.mark.parametrize(
    "rule",
    [
        robust.GeometricMedian(),
        robust.CenteredClipping(20.0),
        robust.Krum(1),
        robust.MultiKrum(1, 4),
        robust.Bulyan(1),
    ],
    ids=["geometric_median", "centered_clipping", "krum", "multi_krum", "bulyan"],
)
def test_a_source_that_is_skipped_changes_no_bit(
    rule: robust.Rule, rng: np.random.Generator
) -> None:
    for _ in range(20):
        sources = around(rng, 9, 0.5)
        rest = [source.copy() for k, source in enumerate(sources) if k not in (0, 5)]
        sources[0][7], sources[5][99] = np.inf, np.nan
        assert same_bits(rule(sources, nonfinite="skip"), rule(rest))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_single_source_and_a_centre_with_nan_are_an_error(nonfinite: Any) -> None:
    a, bad = np.ones(2), np.array([1.0, np.nan])
    expected = "source 0: holds NaN" if nonfinite == "raise" else "every source of positive weight"
    for rule in (robust.GeometricMedian(), robust.CenteredClipping(1.0)):
        with pytest.raises(ValueError, match=expected):
            rule([bad], nonfinite=nonfinite)
    with pytest.raises(ValueError, match="center: holds NaN"):
        robust.centered_clipping([a, a], bad, radius=1.0, nonfinite=nonfinite)


def test_weights_count_by_their_ratios_whatever_their_size() -> None:
    sources = [np.array([x]) for x in (0.0, 1.0, 2.0)]
    with np.errstate(all="raise"):
        assert robust.geometric_median(sources, [1e308] * 3).round(6) == [1.0]


def test_sources_infinitely_far_from_each_other_have_their_mean() -> None:
    far = [np.array([x]) for x in (0.0, 1e200, 2e200)]
    with np.errstate(all="raise"):
        np.testing.assert_allclose(robust.geometric_median(far), [1e200])
        assert np.isnan(robust.geometric_median([np.array([np.nan])] * 3)).all()


def test_distances_whose_sum_is_too_large_are_those_of_the_farthest() -> None:
    """Each is finite: NaN and infinity are not what tells that source."""
    near = [np.full(3, x) for x in (1.0, 1.1, 1.2, 1.3, 1.4)]
    far = [np.full(3, 7e153)]
    assert same_bits(robust.krum(near + far, 1), robust.krum(near, 1))
    assert np.isin(robust.multi_krum(near + far, 1, 3), [1.1, 1.2, 1.3]).all() or np.allclose(
        robust.multi_krum(near + far, 1, 3), 1.2
    )
    line = [np.array([float(k)]) for k in range(6)]
    assert 0 <= robust.bulyan([*line, np.array([1.2e154])], 1)[0] <= 5
