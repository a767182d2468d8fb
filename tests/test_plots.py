"""Every panel draws what its table says, on the axes it is given, with labels that can be read."""

import ast
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from cwlib import plots, plots_claims, plots_theory, style
from cwlib.metrics import METRICS

CHECKPOINTS = {
    "minilm-l6": "encoder",
    "mpnet-base": "encoder",
    "smollm2-135m": "decoder",
    "gemma3-270m": "decoder",
    "qwen2.5-coder-0.5b": "decoder",
    "qwen2.5-coder-1.5b": "decoder",
}
ORDER = ("minilm-l6", "mpnet-base", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
NARROW = (  # titles of six columns, encoders first
    "minilm-l6\n(encoder)",
    "mpnet-base\n(encoder)",
    "gemma3-270m\n(decoder)",
    "qwen2.5-\ncoder-0.5b\n(decoder)",
    "qwen2.5-\ncoder-1.5b\n(decoder)",
    "smollm2-135m\n(decoder)",
)
LAYERS = 4


def table(metrics: tuple[str, ...], checkpoints: tuple[str, ...] = tuple(CHECKPOINTS), gauge: str = "") -> pd.DataFrame:
    """A study of two passages; trained values are passage + layer, those of the nulls 10 lower."""
    rows = []
    for name, metric, layer in itertools.product(checkpoints, metrics, range(LAYERS)):
        for source, seed, shift in (("trained", 0, 0.0), ("gaussian", 0, -10.0), ("init", 0, -11.0), ("init", 1, -9.0)):
            for n, passage in enumerate(("a", "b")):
                value = layer + 2.0 * n + shift
                rows.append((name, source, seed, passage, layer, metric, gauge, value, CHECKPOINTS[name]))
    columns = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "value", "kind"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.assign(depth=frame["layer"] / (LAYERS - 1))


def residuals() -> pd.DataFrame:
    frame = table(("t2_residual",))
    return frame.assign(value=1e-7 * (1 + frame["layer"]) * (1 + 9 * (frame["passage"] == "b")))


EIGENVALUES = np.array([-0.9, -0.1, 0.0, 1.0, 2.0, 3.0])
DEPTHS = dict(zip(CHECKPOINTS, (3, 5, 4, 6, 7, 2), strict=True))  # layers


def expected_density(name: str, source: str) -> np.ndarray:
    """Layer by eigenvalue; different in every cell, and 0 in the first one."""
    layer, n = np.meshgrid(np.arange(DEPTHS[name]), np.arange(len(EIGENVALUES)), indexing="ij")
    level = list(DEPTHS).index(name) + len(DEPTHS) * (source == "gaussian")
    return np.where(layer + n > 0, 0.1 * level + 0.01 * layer + 0.001 * n + 0.001, 0.0)


def densities() -> pd.DataFrame:
    """Spectral densities of two passages around their mean, in no order, among rows that are none of them."""
    rows = []
    for name, source in itertools.product(DEPTHS, ("trained", "gaussian")):
        for (layer, n), mean in np.ndenumerate(expected_density(name, source)):
            for passage, sign in (("a", -1), ("b", 1)):
                place = (name, source, 0, passage, layer)
                at = f"{EIGENVALUES[n]:.2f}"
                rows.append((*place, "spectral_density", "", at, mean * (1 + 0.5 * sign), CHECKPOINTS[name]))
                rows.append((*place, "spectral_density_error", "", at, 3.0, CHECKPOINTS[name]))
    columns = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "at", "value", "kind"]
    frame = pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=0)
    return frame.assign(depth=frame["layer"] / (frame["checkpoint"].map(DEPTHS) - 1))


RANKS = (1, 2, 10)  # as text, 10 would come before 2


def expected_spectrum(name: str, source: str) -> np.ndarray:
    """Layer by rank; different in every cell, and by an amount that depends on the layer in nulls too."""
    layer, n = np.meshgrid(np.arange(DEPTHS[name]), np.arange(len(RANKS)), indexing="ij")
    level = 1 + list(DEPTHS).index(name) + 10 * ("trained", "gaussian", "init").index(source)
    return level * (1 + layer) / (1 + n + 0.1 * layer)


