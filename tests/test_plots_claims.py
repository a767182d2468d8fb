"""Every panel of the claims draws what its tables say, counted as the claim has it, with words that can be read."""

import itertools
from collections.abc import Callable, Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from test_plots import (
    CHECKPOINTS,
    ORDER,
    assert_apart,
    assert_draws_on_its_axes_alone,
    assert_inside_the_figure,
    assert_leaves_what_it_is_given_alone,
    box,
    drawn_texts,
)

from cwlib import claims, plots, plots_claims, style

WORDS = ("supported", "mixed", "not supported", "not testable here")
EVIDENCE = {  # metric: claim, token walk, direction
    "depth_step": ("C1", "mean", "falls"),
    "spectral_step": ("C1", "mean", "falls"),
    "operator_cosine": ("C1", "", "rises"),
    "head_isometry": ("C2", "", "rises"),
    "edge_isometry": ("C2", "", "rises"),
    "norm_cv": ("C2", "", "falls"),
    "angle_correlation": ("C2", "", "rises"),
}
PARAMETERS = dict(zip(CHECKPOINTS, (23e6, 110e6, 135e6, 268e6, 494e6, 1540e6), strict=True))
PARAMETERS = {name: int(size) for name, size in PARAMETERS.items()}
NULLS = {
    "gaussian": "Gaussian O, V",
    "init": "random initialisation",
    "shuffled": "heads shuffled",
    "sinkless": "token 0 removed",
}


def change(name: str, metric: str) -> float:
    """In the claimed direction; of either sign, and no two alike."""
    return 0.03 * list(CHECKPOINTS).index(name) - 0.07 + 0.002 * list(EVIDENCE).index(metric)


def gain(name: str, metric: str) -> float:
    return change(name, metric) ** 2 * 5 - 0.02


def evidence(claim: str | None = None) -> pd.DataFrame:
    """In no order; every verdict occurs, with no regard to the numbers."""
    lines = [
        {
            "claim": of,
            "checkpoint": name,
            "kind": kind,
            "metric": metric,
            "gauge": gauge,
            "expected": expected,
            "change": change(name, metric),
            "change_low": change(name, metric) - 0.011,
            "change_high": change(name, metric) + 0.013,
            "gain": gain(name, metric),
            "gain_low": gain(name, metric) - 0.005,
            "gain_high": gain(name, metric) + 0.007,
            "verdict": WORDS[(n + m) % 4],
        }
        for n, (name, kind) in enumerate(CHECKPOINTS.items())
        for m, (metric, (of, gauge, expected)) in enumerate(EVIDENCE.items())
        if claim in (None, of)
    ]
    return pd.DataFrame(lines).sample(frac=1, random_state=1)


def null_change(name: str, metric: str, null: str, seed: int) -> float:
    """As measured, not as claimed."""
    return 0.01 * list(NULLS).index(null) - 0.003 * seed + 0.5 * change(name, metric) + 0.004


def nulls(name: str) -> list[tuple[str, int]]:
    removed = [("sinkless", 0)] if CHECKPOINTS[name] == "decoder" else []
    return [("gaussian", 0), ("init", 0), ("init", 1), ("init", 2), ("shuffled", 0), *removed]


def effects() -> pd.DataFrame:
    """In no order, among the same metrics on another token walk."""
    lines = [
        (name, metric, walk, null, seed, null_change(name, metric, null, seed) if walk == gauge else 99.0)
        for name in CHECKPOINTS
        for metric, (_, gauge, _) in EVIDENCE.items()
        for walk in (gauge, "norm")
        for null, seed in nulls(name)
    ]
    columns = ["checkpoint", "metric", "gauge", "null", "seed", "null_change"]
    return pd.DataFrame(lines, columns=columns).sample(frac=1, random_state=2)


def fit(kind: str, metric: str) -> np.ndarray:
    """Slope and intercept of the gain over log10 parameters."""
    names = [name for name in CHECKPOINTS if CHECKPOINTS[name] == kind]
    return np.polyfit(np.log10([PARAMETERS[name] for name in names]), [gain(name, metric) for name in names], 1)


def scale() -> pd.DataFrame:
    """Slopes of both kinds, and of a family that is no kind; encoders are two, so theirs is no trend."""
    lines = [(kind, metric, fit(kind, metric)[0]) for kind in ("encoder", "decoder") for metric in EVIDENCE]
    lines += [("family qwen2", metric, 99.0) for metric in EVIDENCE]
    return pd.DataFrame(lines, columns=["group", "metric", "slope"]).sample(frac=1, random_state=3)


