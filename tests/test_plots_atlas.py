"""The table of conditions shows every defect of the atlas in its cell, and a rate is drawn with its slope."""

from collections.abc import Callable, Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.text import Text
from test_plots import (
    assert_apart,
    assert_draws_on_its_axes_alone,
    assert_inside_the_figure,
    assert_leaves_what_it_is_given_alone,
    drawn_texts,
)

from cwlib import plots_atlas, style
from cwlib.atlas_pair import CONDITIONS, ROUNDING

VERDICTS = ("not stochastic", "stochastic walk", "not nonnegative and not stochastic")
KINDS = (0.0, 1e-12, ROUNDING, 2e-8, 0.25, 12.34, 100.4, np.nan)  # of cells


def atlas(systems: int = 30) -> pd.DataFrame:
    """A table of the atlas with all kinds of cells in every column, its verdicts mixed, and names of many lengths."""
    rows = []
    for n in range(systems):
        cells = {condition: KINDS[(n + 3 * k) % len(KINDS)] for k, condition in enumerate(CONDITIONS)}
        name = f"System {n} " + "with a long name that ends here"[: 2 * n % 31]
        verdict = VERDICTS[1 if n % 3 else n % 2 * 2]
        rows.append({"system": name.strip(), "paper": "0000.00000"} | cells | {"verdict": verdict, "remark": "x"})
    return pd.DataFrame(rows).set_index("system")


def rate(power: float | None = -0.5, growth: float | None = None) -> pd.DataFrame:
    """A power of sizes, or an exponential of layers; and a series that is constant."""
    x = np.array([1024.0, 64.0, 256.0]) if growth is None else np.arange(41.0)
    y = 3 * x**power if growth is None else np.where(x < 20, 2.0, 2 * np.exp(growth * (x - 20)))
    one = pd.DataFrame({"x": x, "y": y, "series": "first"})
    return pd.concat([one, one.assign(y=0.7, series="second")], ignore_index=True)


PANELS: dict[str, Callable[[Axes], Axes]] = {
    "plot_conditions": lambda ax: plots_atlas.plot_conditions(ax, atlas()),
    "plot_curve": lambda ax: plots_atlas.plot_curve(ax, rate(), "features", "error"),
}


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """The house style, and no figure left open."""
    with plt.rc_context(style.rc("text")):
        yield
    plt.close("all")


def test_every_panel_is_tried_here() -> None:
    assert set(PANELS) == {name for name in vars(plots_atlas) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_draws_on_its_axes_alone(name: str) -> None:
    assert_draws_on_its_axes_alone(PANELS[name])


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_leaves_its_table_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_leaves_what_it_is_given_alone(monkeypatch, plots_atlas, name, PANELS[name])


# --- conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defect", "text"),
    [
        *((0.25, "0.25"), (0.5, "0.50"), (0.0093, "0.0093"), (6.0, "6.0"), (9.96, "10"), (12.34, "12"), (99.7, "100")),
        *((1284.0, "1300"), (15400.0, "1.5e4"), (2e-8, "2.0e-8"), (1.23e-12, "1.2e-12"), (1e-8, "1.0e-8")),
    ],
)
def test_a_defect_is_written_by_two_digits(defect: float, text: str) -> None:
    assert plots_atlas.two_digits(defect) == text
    assert float(text) == pytest.approx(defect, rel=0.05)


def rows(ax: Axes) -> dict[float, str]:
    return dict(zip(ax.get_yticks(), (label.get_text() for label in ax.get_yticklabels()), strict=True))


def cells(ax: Axes) -> dict[tuple[str, str], Line2D | Text]:
    """What is drawn for each system and condition, once."""
    columns = dict(zip(ax.get_xticks(), (label.get_text() for label in ax.get_xticklabels()), strict=True))
    marks = [(line.get_xydata()[0], line) for line in ax.lines if line.get_marker() in ("o", "_")]
    digits = [(text.get_position(), text) for text in ax.texts if text.get_text()[0].isdigit()]
    found = {}
    for (x, y), artist in marks + digits:
        key = rows(ax)[y], columns[x]
        assert key not in found
        found[key] = artist
    return found


def test_each_cell_says_whether_the_condition_holds_or_by_how_much_it_fails() -> None:
    _, ax = plt.subplots()
    table = atlas()
    found = cells(plots_atlas.plot_conditions(ax, table))
    assert set(found) == {(system, condition) for system in table.index for condition in CONDITIONS}
    for (system, condition), artist in found.items():
        defect = table.loc[system, condition]
        if np.isnan(defect):
            assert artist.get_marker() == "_" and to_rgba(artist.get_color()) == to_rgba(style.NULL["color"])
        elif defect <= ROUNDING:
            assert artist.get_marker() == "o" and to_rgba(artist.get_markerfacecolor()) == to_rgba(style.BLUE)
        else:
            assert artist.get_text() == plots_atlas.two_digits(defect)
            assert to_rgba(artist.get_color()) == to_rgba(style.VERMILLION)