def spectra() -> pd.DataFrame:
    """Spectra of two passages around their mean, in no order, among rows that are none of them."""
    rows = []
    for name, source in itertools.product(DEPTHS, ("trained", "gaussian", "init")):
        for (layer, n), mean in np.ndenumerate(expected_spectrum(name, source)):
            for passage, factor in (("a", 0.5), ("b", 1.5)):
                place = (name, source, 0, passage, layer)
                rows.append((*place, "schmidt_spectrum", "", str(RANKS[n]), mean * factor, CHECKPOINTS[name]))
                rows.append((*place, "singular_spectrum", "", str(RANKS[n]), 99.0, CHECKPOINTS[name]))
    columns = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "at", "value", "kind"]
    frame = pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=0)
    return frame.assign(depth=frame["layer"] / (frame["checkpoint"].map(DEPTHS) - 1))


def cosine(name: str, source: str, layer: int, earlier: int) -> float:
    level = list(DEPTHS).index(name) + len(DEPTHS) * ("trained", "gaussian", "sinkless").index(source)
    return 0.02 * level + 0.05 * layer - 0.11 * earlier - 0.2


def pairs() -> pd.DataFrame:
    """Each later layer beside each earlier one, in no order; token 0 is removed from decoders alone."""
    rows = []
    for name, source in itertools.product(DEPTHS, ("trained", "gaussian", "sinkless")):
        if source == "sinkless" and CHECKPOINTS[name] == "encoder":
            continue
        for earlier, layer in itertools.combinations(range(DEPTHS[name]), 2):
            place = (name, source, 0, "a", layer)
            value = cosine(name, source, layer, earlier)
            rows.append((*place, "layer_cosines", "", str(earlier), value, CHECKPOINTS[name]))
            rows.append((*place, "schmidt_spectrum", "", str(earlier), 99.0, CHECKPOINTS[name]))
    columns = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "at", "value", "kind"]
    return pd.DataFrame(rows, columns=columns).sample(frac=1, random_state=0)


PANELS: dict[str, Callable[[Axes], Axes]] = {
    "plot_walk": lambda ax: plots.plot_walk(ax, np.tril(np.ones((3, 3))) / [[1], [2], [3]], ["The", "cat", "sat"]),
    "plot_depth": lambda ax: plots.plot_depth(ax, table(("entropy_rate",)), "minilm-l6", "entropy_rate"),
    "plot_density": lambda ax: plots.plot_density(ax, densities(), "minilm-l6", "trained").axes,
    "plot_spectrum": lambda ax: plots.plot_spectrum(ax, spectra(), "mpnet-base", "schmidt_spectrum", "gaussian"),
    "plot_pairs": lambda ax: plots.plot_pairs(ax, pairs(), "mpnet-base", "trained", 0.2).axes,
    "plot_residuals": lambda ax: plots.plot_residuals(ax, residuals(), 1e-5),
    "plot_schmidt": lambda ax: plots.plot_schmidt(ax, {"one": np.array([3.0, 4.0]), "two": np.array([1.0, 0.0])}),
}


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """The house style, and no figure left open."""
    with plt.rc_context(style.rc("text")):
        yield
    plt.close("all")


def panel(name: str, size: tuple[float, float] = (6.8, 3.4)) -> Axes:
    _, ax = plt.subplots(figsize=size)
    return PANELS[name](ax)


def box(text: Text) -> Bbox:
    return text.get_window_extent(text.figure.canvas.get_renderer())


def assert_apart(texts: list[Text]) -> None:
    boxes = [(text.get_text(), box(text)) for text in texts if text.get_text() and text.get_visible()]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} overlaps {other!r}"


def drawn_texts(fig: Figure) -> list[Text]:
    """Titles, labels, ticks in view and legends of a whole figure."""
    fig.canvas.draw()
    found = [*fig.texts, *(text for legend in fig.legends for text in legend.get_texts())]
    for ax in fig.axes:
        if not ax.axison:
            continue
        found += [ax.title, ax.xaxis.label, ax.yaxis.label]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return found


