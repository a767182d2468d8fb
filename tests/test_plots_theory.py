"""Every panel of the theorem notebooks draws the numbers it is given and the closed form they are compared with."""

from collections.abc import Callable, Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from test_plots import assert_apart, assert_inside_the_figure, box

from cwlib import plots_theory, style

EIGENVALUES = np.array([0.0, 2.0, 1.0 + 1.5j, 1.0 - 1.5j, -1.1 + 0.1j, 3.1 - 0.2j])
AT = np.linspace(-1, 3, 9)
VALUE, ERROR = 1 + AT**2, 0.1 + 0.01 * AT
ANGLES = np.linspace(0, np.pi, 37)
GATES = (0.5, 0.2)
RATIOS = 0.5 ** np.arange(7)
TOKENS = 5
THETAS = np.linspace(0, 2 * np.pi, 13)
LEVELS = {1: 6, 5: 10, 11: 14, 19: 18}  # of the sphere


def mixing() -> pd.DataFrame:
    """Curves of T6; what is "measured" lies 0.02 lower, so that neither is taken for the other."""
    rows = []
    for angle in ANGLES:
        for gate in GATES:
            square = max(1 - 2 * gate * (1 - gate) * (1 - np.cos(angle)), 0)
            rows.append((angle, gate, "length", square**0.5))
            rows.append((angle, gate, "isometry", (1 + square) ** 2 / (2 + 2 * square**2)))
    frame = pd.DataFrame(rows, columns=["angle", "gate", "quantity", "closed form"])
    return frame.assign(measured=frame["closed form"] - 0.02)


def gaussian(sizes: tuple[int, ...] = (128, 384)) -> pd.DataFrame:
    """Isometries beside the limit, by an amount that tells the sizes apart; the quantiles too differ between sizes."""
    frame = pd.DataFrame([(d, r) for d in sizes for r in RATIOS], columns=["d_model", "ratio"]).astype(float)
    isometry = 1 / (1 + 2 * frame["ratio"]) + 2 / frame["d_model"]
    spread = frame["ratio"] ** 0.5 / 2 + 10 / frame["d_model"]
    return frame.assign(isometry=isometry, s_10=1 - spread, s_90=1 + spread)


def cycle_spectra() -> np.ndarray:
    """Spectra of the plain walk on a cycle of plane fibres whose last edge turns by theta: NumPy's, of 2n x 2n."""
    spectra = []
    for theta in THETAS:
        step = np.kron(np.eye(TOKENS, k=1), np.eye(2))
        turn = [[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]]
        step[-2:, :2] = turn
        spectra.append(np.linalg.eigvalsh(np.eye(2 * TOKENS) - (step + step.T) / 2))
    return np.stack(spectra)


def sphere() -> np.ndarray:
    """Clusters around the exact levels, a little wider the higher they are."""
    return np.concatenate([level * np.linspace(0.97, 1.02, size) for level, size in LEVELS.items()])


def band(ax: Axes) -> Axes:
    return plots_theory.plot_band(ax, AT, VALUE, ERROR, color=style.BLUE, linestyle="--", label="trained")


PANELS: dict[str, Callable[[Axes], Axes]] = {
    "plot_eigenvalues": lambda ax: plots_theory.plot_eigenvalues(ax, EIGENVALUES),
    "plot_band": band,
    "plot_mixing": lambda ax: plots_theory.plot_mixing(ax, mixing()),
    "plot_gaussian_isometry": lambda ax: plots_theory.plot_gaussian_isometry(ax, gaussian()),
    "plot_spectral_flow": lambda ax: plots_theory.plot_spectral_flow(ax, THETAS, cycle_spectra()),
    "plot_sphere_spectrum": lambda ax: plots_theory.plot_sphere_spectrum(ax, sphere(), LEVELS),
}
# width and height in inches as the notebooks print them
SIZES = {"plot_mixing": (3.4, 2.8), "plot_gaussian_isometry": (3.4, 2.8), "plot_sphere_spectrum": (6.8, 2.9)}


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """The house style, and no figure left open."""
    with plt.rc_context(style.rc("text")):
        yield
    plt.close("all")