ROUNDED = ("minilm-l6", "mpnet-base")
MEASURED = tuple(label for label in plots.LABELS if not label.endswith("_spectrum"))  # as many as in notebook 11


def share(name: str, metric: str, scheme: str) -> float:
    """Below one, as in the study; the order of metrics is that of no list, and not the same for all schemes."""
    place = (7 * MEASURED.index(metric)) % len(MEASURED)
    return 10 ** (
        -2.3 + 2 * place / len(MEASURED) - 0.15 * ROUNDED.index(name) - (0.4 + 0.5 * (place % 2)) * (scheme == "q5_0")
    )


def rounding() -> pd.DataFrame:
    """In no order; steps and sinks on two token walks, of which one is drawn."""
    lines = []
    for name, metric, scheme in itertools.product(ROUNDED, MEASURED, ("q4_1", "q5_0")):
        distance = 0.1 + 0.01 * MEASURED.index(metric)
        gauges = ("mean", "norm") if metric in ("depth_step", "sink_mass") else ("",)
        for gauge in gauges:
            shift = distance * share(name, metric, scheme) * (50.0 if gauge == "norm" else 1.0)
            lines.append((name, metric, gauge, scheme, shift, distance))
    columns = ["checkpoint", "metric", "gauge", "scheme", "shift", "null_distance"]
    return pd.DataFrame(lines, columns=columns).sample(frac=1, random_state=4)


def verdicts() -> pd.DataFrame:
    """Claims and metrics down, checkpoints across, as notebook 11 draws them; every verdict in every column."""
    rows = [f"{claim}  {metric}" for metric, (claim, *_) in EVIDENCE.items()] + ["C3  scale"]
    words = {name: [WORDS[(row + n) % 4] for row in range(len(rows))] for n, name in enumerate([*ORDER, "overall"])}
    return pd.DataFrame(words, index=rows)


PANELS: dict[str, Callable[[Axes], Axes]] = {
    "plot_changes": lambda ax: plots_claims.plot_changes(ax, evidence(), effects(), "depth_step"),
    "plot_scale": lambda ax: plots_claims.plot_scale(ax, evidence(), scale(), PARAMETERS, "depth_step"),
    "plot_rounding": lambda ax: plots_claims.plot_rounding(ax, rounding()),
    "plot_verdicts": lambda ax: plots_claims.plot_verdicts(ax, verdicts()),
}
# width and height in inches as the notebooks print them
SIZES = {"plot_rounding": (6.8, 5.2), "plot_verdicts": (6.8, 3.2)}


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """The house style, and no figure left open."""
    with plt.rc_context(style.rc("text")):
        yield
    plt.close("all")


def panel(name: str) -> Axes:
    _, ax = plt.subplots(figsize=SIZES.get(name, (3.4, 2.6)))
    return PANELS[name](ax)


def marks(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if line.get_marker() not in ("", "None", None)]