def assert_draws_on_its_axes_alone(draw: Callable[[Axes], Axes]) -> None:
    fig, (ax, other) = plt.subplots(1, 2, figsize=(6.8, 3.4))
    assert draw(ax) is ax
    assert ax.has_data() or ax.collections
    assert not other.has_data() and not other.texts and not other.get_xlabel()
    assert plt.get_fignums() == [fig.number]
    assert fig.axes == [ax, other]  # no colour bar or twin beside them


def assert_leaves_what_it_is_given_alone(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, draw: Callable[[Axes], Axes]
) -> None:
    given = []
    original = getattr(module, name)

    def spy(ax: Axes, *arguments: object) -> object:
        given.append((arguments, copy.deepcopy(arguments)))
        return original(ax, *arguments)

    monkeypatch.setattr(module, name, spy)
    draw(plt.subplots()[1])
    ((after, before),) = given
    for one, other in zip(after, before, strict=True):
        if isinstance(one, pd.DataFrame):
            pd.testing.assert_frame_equal(one, other)
        else:
            np.testing.assert_equal(one, other)


def assert_inside_the_figure(fig: Figure) -> None:
    fig.canvas.draw()
    width, height = fig.get_size_inches()
    tight = fig.get_tightbbox()
    assert tight.x0 >= -0.01 and tight.y0 >= -0.01
    assert tight.x1 <= width + 0.01 and tight.y1 <= height + 0.01


def test_every_panel_is_tried_here() -> None:
    assert set(PANELS) == {name for name in vars(plots) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_draws_on_its_axes_alone(name: str) -> None:
    assert_draws_on_its_axes_alone(PANELS[name])


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_leaves_its_table_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_leaves_what_it_is_given_alone(monkeypatch, plots, name, PANELS[name])


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("plot_walk", "source j", "destination i"),
        ("plot_residuals", "relative depth (0 = first layer, 1 = last)", "relative residual of T2"),
        ("plot_schmidt", "rank", "Schmidt value / |K|"),
    ],
)
def test_axes_are_labelled(name: str, x: str, y: str) -> None:
    ax = panel(name)
    assert (ax.get_xlabel(), ax.get_ylabel()) == (x, y)


@pytest.mark.parametrize("name", ["plot_residuals", "plot_schmidt"])
def test_a_legend_names_every_curve(name: str) -> None:
    ax = panel(name)
    expected = sorted(CHECKPOINTS) if name == "plot_residuals" else ["one", "two"]
    assert sorted(text.get_text() for text in ax.get_legend().get_texts()) == expected


def test_every_metric_of_a_figure_has_a_label_with_its_unit() -> None:
    # densities, pairs and residuals are drawn by panels of their own
    assert set(plots.LABELS) == {m.name for m in METRICS.values() if m.about not in ("exactness", "spectrum", "pairs")}
    assert "(nats)" in plots.LABELS["entropy_rate"]
    assert len(set(plots.LABELS.values())) == len(plots.LABELS)


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_depth_shows_the_mean_of_passages_and_the_nulls_in_grey() -> None:
    ax = panel("plot_depth")
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"trained", "Gaussian O, V", "random initialisation"}
    depth = np.linspace(0, 1, LAYERS)
    for label, shift in (("trained", 1.0), ("Gaussian O, V", -9.0), ("random initialisation", -9.0)):
        np.testing.assert_allclose(lines[label].get_xdata(), depth)
        np.testing.assert_allclose(lines[label].get_ydata(), np.arange(LAYERS) + shift)
    assert to_rgba(lines["trained"].get_color()) == to_rgba(style.checkpoint("minilm-l6", "encoder")["color"])
    nulls = [lines[label] for label in ("Gaussian O, V", "random initialisation")]
    assert {to_rgba(line.get_color()) for line in nulls} == {to_rgba(style.NULL["color"])}
    assert len({line.get_linestyle() for line in nulls}) == 2


def test_depth_takes_one_metric_of_one_checkpoint_in_one_gauge() -> None:
    wanted = table(("sink_mass",), ("minilm-l6", "mpnet-base"), "mean")
    others = [table(("sink_mass",), ("minilm-l6",), "norm"), table(("spectral_gap",), ("minilm-l6",), "mean")]
    disturbing = pd.concat([wanted, *(frame.assign(value=99.0) for frame in others)])
    _, ax = plt.subplots()
    plots.plot_depth(ax, disturbing, "minilm-l6", "sink_mass", "mean")
    (trained,) = (line for line in ax.lines if line.get_label() == "trained")
    np.testing.assert_allclose(trained.get_ydata(), np.arange(LAYERS) + 1.0)