def panel(name: str) -> Axes:
    _, ax = plt.subplots(figsize=SIZES.get(name, (3.3, 2.64)))
    return PANELS[name](ax)


def drawn(ax: Axes, color: str, marker: str | None = None) -> list[Line2D]:
    """The lines of one colour, of one marker if it is given, that have data: a legend's own have none."""
    lines = [line for line in ax.lines if len(line.get_xdata()) and to_rgba(line.get_color()) == to_rgba(color)]
    return [line for line in lines if marker is None or line.get_marker() == marker]


def edges_of_band(ax: Axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the only band of a panel is, its lower and its upper edge."""
    (area,) = ax.collections
    x, y = area.get_paths()[0].vertices.T
    at = np.unique(x)
    return at, np.array([y[x == where].min() for where in at]), np.array([y[x == where].max() for where in at])


def legend(ax: Axes) -> dict[str, Line2D]:
    """The handles of a legend by name; a name stands in it once."""
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(set(labels)) == len(labels), labels
    return dict(zip(labels, ax.get_legend().legend_handles, strict=True))


# --- every panel --------------------------------------------------------------------------------------------------


def test_every_panel_is_tried_here() -> None:
    assert set(PANELS) == {name for name in vars(plots_theory) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_draws_on_its_axes_alone(name: str) -> None:
    fig, (ax, other) = plt.subplots(1, 2, figsize=(6.8, 3.4))
    plt.sca(other)  # where whatever forgets its axes would draw
    assert PANELS[name](ax) is ax
    assert ax.has_data()
    assert not other.has_data() and not other.texts and not other.get_legend()
    assert not other.get_xlabel() and not other.get_ylabel() and not other.get_title()
    assert plt.get_fignums() == [fig.number]
    assert fig.axes == [ax, other]


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_leaves_what_it_is_given_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    draw = getattr(plots_theory, name)

    def spy(ax: Axes, *data: object, **look: str) -> Axes:
        given.extend((item, item.copy()) for item in data)
        return draw(ax, *data, **look)

    monkeypatch.setattr(plots_theory, name, spy)
    panel(name)
    assert given
    for data, copy in given:
        if isinstance(data, pd.DataFrame):
            pd.testing.assert_frame_equal(data, copy)
        elif isinstance(data, np.ndarray):
            assert np.array_equal(data, copy)
        else:
            assert data == copy


@pytest.mark.parametrize("name", PANELS)
def test_nothing_lies_outside_the_panel_or_the_figure(name: str) -> None:
    ax = panel(name)
    assert_inside_the_figure(ax.figure)
    assert_apart(ax.get_xticklabels())
    assert_apart(ax.get_yticklabels())
    for line in ax.lines:
        points = ax.transData.transform(np.column_stack([line.get_xdata(), line.get_ydata()]))
        assert all(ax.bbox.padded(0.5).contains(x, y) for x, y in points), line.get_label()
    for text in ax.texts:
        assert all(ax.bbox.contains(x, y) for x, y in box(text).get_points()), text.get_text()


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("plot_mixing", "angle between the two heads (degrees)", "length, isometry of the mixture"),
        ("plot_gaussian_isometry", "d_head / d_model of a Gaussian head", "isometry; singular values"),
        ("plot_spectral_flow", r"holonomy angle $\theta$ (degrees)", "eigenvalue of L"),
        ("plot_sphere_spectrum", "rank of the eigenvalue", "eigenvalue / mean of the first six"),
    ],
)
def test_axes_are_labelled(name: str, x: str, y: str) -> None:
    ax = panel(name)
    assert (ax.get_xlabel(), ax.get_ylabel()) == (x, y)


# --- eigenvalues --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [EIGENVALUES, np.array([0.0, 0.3, 2.0])], ids=["complex", "real"])
def test_eigenvalues_are_dots_of_the_complex_plane(values: np.ndarray) -> None:
    _, ax = plt.subplots()
    plots_theory.plot_eigenvalues(ax, values)
    (dots,) = drawn(ax, style.BLUE)
    np.testing.assert_array_equal(dots.get_xdata() + 1j * dots.get_ydata(), values)
    assert (dots.get_marker(), dots.get_linestyle()) == (".", "None")
    assert ax.get_aspect() == 1


def test_eigenvalues_come_with_the_interval_and_the_disk_that_bound_them() -> None:
    ax = panel("plot_eigenvalues")
    (interval,) = drawn(ax, style.ORANGE)
    assert (list(interval.get_xdata()), list(interval.get_ydata())) == ([0, 2], [0, 0])
    (disk,) = ax.patches
    assert isinstance(disk, Circle) and not disk.get_fill()
    assert (disk.center, disk.radius, disk.get_linestyle()) == ((1, 0), 1, "--")
    assert to_rgba(disk.get_edgecolor()) == to_rgba(style.NULL["color"])
    assert ax.get_xlim() == pytest.approx((-1.2, 3.2)) and ax.get_ylim() == pytest.approx((-1.6, 1.6))


@pytest.mark.parametrize("value", [3.3, -1.3, 1 + 1.7j, 1 - 1.7j])
def test_eigenvalues_outside_the_window_are_refused(value: complex) -> None:
    _, ax = plt.subplots()
    values = np.array([0.5, value, value + 0.001], dtype=complex)
    with pytest.raises(ValueError, match=r"^reach: expected a window .* got 2 outside \(2\.2, 1\.6\)"):
        plots_theory.plot_eigenvalues(ax, values)
    plots_theory.plot_eigenvalues(ax, values, reach=(2.5, 1.8))
    assert ax.get_xlim() == pytest.approx((-1.5, 3.5)) and ax.get_ylim() == pytest.approx((-1.8, 1.8))
    (dots,) = drawn(ax, style.BLUE)
    np.testing.assert_array_equal(dots.get_xdata() + 1j * dots.get_ydata(), values)


# --- band ---------------------------------------------------------------------------------------------------------


def test_a_band_is_two_standard_errors_around_its_line() -> None:
    ax = panel("plot_band")
    (line,) = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), AT)
    np.testing.assert_array_equal(line.get_ydata(), VALUE)
    at, low, high = edges_of_band(ax)
    np.testing.assert_allclose(at, AT)
    np.testing.assert_allclose(low, VALUE - 2 * ERROR)
    np.testing.assert_allclose(high, VALUE + 2 * ERROR)


def test_a_band_has_the_look_of_its_line() -> None:
    _, ax = plt.subplots()
    plots_theory.plot_band(ax, AT, VALUE, ERROR, label="Gaussian O, V", **style.NULL)
    (line,), (area,) = ax.lines, ax.collections
    assert (line.get_label(), line.get_linestyle()) == ("Gaussian O, V", style.NULL["linestyle"])
    assert to_rgba(line.get_color()) == to_rgba(style.NULL["color"])
    (face,) = area.get_facecolor()
    assert tuple(face[:3]) == to_rgba(style.NULL["color"])[:3]
    assert face[3] < 0.5  # another band and its line stay visible beneath
    assert ax.get_legend_handles_labels()[1] == ["Gaussian O, V"]  # the band has no entry of its own


# --- T6 -----------------------------------------------------------------------------------------------------------


def test_mixing_shows_closed_forms_as_lines_and_measurements_as_dots() -> None:
    ax = panel("plot_mixing")
    frame = mixing()
    for gate, color in zip(GATES, (style.BLUE, style.VERMILLION), strict=True):
        for quantity, style_of_line, marker in (("length", "-", "o"), ("isometry", "--", "s")):
            rows = frame[(frame["gate"] == gate) & (frame["quantity"] == quantity)]
            (line,) = (found for found in drawn(ax, color, "None") if found.get_linestyle() == style_of_line)
            (dots,) = (found for found in drawn(ax, color, marker) if found.get_linestyle() == "None")
            np.testing.assert_allclose(line.get_xdata(), np.degrees(rows["angle"]))
            np.testing.assert_array_equal(line.get_ydata(), rows["closed form"])
            np.testing.assert_allclose(dots.get_xdata(), np.degrees(rows["angle"]))
            np.testing.assert_array_equal(dots.get_ydata(), rows["measured"])
            assert dots.get_markevery() == 4  # more would hide the line
    assert len([line for line in ax.lines if len(line.get_xdata())]) == 8
    assert list(ax.get_xticks()) == [0, 45, 90, 135, 180]


def test_mixing_names_quantity_and_gate_of_every_curve() -> None:
    ax = panel("plot_mixing")
    named = legend(ax)
    looks = {
        r"length in the plane, $\gamma$ = 0.5": (style.BLUE, "-", "o"),
        r"isometry in 4 dimensions, $\gamma$ = 0.5": (style.BLUE, "--", "s"),
        r"length in the plane, $\gamma$ = 0.2": (style.VERMILLION, "-", "o"),
        r"isometry in 4 dimensions, $\gamma$ = 0.2": (style.VERMILLION, "--", "s"),
    }
    assert named.keys() == looks.keys()
    for label, handle in named.items():
        assert (handle.get_color(), handle.get_linestyle(), handle.get_marker()) == looks[label]


# --- T7 -----------------------------------------------------------------------------------------------------------


def test_gaussian_isometry_is_shown_per_size_with_its_limit() -> None:
    ax = panel("plot_gaussian_isometry")
    frame = gaussian()
    for d_model, color, marker in ((128, style.BLUE, "o"), (384, style.VERMILLION, "s")):
        (dots,) = drawn(ax, color)
        rows = frame[frame["d_model"] == d_model]
        np.testing.assert_array_equal(dots.get_xdata(), rows["ratio"])
        np.testing.assert_array_equal(dots.get_ydata(), rows["isometry"])
        assert (dots.get_marker(), dots.get_linestyle()) == (marker, "None")
        assert dots.get_label() == f"isometry, d_model = {d_model}"
    (limit,) = drawn(ax, "black")
    ratio = limit.get_xdata()
    assert (ratio.min(), ratio.max()) == pytest.approx((RATIOS.min(), RATIOS.max()))
    np.testing.assert_allclose(limit.get_ydata(), 1 / (1 + 2 * ratio))
    assert limit.get_label() == "1 / (1 + 2 ratio)"


def test_gaussian_singular_values_are_a_grey_band_of_the_largest_size() -> None:
    _, ax = plt.subplots()
    plots_theory.plot_gaussian_isometry(ax, gaussian().sample(frac=1, random_state=0))  # rows in any order
    (area,) = ax.collections
    x = area.get_paths()[0].vertices[:, 0]
    assert np.count_nonzero(np.diff(np.sign(np.diff(x)[np.diff(x) != 0]))) == 1  # there and back once: no crossing
    at, low, high = edges_of_band(ax)
    rows = gaussian((384,)).sort_values("ratio")
    np.testing.assert_allclose(at, rows["ratio"])
    np.testing.assert_allclose(low, rows["s_10"])
    np.testing.assert_allclose(high, rows["s_90"])
    (face,) = area.get_facecolor()
    assert tuple(face[:3]) == to_rgba(style.NULL["color"])[:3]


def test_gaussian_isometry_has_a_logarithmic_axis_of_fractions_and_a_full_legend() -> None:
    ax = panel("plot_gaussian_isometry")
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "1"]
    np.testing.assert_allclose(ax.get_xticks(), np.sort(RATIOS))
    assert not len(ax.get_xticks(minor=True))
    assert legend(ax).keys() == {
        "singular values / rms (10-90 %)",
        "1 / (1 + 2 ratio)",
        "isometry, d_model = 128",
        "isometry, d_model = 384",
    }


@pytest.mark.parametrize("sizes", [(384,), (128, 256, 384)])
def test_gaussian_isometry_takes_two_sizes(sizes: tuple[int, ...]) -> None:
    _, ax = plt.subplots()
    with pytest.raises(ValueError):
        plots_theory.plot_gaussian_isometry(ax, gaussian(sizes))


# --- T8 -----------------------------------------------------------------------------------------------------------


def test_spectral_flow_shows_every_eigenvalue_of_every_angle() -> None:
    ax = panel("plot_spectral_flow")
    dots = drawn(ax, "black")
    assert len(dots) == 2 * TOKENS
    for line in dots:
        np.testing.assert_allclose(line.get_xdata(), np.degrees(THETAS))
        assert (line.get_marker(), line.get_linestyle()) == ("o", "None")
        assert line.get_zorder() > 2  # above the curves
    np.testing.assert_array_equal(np.stack([line.get_ydata() for line in dots], axis=1), cycle_spectra())


def test_branches_of_the_spectral_flow_are_the_spectrum_and_lead_from_one_to_the_next() -> None:
    ax = panel("plot_spectral_flow")
    branches = drawn(ax, style.VERMILLION) + drawn(ax, style.BLUE)
    assert len(branches) == TOKENS
    at_dots = [np.interp(np.degrees(THETAS), line.get_xdata(), line.get_ydata()) for line in branches]
    np.testing.assert_allclose(np.sort(np.repeat(np.stack(at_dots, axis=1), 2, axis=1)), cycle_spectra(), atol=1e-3)
    ends = [(line.get_ydata()[0], line.get_ydata()[-1]) for line in branches]
    for (_, end), (start, _) in zip(ends, ends[1:] + ends[:1], strict=True):
        assert end == pytest.approx(start)
    assert ends[0][0] == 0  # k = 0: a parallel field where the holonomy is the identity


def test_the_lowest_branch_of_the_spectral_flow_stands_out() -> None:
    ax = panel("plot_spectral_flow")
    (first,) = drawn(ax, style.VERMILLION)
    assert all(first.get_linewidth() > line.get_linewidth() for line in drawn(ax, style.BLUE))
    looks = {label: handle.get_color() for label, handle in legend(ax).items()}
    assert looks == {"k = 0": style.VERMILLION, "k > 0": style.BLUE, "numerical": "black"}
    assert list(ax.get_xticks()) == [0, 90, 180, 270, 360]
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().y0 >= ax.bbox.y1  # above the panel, which is full


# --- the sphere ---------------------------------------------------------------------------------------------------


def test_sphere_clusters_are_drawn_over_rank_with_their_levels() -> None:
    ax = panel("plot_sphere_spectrum")
    values, start = sphere(), 0
    levels = drawn(ax, "black")
    clusters = [line for line in ax.lines if line not in levels]
    assert len(levels) == len(clusters) == len(LEVELS)
    for (level, size), line, dots in zip(LEVELS.items(), levels, clusters, strict=True):
        np.testing.assert_array_equal(dots.get_xdata(), np.arange(start, start + size) + 1)
        np.testing.assert_array_equal(dots.get_ydata(), values[start : start + size])
        assert dots.get_linestyle() == "None"
        assert list(line.get_ydata()) == [level, level]
        assert list(line.get_xdata()) == [start + 0.5, start + size + 0.5]
        start += size
    assert list(ax.get_yticks()) == list(LEVELS)


def test_sphere_clusters_differ_in_colour_and_shape_and_are_named_in_their_colour() -> None:
    ax = panel("plot_sphere_spectrum")
    clusters = [line for line in ax.lines if line not in drawn(ax, "black")]
    assert len({line.get_color() for line in clusters}) == len({line.get_marker() for line in clusters}) == 4
    names = ["6 fields at 1", "10 fields at 5", "14 fields at 11", "18 fields at 19"]
    assert [text.get_text() for text in ax.texts] == names
    ax.figure.canvas.draw()
    assert_apart(list(ax.texts))
    for text, dots in zip(ax.texts, clusters, strict=True):
        assert text.get_color() == dots.get_color()
        points = ax.transData.transform(np.column_stack([dots.get_xdata(), dots.get_ydata()]))
        assert not any(box(text).contains(x, y) for x, y in points), text.get_text()


def test_sphere_values_that_do_not_fill_the_levels_are_refused() -> None:
    _, ax = plt.subplots()
    with pytest.raises(ValueError):
        plots_theory.plot_sphere_spectrum(ax, sphere()[:-1], LEVELS)