def test_every_panel_is_tried_here() -> None:
    assert set(PANELS) == {name for name in vars(plots_claims) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_draws_on_its_axes_alone(name: str) -> None:
    assert_draws_on_its_axes_alone(PANELS[name])


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_leaves_its_tables_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_leaves_what_it_is_given_alone(monkeypatch, plots_claims, name, PANELS[name])


# --- changes over depth -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", EVIDENCE)
def test_changes_are_drawn_as_claimed_with_their_intervals(metric: str) -> None:
    _, ax = plt.subplots()
    plots_claims.plot_changes(ax, evidence(), effects(), metric)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(reversed(ORDER))  # encoders on top
    for y, name in zip(ax.get_yticks(), reversed(ORDER), strict=True):
        look = style.checkpoint(name, CHECKPOINTS[name])
        mine = [line for line in ax.lines if to_rgba(line.get_color()) == to_rgba(look["color"])]
        (bar,) = (line for line in mine if len(line.get_xdata()) == 2)
        (mark,) = (line for line in mine if len(line.get_xdata()) == 1)
        middle = change(name, metric)
        np.testing.assert_allclose(bar.get_xdata(), [middle - 0.011, middle + 0.013])
        np.testing.assert_allclose(mark.get_xdata(), [middle])
        assert {*bar.get_ydata(), *mark.get_ydata()} == {y}
        assert mark.get_marker() == look["marker"]
    assert any(np.all(np.asarray(line.get_xdata()) == 0) for line in ax.lines)
    assert ax.get_title() == f"{metric}\n({EVIDENCE[metric][2]} by the claim)"


@pytest.mark.parametrize("metric", EVIDENCE)
def test_only_a_supported_change_has_a_filled_marker(metric: str) -> None:
    _, ax = plt.subplots()
    plots_claims.plot_changes(ax, evidence(), effects(), metric)
    words = evidence().query("metric == @metric").set_index("checkpoint")["verdict"]
    assert len(set(words)) == 4
    filled = set()
    for y, name in zip(ax.get_yticks(), reversed(ORDER), strict=True):
        colour = to_rgba(style.checkpoint(name, CHECKPOINTS[name])["color"])
        (mark,) = (m for m in marks(ax) if to_rgba(m.get_color()) == colour and m.get_ydata()[0] == y)
        face = to_rgba(mark.get_markerfacecolor())
        assert face in (colour, to_rgba("white"))
        filled |= {name} if face == colour else set()
    assert filled == set(words[words == "supported"].index)


@pytest.mark.parametrize(("metric", "sign"), [("depth_step", -1), ("norm_cv", -1), ("operator_cosine", 1)])
def test_nulls_are_grey_and_counted_as_the_claim_has_it(metric: str, sign: int) -> None:
    _, ax = plt.subplots()
    plots_claims.plot_changes(ax, evidence(), effects(), metric)
    assert {label for label in ax.get_legend_handles_labels()[1]} == set(NULLS.values())
    shapes = {}
    for y, name in zip(ax.get_yticks(), reversed(ORDER), strict=True):
        found = {}
        for line in marks(ax):
            if line.get_label() in NULLS.values() and line.get_ydata()[0] == y:
                found[line.get_label()] = sorted(line.get_xdata())
                shapes.setdefault(line.get_label(), set()).add(line.get_marker())
                assert len(set(to_rgba(line.get_color())[:3])) == 1
        expected = {}
        for null, seed in nulls(name):
            expected.setdefault(NULLS[null], []).append(sign * null_change(name, metric, null, seed))
        assert found.keys() == expected.keys()
        for label, values in expected.items():
            np.testing.assert_allclose(found[label], sorted(values))
    assert len(set.union(*shapes.values())) == len(shapes) == 4  # one shape each


@pytest.mark.parametrize("claim", ["C1", "C2"])
def test_the_grid_of_changes_has_a_panel_per_metric_and_one_legend(claim: str) -> None:
    table = evidence(claim)
    fig = plots_claims.changes_grid(table, effects())
    metrics = [title.split("\n")[0] for title in (ax.get_title() for ax in fig.axes)]
    assert metrics == list(dict.fromkeys(table["metric"]))
    for ax, metric in zip(fig.axes, metrics, strict=True):
        drawn = {line.get_xdata()[0] for line in marks(ax) if len(line.get_xdata()) == 1}
        assert {change(name, metric) for name in CHECKPOINTS} <= drawn
    assert "right of zero: as claimed" in fig.get_supxlabel()
    (legend,) = fig.legends
    assert {text.get_text() for text in legend.get_texts()} == set(NULLS.values())
    assert fig.get_figwidth() == style.WIDTHS["text"]
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


# --- scale --------------------------------------------------------------------------------------------------------


def fits(ax: Axes) -> list[Line2D]:
    black = [line for line in ax.lines if line.get_color() == "black"]
    return [line for line in black if np.isfinite(line.get_ydata()).any()]


@pytest.mark.parametrize("metric", EVIDENCE)
def test_scale_shows_the_gain_of_each_checkpoint_at_its_size(metric: str) -> None:
    _, ax = plt.subplots()
    plots_claims.plot_scale(ax, evidence(), scale(), PARAMETERS, metric)
    labelled = {line.get_label(): line for line in marks(ax)}
    assert set(labelled) == set(CHECKPOINTS)
    for name, line in labelled.items():
        look = style.checkpoint(name, CHECKPOINTS[name])
        assert (line.get_color(), line.get_marker()) == (look["color"], look["marker"])
        np.testing.assert_allclose(line.get_xydata(), [[PARAMETERS[name], gain(name, metric)]])
        (bar,) = (b for b in ax.lines if b.get_color() == look["color"] and b is not line)
        np.testing.assert_allclose(bar.get_xdata(), [PARAMETERS[name]] * 2)
        np.testing.assert_allclose(bar.get_ydata(), [gain(name, metric) - 0.005, gain(name, metric) + 0.007])
    assert ax.get_xscale() == "log"
    assert any(line.get_color() == style.NULL["color"] and set(line.get_ydata()) == {0} for line in ax.lines)


@pytest.mark.parametrize("metric", EVIDENCE)
def test_scale_draws_the_least_squares_line_through_decoders_alone_as_encoders_are_two(metric: str) -> None:
    _, ax = plt.subplots()
    plots_claims.plot_scale(ax, evidence(), scale(), PARAMETERS, metric)
    (line,) = fits(ax)
    np.testing.assert_allclose(line.get_xdata(), [135e6, 1540e6])  # the smallest and the largest decoder
    np.testing.assert_allclose(line.get_ydata(), np.polyval(fit("decoder", metric), np.log10(line.get_xdata())))


def test_scale_draws_no_line_through_two_decoders() -> None:
    two = evidence()[evidence()["checkpoint"].isin(ORDER[:4])]
    _, ax = plt.subplots()
    plots_claims.plot_scale(ax, two, scale(), PARAMETERS, "depth_step")
    assert len(marks(ax)) == 4
    assert not fits(ax)


def test_scale_draws_a_line_through_three_encoders() -> None:
    third = evidence().query("checkpoint == 'mpnet-base'").assign(checkpoint="bert", gain=0.3)
    sizes = np.log10([PARAMETERS["minilm-l6"], PARAMETERS["mpnet-base"], 340e6])
    gains = [gain("minilm-l6", "depth_step"), gain("mpnet-base", "depth_step"), 0.3]
    slope, start = np.polyfit(sizes, gains, 1)
    slopes = scale()
    slopes.loc[slopes["group"] == "encoder", "slope"] = slope
    _, ax = plt.subplots()
    plots_claims.plot_scale(
        ax, pd.concat([evidence(), third]), slopes, PARAMETERS | {"bert": 340_000_000}, "depth_step"
    )
    by_start = {line.get_xdata()[0]: line for line in fits(ax)}
    assert len(by_start) == 2
    line = by_start[min(by_start)]
    np.testing.assert_allclose(np.log10(line.get_xdata()), sizes[[0, 2]])
    np.testing.assert_allclose(line.get_ydata(), start + slope * sizes[[0, 2]])


def test_the_grid_of_scale_has_a_row_per_claim_and_one_legend() -> None:
    table = evidence()
    fig = plots_claims.scale_grid(table, scale(), PARAMETERS)
    axes = np.array(fig.axes).reshape(2, 4)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == [f"{c}: gain over\nthe hardest null" for c in ("C1", "C2")]
    for row, claim in zip(axes, ("C1", "C2"), strict=True):
        metrics = list(dict.fromkeys(table[table["claim"] == claim]["metric"]))
        for ax, metric in zip(row, metrics, strict=False):
            assert ax.get_title() == plots.LABELS[metric].replace("\n", " ")
            drawn = {line.get_label(): line.get_ydata()[0] for line in marks(ax)}
            assert drawn == pytest.approx({name: gain(name, metric) for name in CHECKPOINTS})
    assert not axes[0, 3].axison and not axes[0, 3].has_data()
    assert fig.get_supxlabel() == "parameters"
    (legend,) = fig.legends
    assert {text.get_text() for text in legend.get_texts()} == set(CHECKPOINTS)
    assert fig.get_figwidth() == style.WIDTHS["text"]
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


# --- rounding -----------------------------------------------------------------------------------------------------


def test_rounding_is_drawn_as_a_share_of_the_distance_from_the_null() -> None:
    ax = panel("plot_rounding")
    rows = [label.get_text() for label in ax.get_yticklabels()]
    for name, scheme in itertools.product(ROUNDED, ("q4_1", "q5_0")):
        (line,) = (line for line in ax.lines if line.get_label() == f"{name}, {scheme.upper()}")
        drawn = {rows[int(y)]: x for x, y in line.get_xydata()}
        expected = {plots.LABELS[metric].replace("\n", " "): share(name, metric, scheme) for metric in MEASURED}
        assert len(line.get_xdata()) == len(MEASURED)  # one token walk
        assert drawn == pytest.approx(expected)
        colour = to_rgba(style.checkpoint(name, "encoder")["color"])
        assert to_rgba(line.get_color()) == colour
        assert to_rgba(line.get_markerfacecolor()) == (colour if scheme == "q4_1" else to_rgba("white"))
    assert ax.get_xscale() == "log"
    assert any(set(line.get_xdata()) == {1} for line in ax.lines)
    assert ax.get_xlabel() == "shift by rounding / distance between trained weights and null"


def test_rounding_is_ordered_by_the_largest_share_with_the_smallest_on_top() -> None:
    ax = panel("plot_rounding")
    worst = {metric: max(share(name, metric, "q4_1") for name in ROUNDED) for metric in MEASURED}
    expected = [plots.LABELS[metric].replace("\n", " ") for metric in sorted(worst, key=worst.get)]
    heights = ax.transData.transform([(0.1, y) for y in ax.get_yticks()])[:, 1]
    labels = np.array([label.get_text() for label in ax.get_yticklabels()])
    assert labels[np.argsort(-heights)].tolist() == expected


def test_rounding_of_some_metrics_leaves_the_others_out() -> None:
    _, ax = plt.subplots()
    chosen = ["edge_isometry", "depth_step"]
    plots_claims.plot_rounding(ax, rounding(), chosen)
    assert {label.get_text() for label in ax.get_yticklabels()} == {"edge isometry", "depth step (total variation)"}
    for line in marks(ax):
        name, scheme = line.get_label().split(", ")
        np.testing.assert_allclose(
            sorted(line.get_xdata()), sorted(share(name, metric, scheme.lower()) for metric in chosen)
        )


def test_the_legend_of_rounding_covers_neither_a_marker_nor_the_line_at_one() -> None:
    ax = panel("plot_rounding")
    ax.figure.canvas.draw()
    legend = ax.get_legend()
    assert len(legend.get_texts()) == 4
    one = ax.transData.transform((1, 0))[0]
    for text in legend.get_texts():
        assert not box(text).x0 <= one <= box(text).x1, f"the line at one strikes {text.get_text()!r} out"
    frame = legend.get_window_extent()
    for line in marks(ax):
        assert not frame.count_contains(ax.transData.transform(line.get_xydata()))
    assert_apart(drawn_texts(ax.figure))
    assert_inside_the_figure(ax.figure)


# --- verdicts -----------------------------------------------------------------------------------------------------


def test_verdicts_fit_their_cells() -> None:
    ax = panel("plot_verdicts")
    ax.figure.canvas.draw()
    rows, columns = verdicts().shape
    words = [text for text in ax.texts if text.get_text()]
    assert [text.get_text().replace("\n", " ") for text in words] == verdicts().to_numpy().ravel().tolist()
    for text, (row, column) in zip(words, itertools.product(range(rows), range(columns)), strict=True):
        corners = ax.transData.transform([(column, row), (column + 1, row + 1)])
        cell = Bbox([corners.min(0), corners.max(0)])
        inner = box(text)
        assert cell.x0 <= inner.x0 and inner.x1 <= cell.x1, f"{text.get_text()!r} is wider than its cell"
        assert cell.y0 <= inner.y0 and inner.y1 <= cell.y1, f"{text.get_text()!r} is higher than its cell"


def test_verdicts_name_their_rows_and_columns_legibly() -> None:
    ax = panel("plot_verdicts")
    across = ["".join(label.get_text().split("\n")) for label in ax.get_xticklabels()]
    assert across == [*ORDER, "overall"]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(verdicts().index)
    assert_apart(drawn_texts(ax.figure))
    assert_inside_the_figure(ax.figure)


def test_verdicts_of_one_kind_share_a_colour_and_differ_from_the_others() -> None:
    ax = panel("plot_verdicts")
    ax.figure.canvas.draw()
    colours = ax.collections[0].get_facecolors()
    words = verdicts().to_numpy().ravel()
    by_word = {word: {tuple(c) for c, w in zip(colours, words, strict=True) if w == word} for word in WORDS}
    assert by_word == {word: {to_rgba(plots_claims.VERDICT_COLOURS[word])} for word in WORDS}
    assert len(set.union(*by_word.values())) == 4


def test_there_is_a_colour_for_every_verdict_that_the_rules_give() -> None:
    given = {claims.SUPPORTED, claims.MIXED, claims.NOT_SUPPORTED, claims.NOT_TESTABLE}
    assert set(plots_claims.VERDICT_COLOURS) == given


def test_nulls_are_called_the_same_as_over_depth() -> None:
    assert {null: look["label"] for null, look in plots.NULLS.items()} == plots_claims.NULL_NAMES
    assert set(plots_claims.NULL_MARKS) == set(plots.NULLS)