@pytest.mark.parametrize(
    ("checkpoint", "metric", "gauge"),
    [("smollm2-135m", "sink_mass", "mean"), ("minilm-l6", "inverse_defect", "mean"), ("minilm-l6", "sink_mass", "")],
)
def test_depth_says_where_a_metric_is_not_defined(checkpoint: str, metric: str, gauge: str) -> None:
    frame = table(("sink_mass",), ("minilm-l6",), "mean")
    _, ax = plt.subplots()
    assert plots.plot_depth(ax, frame, checkpoint, metric, gauge) is ax
    (text,) = ax.texts
    assert text.get_text() == "not defined"
    assert not ax.lines and not ax.collections
    ax.set(xlim=(5, 9), ylim=(-3, 2))  # as axes that it shares may have
    ax.figure.canvas.draw()
    middle = box(text).get_points().mean(0)
    np.testing.assert_allclose(middle, ax.bbox.get_points().mean(0), atol=3)
    _, defined = plt.subplots()
    plots.plot_depth(defined, frame, "minilm-l6", "sink_mass", "mean")
    assert not defined.texts and defined.lines


def test_density_is_the_mean_of_passages_with_eigenvalues_across_and_layers_down() -> None:
    _, ax = plt.subplots()
    for name, source in itertools.product(DEPTHS, ("trained", "gaussian")):
        mesh = plots.plot_density(ax, densities(), name, source)
        layers = np.arange(DEPTHS[name])
        np.testing.assert_allclose(mesh.get_array(), expected_density(name, source))
        corners = mesh.get_coordinates()  # of the cells: one more than there are cells, along either axis
        centres = (corners[:-1, :-1] + corners[1:, 1:]) / 2
        np.testing.assert_allclose(centres[..., 1], np.broadcast_to(layers[:, None], centres.shape[:2]))
        left, right = corners[0, :-1, 0], corners[0, 1:, 0]
        assert np.all((left < EIGENVALUES) & (right > EIGENVALUES))
        assert ax.get_ylim() == (layers[-1] + 0.5, -0.5)  # the first layer on top, every layer whole
        assert mesh.get_rasterized()  # thousands of cells; as paths they would make the PDF slow


def test_density_marks_where_the_spectrum_of_a_laplacian_lies() -> None:
    ax = panel("plot_density")
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 0], [2, 2]]
    assert {(line.get_linestyle(), line.get_color()) for line in ax.lines} == {("--", "white")}
    assert ax.get_xlim()[0] <= EIGENVALUES[0] and ax.get_xlim()[1] >= EIGENVALUES[-1]
    ax.figure.canvas.draw()
    ticks = [tick for tick in ax.get_yticks() if -0.5 <= tick <= 2.5]
    assert ticks and all(tick == int(tick) for tick in ticks)


def test_density_of_nothing_is_drawn_dark_and_every_panel_has_one_scale() -> None:
    _, ax = plt.subplots()
    trained, null = (plots.plot_density(ax, densities(), "minilm-l6", source) for source in ("trained", "gaussian"))
    cmap = plt.get_cmap("cividis")
    for mesh in (trained, null):
        colours = mesh.to_rgba(mesh.get_array())
        np.testing.assert_allclose(colours[0, 0], cmap(0.0))  # a density of 0, which has no logarithm
        position = np.log(mesh.get_array()[1:] / 1e-4) / np.log(4.0 / 1e-4)
        np.testing.assert_allclose(colours[1:], cmap(position))


def test_residuals_show_the_worst_passage_and_the_bound() -> None:
    ax = panel("plot_residuals")
    curves = {line.get_label(): line.get_ydata() for line in ax.lines}
    for name in CHECKPOINTS:
        np.testing.assert_allclose(curves[name], 1e-6 * (1 + np.arange(LAYERS)))
    assert any(np.allclose(line.get_ydata(), 1e-5) for line in ax.lines)
    assert ax.get_yscale() == "log"
    assert "1e-05" in " ".join(text.get_text() for text in ax.texts)