def test_systems_stand_below_their_verdict_and_stochastic_walks_first() -> None:
    _, ax = plt.subplots()
    table = atlas()
    plots_atlas.plot_conditions(ax, table)
    headings = {text.get_position()[1]: text.get_text() for text in ax.texts if text.get_style() == "italic"}
    counts = table["verdict"].value_counts()
    assert [headings[y].rpartition(" (")[0] for y in sorted(headings)] == sorted(
        VERDICTS, key=lambda verdict: (verdict != "stochastic walk", -counts[verdict])
    )
    for y, heading in headings.items():
        verdict, _, number = heading.rpartition(" (")
        below = [rows(ax)[y + 1 + k] for k in range(counts[verdict])]
        assert below == list(table.index[table["verdict"] == verdict]) and number == f"{counts[verdict]})"
    assert ax.get_ylim()[0] > max(rows(ax)) and ax.get_ylim()[1] < min(headings)  # downwards


def test_columns_are_named_above_and_parted_between_walk_and_transport() -> None:
    _, ax = plt.subplots()
    plots_atlas.plot_conditions(ax, atlas())
    ax.figure.canvas.draw()
    labels = [tick.label2 for tick in ax.xaxis.get_major_ticks()]
    assert [label.get_text() for label in labels] == list(CONDITIONS) and all(label.get_visible() for label in labels)
    parts = {text.get_text(): text.xy[0] for text in ax.texts if hasattr(text, "xy")}
    assert parts == {"walk W": 1.0, "transport Ω": 4.5}
    (across,) = {x for collection in ax.collections for path in collection.get_segments() for x in path[:, 0]}
    assert across == CONDITIONS.index("reversible") + 0.5
    assert "1.0e-8" in ax.get_xlabel() and "dash: undefined" in ax.get_xlabel()


@pytest.mark.parametrize("systems", [3, 30, 45])
def test_the_figure_of_conditions_is_as_tall_as_it_has_to_be(systems: int) -> None:
    fig = plots_atlas.conditions_figure(atlas(systems))
    (ax,) = fig.axes
    assert fig.get_figwidth() == style.WIDTHS["text"]
    drawn = drawn_texts(fig)
    above = [tick.label2 for tick in ax.xaxis.get_major_ticks()]
    assert_apart([*drawn, *above, *ax.texts])
    assert_inside_the_figure(fig)
    pitch = np.diff(ax.transData.transform([(0, 1), (0, 2)])[:, 1])[0] / fig.dpi
    assert 0.14 < abs(pitch) < 0.21  # inches from row to row; 7 points are 0.1


# --- rates ----------------------------------------------------------------------------------------------------------


def drawn(ax: Axes) -> dict[str, Line2D]:
    return {line.get_label().split(",")[0]: line for line in ax.lines}


def test_a_power_law_is_a_straight_line_with_its_slope() -> None:
    _, ax = plt.subplots()
    plots_atlas.plot_curve(ax, rate(-0.5), "features", "error")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in ax.lines] == ["first, slope −0.50", "second"]
    np.testing.assert_allclose(drawn(ax)["first"].get_xydata(), [(x, 3 * x**-0.5) for x in (64, 256, 1024)])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["64", "256", "1024"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("features", "error")


def test_an_exponential_has_the_rate_of_its_second_half() -> None:
    _, ax = plt.subplots()
    plots_atlas.plot_curve(ax, rate(growth=-0.25), "layer", "distance")
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log")
    assert [line.get_label() for line in ax.lines] == ["first, rate −0.25", "second"]


def test_what_is_not_straight_has_no_slope() -> None:
    bent = rate(growth=-0.25).assign(x=lambda frame: frame["x"] + 1)
    _, ax = plt.subplots()
    plots_atlas.plot_curve(ax, bent, "x", "y")
    assert ax.get_xscale() == "log"
    assert [line.get_label() for line in ax.lines] == ["first", "second"]


def test_steps_are_written_as_fractions_and_zeros_left_out() -> None:
    curve = pd.DataFrame({"x": [1 / 4, 1 / 8, 1 / 16, 0.3], "y": [4.0, 2.0, 1.0, 0.0], "series": "error"})
    _, ax = plt.subplots()
    plots_atlas.plot_curve(ax, curve, "step", "error")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1/16", "1/8", "1/4", "0.3"]
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [(1 / 16, 1), (1 / 8, 2), (1 / 4, 4)])
    assert ax.lines[0].get_label() == "error, slope 1.00"


@pytest.mark.parametrize("curve", [rate(), rate(growth=-0.25)], ids=["power", "exponential"])
@pytest.mark.parametrize("width", style.WIDTHS)
def test_a_curve_is_legible(curve: pd.DataFrame, width: str) -> None:
    fig, ax = plt.subplots(figsize=(style.WIDTHS[width], 2.6))
    plots_atlas.plot_curve(ax, curve, "layer", "distance")
    assert_apart([*drawn_texts(fig), *ax.get_legend().get_texts()])
    assert_inside_the_figure(fig)


def test_series_differ_in_colour_dashes_and_marker_and_are_not_cut_short() -> None:
    looks = plots_atlas.LINES
    for key in ("color", "linestyle", "marker"):
        assert len({look[key] for look in looks}) == len(looks)
    one = rate()[:3]
    many = [one.assign(series=f"series {n}") for n in range(len(looks) + 1)]
    _, ax = plt.subplots()
    plots_atlas.plot_curve(ax, pd.concat(many[:-1]), "x", "y")
    assert [line.get_marker() for line in ax.lines] == [look["marker"] for look in looks]
    with pytest.raises(ValueError, match="expected at most 6 series, got 7"):
        plots_atlas.plot_curve(ax, pd.concat(many), "x", "y")