def test_schmidt_values_are_normalised() -> None:
    ax = panel("plot_schmidt")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.6, 0.8])
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [1, 2])


def test_a_spectrum_is_a_curve_per_layer_coloured_by_depth() -> None:
    ax = panel("plot_spectrum")
    curves = [line for line in ax.lines if line.get_label() == "trained"]
    assert len(curves) == DEPTHS["mpnet-base"]
    for curve, expected in zip(curves, expected_spectrum("mpnet-base", "trained"), strict=True):
        np.testing.assert_allclose(curve.get_xdata(), RANKS)
        np.testing.assert_allclose(curve.get_ydata(), expected)
    lightness = [np.dot(to_rgba(curve.get_color())[:3], (0.3, 0.6, 0.1)) for curve in curves]
    assert np.all(np.diff(lightness) > 0.1)  # the deeper the lighter
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize("null", ["gaussian", "init"])
def test_a_spectrum_is_drawn_with_the_mean_over_layers_of_the_null_in_grey(null: str) -> None:
    _, ax = plt.subplots()
    plots.plot_spectrum(ax, spectra(), "mpnet-base", "schmidt_spectrum", null)
    (law,) = (line for line in ax.lines if line.get_label() != "trained")
    assert law.get_label() == {"gaussian": "Gaussian O, V", "init": "random initialisation"}[null]
    np.testing.assert_allclose(law.get_xdata(), RANKS)
    np.testing.assert_allclose(law.get_ydata(), expected_spectrum("mpnet-base", null).mean(0))
    red, green, blue, _ = to_rgba(law.get_color())
    assert red == green == blue


@pytest.mark.parametrize("source", ["trained", "sinkless"])
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_pairs_are_symmetric_with_an_empty_diagonal(name: str, source: str) -> None:
    _, ax = plt.subplots()
    mesh = plots.plot_pairs(ax, pairs(), name, source, 0.25)
    expected = np.full((DEPTHS[name],) * 2, np.nan)
    for earlier, layer in itertools.combinations(range(DEPTHS[name]), 2):
        expected[layer, earlier] = expected[earlier, layer] = cosine(name, source, layer, earlier)
    np.testing.assert_allclose(np.ma.filled(mesh.get_array(), np.nan), expected)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-0.25, 0.25)
    np.testing.assert_allclose(mesh.to_rgba(0.0)[:3], 1, atol=0.05)  # no colour where layers share nothing
    assert ax.yaxis_inverted() and not ax.xaxis_inverted()
    assert ax.get_aspect() == 1


@pytest.mark.parametrize("name", DEPTHS)
def test_ticks_of_pairs_name_layers_that_there_are_in_the_middle_of_their_cells(name: str) -> None:
    _, ax = plt.subplots()
    corners = plots.plot_pairs(ax, pairs(), name, "trained", 0.25).get_coordinates()
    ax.figure.canvas.draw()
    for axis, edges in ((ax.xaxis, corners[0, :, 0]), (ax.yaxis, corners[:, 0, 1])):
        middles = (edges[1:] + edges[:-1]) / 2
        low, high = sorted(axis.get_view_interval())
        labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        shown = [(at, int(label.get_text())) for at, label in labels if low <= at <= high]
        assert shown
        for at, layer in shown:
            assert layer < DEPTHS[name] and at == pytest.approx(middles[layer])


def test_a_walk_is_drawn_destinations_down() -> None:
    ax = panel("plot_walk")
    mesh = ax.collections[0]
    np.testing.assert_allclose(mesh.get_array().reshape(3, 3)[2], [1 / 3] * 3)
    assert mesh.get_array().reshape(3, 3)[0, 1] == 0
    assert ax.yaxis_inverted()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["The", "cat", "sat"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["The", "cat", "sat"]


# --- can it be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plot_residuals", "plot_walk"])
def test_labels_do_not_overlap(name: str) -> None:
    ax = panel(name, (6.8, 4.5))
    fig = ax.figure
    fig.canvas.draw()
    assert_apart(ax.get_yticklabels())
    assert_apart([text for text in ax.get_xticklabels() if ax.bbox.padded(9).contains(*box(text).get_points()[0])])
    assert_inside_the_figure(fig)


def test_the_grid_has_a_row_per_metric_and_a_column_per_checkpoint() -> None:
    graph, walk = "sink_mass", "edge_isometry"
    frame = pd.concat(
        [
            table((graph,), gauge="mean"),
            table((graph,), gauge="norm").assign(value=99.0),
            table((walk,)),
            residuals(),
        ]
    )
    fig = plots.depth_grid(frame, [graph, walk])
    axes = np.array(fig.axes).reshape(2, 6)
    assert tuple(ax.get_title() for ax in axes[0]) == NARROW
    assert [ax.get_ylabel() for ax in axes[:, 0]] == [plots.LABELS[graph], plots.LABELS[walk]]
    assert "relative depth" in fig.get_supxlabel()
    for ax in axes.flat:
        (trained,) = (line for line in ax.lines if line.get_label() == "trained")
        np.testing.assert_allclose(trained.get_ydata(), np.arange(LAYERS) + 1.0)  # mean gauge by default
    (legend,) = fig.legends
    assert [t.get_text() for t in legend.get_texts()] == ["trained", "Gaussian O, V", "random initialisation"]
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


def test_titles_break_long_names_only_in_more_than_four_columns() -> None:
    names = list(ORDER[2:])
    frame = table(("edge_isometry",))
    wide = plots.depth_grid(frame, ["edge_isometry"], checkpoints=names)
    assert [ax.get_title() for ax in wide.axes] == [f"{name}\n(decoder)" for name in names]
    narrow = plots.depth_grid(frame, ["edge_isometry"], checkpoints=[*names, "minilm-l6"])
    assert [ax.get_title() for ax in narrow.axes] == [*NARROW[2:], NARROW[0]]
    for fig in (wide, narrow):
        assert_apart(drawn_texts(fig))
        assert_inside_the_figure(fig)


def test_the_grid_takes_the_checkpoints_and_the_gauge_it_is_given() -> None:
    frame = pd.concat([table(("sink_mass",), gauge="mean"), table(("sink_mass",), gauge="norm").assign(value=5.0)])
    fig = plots.depth_grid(frame, ["sink_mass"], gauge="norm", checkpoints=["gemma3-270m"])
    (ax,) = fig.axes
    (trained,) = (line for line in ax.lines if line.get_label() == "trained")
    assert set(trained.get_ydata()) == {5.0}


def test_the_grid_says_where_a_metric_is_not_defined_and_draws_the_rest() -> None:
    names = ("minilm-l6", "smollm2-135m")
    frame = pd.concat([table(("sink_mass",), names, "mean"), table(("inverse_defect",), names[:1])])
    fig = plots.depth_grid(frame, ["sink_mass", "inverse_defect"])
    assert [ax.get_title().split("\n")[0] for ax in fig.axes[:2]] == list(names)
    assert [[text.get_text() for text in ax.texts] for ax in fig.axes] == [[], [], [], ["not defined"]]
    assert [len(ax.lines) for ax in fig.axes] == [3, 3, 3, 0]
    assert_inside_the_figure(fig)


def test_the_grid_of_densities_has_the_trained_weights_above_the_null() -> None:
    fig = plots.density_grid(densities())
    *panels, bar = fig.axes
    axes = np.array(panels).reshape(2, 6)
    assert tuple(ax.get_title() for ax in axes[0]) == NARROW
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["trained\nlayer", "Gaussian O, V\nlayer"]
    assert fig.get_supxlabel() == "eigenvalue of the reversibilised generator, transports at scale 1"
    assert bar.get_ylabel() == "density of eigenvalues"
    for row, source in zip(axes, ("trained", "gaussian"), strict=True):
        for ax, name in zip(row, ORDER, strict=True):
            (mesh,) = ax.collections
            np.testing.assert_allclose(mesh.get_array(), expected_density(name, source))
            assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx(bar.get_ylim())  # the bar is right for all
            assert ax.get_ylim() == (DEPTHS[name] - 0.5, -0.5)
    assert fig.get_figwidth() == style.WIDTHS["text"]
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)
    axes[0, 0].set_xlim(-0.5, 1.5)
    assert {ax.get_xlim() for ax in axes.flat} == {(-0.5, 1.5)}


def test_the_grid_of_densities_leaves_out_a_checkpoint_that_has_none() -> None:
    some = densities().query("checkpoint != 'gemma3-270m'")
    fig = plots.density_grid(pd.concat([some, table(("sink_mass",), gauge="mean").assign(at="")]))
    assert len(fig.axes) == 11  # with the colour bar
    titles = tuple(ax.get_title() for ax in fig.axes[:5])
    assert titles == (*NARROW[:2], *NARROW[3:])


def test_the_grid_of_spectra_has_a_panel_per_checkpoint_and_a_bar_of_depth() -> None:
    fig = plots.spectrum_grid(spectra(), "schmidt_spectrum", "rank")
    *axes, bar = fig.axes
    assert tuple(ax.get_title() for ax in axes) == NARROW
    assert [ax.get_ylabel() for ax in axes] == [plots.LABELS["schmidt_spectrum"], *[""] * 5]
    assert (fig.get_supxlabel(), bar.get_ylabel(), bar.get_ylim()) == ("rank", "relative depth", (0, 1))
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gaussian O, V (mean over layers)"]
    solids = next(mesh for mesh in bar.collections if mesh.get_array() is not None)
    for ax, name in zip(axes, ORDER, strict=True):
        *curves, law = ax.lines
        np.testing.assert_allclose([curve.get_ydata() for curve in curves], expected_spectrum(name, "trained"))
        np.testing.assert_allclose(law.get_ydata(), expected_spectrum(name, "gaussian").mean(0))
        depths = np.linspace(0, 1, DEPTHS[name])
        colours = [to_rgba(curve.get_color()) for curve in curves]
        np.testing.assert_allclose(colours, solids.to_rgba(depths), atol=0.02)  # the bar is right for all
        assert ax.get_ylim() == axes[0].get_ylim()
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


def test_the_grid_of_pairs_is_empty_where_token_0_is_not_removed() -> None:
    fig = plots.pairs_grid(pairs(), 0.2)
    *panels, bar = fig.axes
    axes = np.array(panels).reshape(3, 6)
    assert tuple(ax.get_title() for ax in axes[0]) == NARROW
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["trained\nlayer", "Gaussian O, V\nlayer", ""]
    assert [ax.get_ylabel() for ax in axes[2]] == ["", "", "token 0 removed\nlayer", "", "", ""]
    assert (fig.get_supxlabel(), bar.get_ylabel(), bar.get_ylim()) == ("layer", "operator cosine", (-0.2, 0.2))
    for row, source in zip(axes, ("trained", "gaussian", "sinkless"), strict=True):
        for ax, name in zip(row, ORDER, strict=True):
            if source == "sinkless" and CHECKPOINTS[name] == "encoder":
                assert not ax.axison and not ax.has_data() and not ax.texts
                continue
            (mesh,) = ax.collections
            assert mesh.get_array()[1, 0] == pytest.approx(cosine(name, source, 1, 0))
            assert (mesh.norm.vmin, mesh.norm.vmax) == bar.get_ylim()  # the bar is right for all
            assert mesh.cmap.name == next(m for m in bar.collections if m.get_array() is not None).cmap.name
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


def test_the_grid_of_pairs_has_no_row_for_what_was_not_measured() -> None:
    fig = plots.pairs_grid(pairs().query("kind == 'encoder'"))
    assert [ax.get_ylabel() for ax in fig.axes] == ["trained\nlayer", "", "Gaussian O, V\nlayer", "", "operator cosine"]


@pytest.mark.parametrize("module", [plots, plots_claims, plots_theory, style], ids=lambda module: module.__name__)
def test_plots_know_nothing_of_models(module: ModuleType) -> None:
    allowed = {"matplotlib", "numpy", "pandas", "seaborn"} | set(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.module == "cwlib":
            assert {alias.name for alias in node.names} == {"style"}
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed or node.module in ("cwlib.plots", "cwlib.files")
