"""Every panel of the costs draws what its table says, spread and extrapolation included, with words to be read."""

import itertools
from collections.abc import Callable, Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from test_plots import (
    assert_apart,
    assert_draws_on_its_axes_alone,
    assert_inside_the_figure,
    assert_leaves_what_it_is_given_alone,
    drawn_texts,
)

from cwlib import plots_cost, style
from cwlib.cost import COLUMNS, THEORY

# group, case, tokens: way -> how many times cwlib's time, and the part of the work that was timed
HEADS = {
    "cwlib": (1.0, 1.0),
    "dense": (60.0, 0.25),
    "dense, float32": (34.0, 0.25),
    "TransformerLens": (0.6, 1.0),  # faster than cwlib
    "TransformerLens, float64": (6.9, 1.0),
    "TransformerLens, by layer": (0.6, 1.0),
}
COMPARISONS = {
    ("singular values", "GPT-2 small", None): HEADS,
    ("singular values", "GPT-2 medium", None): HEADS,
    ("singular values", "Llama 8B", None): {way: (3 * times, part / 32) for way, (times, part) in HEADS.items()},
    ("edge isometry", "GPT-2 small", 128): {
        "cwlib": (1.0, 1.0),
        "dense": (3200.0, 0.001),
        "batched einsum": (420.0, 0.01),
        "batched einsum, float32": (420.0, 0.01),  # equal, and to be seen apart
    },
    ("Laplacian defect", "4 heads of 64", 32): {"cwlib": (1.0, 1.0), "dense": (140.0, 1.0)},
    ("Schmidt values", "4 heads of 64", 32): {"cwlib": (1.0, 1.0), "dense": (0.5, 1.0)},
}
OWN = 0.4  # seconds, that cancel
LOW, HIGH = 0.9, 1.2  # quartiles over the median
LENGTHS = (128, 512, 1024)
MODELS = ("GPT-2 small", "GPT-2 medium")
CAPTURE = {"cwlib": 1.4, "plain forward": 1.0, "output_attentions": 1.1, "TransformerLens": 1.6}
EXPONENTS = dict(zip(THEORY, (0.5, 1.0, 1.7, 0.4, 2.9, 1.1, 0.01), strict=True))
SIZES = {"tokens": (128, 512, 1024), "d_model": (512, 1024, 4096), "heads": (4, 8, 32), "layers": (3, 6, 24)}


def seconds(group: str, case: str, way: str, value: float, **more: object) -> dict[str, object]:
    spread = {"low": LOW * value, "high": HIGH * value, "repeats": 7}
    return {"group": group, "case": case, "way": way, "value": value, "unit": "s", "sampled": 1.0} | spread | more


def memory(case: str, way: str, tokens: int) -> float:
    """In bytes; a plain forward pass of a short text takes none that would show."""
    share = 0.0 if (way, tokens) == ("plain forward", 128) else 1e5 * (1 + list(CAPTURE).index(way))
    return share * tokens * (1 + MODELS.index(case))


def bench() -> pd.DataFrame:
    """In the columns of a benchmark; sizes in no order, and rows that no panel draws."""
    rows = [{"group": "matrix products", "case": "2048 x 2048", "way": "float64", "value": 4e10, "unit": "1/s"}]
    for (group, case, tokens), ways in COMPARISONS.items():
        for way, (times, part) in ways.items():
            rows.append(seconds(group, case, way, OWN * times, tokens=tokens, sampled=part))
    for work, variable in reversed(THEORY):
        for size in reversed(SIZES[variable]):
            value = 3.0 * size ** EXPONENTS[work, variable]
            rows.append(seconds("growth", f"{work} over {variable}", str(size), value))
    for case, tokens, (way, times) in itertools.product(MODELS, LENGTHS, CAPTURE.items()):
        rows.append(seconds("capture", case, way, OWN * tokens * times, tokens=tokens))
        rows.append({"group": "capture memory", "case": case, "way": way, "tokens": tokens, "unit": "B"})
        rows[-1]["value"] = memory(case, way, tokens)
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


PANELS: dict[str, Callable[[Axes], Axes]] = {
    "plot_ratios": lambda ax: plots_cost.plot_ratios(ax, bench()),
    "plot_capture": lambda ax: plots_cost.plot_capture(ax, bench(), "GPT-2 small", "time"),
    "plot_growth": lambda ax: plots_cost.plot_growth(ax, bench(), "edge_isometry"),
}


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """The house style, and no figure left open."""
    with plt.rc_context(style.rc("text")):
        yield
    plt.close("all")


def marks(ax: Axes) -> list[Line2D]:
    """Lines with markers that hold data: entries of a legend alone hold none."""
    return [line for line in ax.lines if line.get_marker() not in ("", "None", None) and len(line.get_xdata())]


def assert_in_view(ax: Axes) -> None:
    for line in ax.lines:
        for x, y in line.get_xydata() if line in marks(ax) else []:
            assert ax.get_xlim()[0] <= x <= ax.get_xlim()[1] and ax.get_ylim()[0] <= y <= ax.get_ylim()[1]


def bars(ax: Axes) -> dict[tuple[float, ...], list[np.ndarray]]:
    """Vertical bars (x; low, high) by colour."""
    return {
        tuple(collection.get_colors()[0]): [(path[0, 0], *sorted(path[:, 1])) for path in collection.get_segments()]
        for collection in ax.collections
    }


def assert_legible(ax: Axes) -> None:
    assert_apart([*drawn_texts(ax.figure), *ax.get_legend().get_texts(), ax.get_legend().get_title()])
    assert_inside_the_figure(ax.figure)


def test_every_panel_is_tried_here() -> None:
    assert set(PANELS) == {name for name in vars(plots_cost) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_draws_on_its_axes_alone(name: str) -> None:
    assert_draws_on_its_axes_alone(PANELS[name])


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_leaves_its_table_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_leaves_what_it_is_given_alone(monkeypatch, plots_cost, name, PANELS[name])


@pytest.mark.parametrize("together", [*map(set, COMPARISONS.values()), set(CAPTURE)], ids=len)
def test_ways_that_meet_differ_in_colour_and_marker(together: set[str]) -> None:
    looks = [plots_cost.WAYS[way] for way in together]
    assert len({to_rgba(look["color"]) for look in looks}) == len({look["marker"] for look in looks}) == len(looks)
    assert len({look["marker"] for look in plots_cost.WAYS.values()}) == len(plots_cost.WAYS)


# --- ratios -------------------------------------------------------------------------------------------------------


def test_ratios_are_those_of_the_medians_with_the_widest_spread() -> None:
    found = plots_cost.ratios(bench()).set_index(["group", "case", "way"])
    expected = {
        (group, case, way): numbers
        for (group, case, _), ways in COMPARISONS.items()
        for way, numbers in ways.items()
        if way != "cwlib"
    }
    assert list(found.index) == list(expected)
    for key, (times, part) in expected.items():
        line = found.loc[key]
        base = COMPARISONS[next(c for c in COMPARISONS if c[:2] == key[:2])]["cwlib"][0]
        numbers = times / base * np.array([1, LOW / HIGH, HIGH / LOW])
        np.testing.assert_allclose(line[["ratio", "low", "high"]].astype(float), numbers)
        assert line["extrapolated"] == (part < 1)


def rows_of(ax: Axes) -> dict[tuple[str, str], Line2D]:
    """The marker of each row and way."""
    labels = [label.get_text() for label in ax.get_yticklabels()]
    ways = {(to_rgba(look["color"]), look["marker"]): way for way, look in plots_cost.WAYS.items()}
    found = {}
    for mark in marks(ax):
        ((_, y),) = mark.get_xydata()
        row = labels[int(np.abs(ax.get_yticks() - y).argmin())]
        assert abs(ax.get_yticks() - y).min() < 0.4
        key = row, ways[to_rgba(mark.get_color()), mark.get_marker()]
        assert key not in found
        found[key] = mark
    return found


def test_each_way_is_drawn_in_the_row_of_its_comparison_with_its_spread() -> None:
    _, ax = plt.subplots()
    plots_cost.plot_ratios(ax, bench())
    found, table = rows_of(ax), plots_cost.ratios(bench())
    assert len(found) == len(table)
    lines = [line for line in ax.lines if len(line.get_xdata()) == 2]
    for line in table.itertuples():
        row = f"{line.group}\n{line.case}" + ("" if np.isnan(line.tokens) else f", {line.tokens:.0f} tokens")
        mark = found[row, line.way]
        ((x, y),) = mark.get_xydata()
        assert x == pytest.approx(line.ratio)
        (bar,) = (b for b in lines if set(b.get_ydata()) == {y})
        np.testing.assert_allclose(bar.get_xdata(), [line.low, line.high])
        assert to_rgba(bar.get_color()) == to_rgba(mark.get_color())
    assert ax.get_xscale() == "log"
    assert [*np.diff(ax.get_yticks())] == [1] * (len(COMPARISONS) - 1)
    top = ax.get_yticklabels()[int(ax.get_yticks().argmax())].get_text()
    assert top == "singular values\nGPT-2 small"  # in the order of the table


def test_only_what_is_extrapolated_is_hollow() -> None:
    _, ax = plt.subplots()
    plots_cost.plot_ratios(ax, bench())
    hollow = {key for key, mark in rows_of(ax).items() if to_rgba(mark.get_markerfacecolor()) == to_rgba("white")}
    expected = set()
    for (group, case, tokens), ways in COMPARISONS.items():
        row = f"{group}\n{case}" + (f", {tokens} tokens" if tokens else "")
        expected |= {(row, way) for way, (_, part) in ways.items() if part < 1 and way != "cwlib"}
    assert hollow == expected
    for key in rows_of(ax).keys() - hollow:
        mark = rows_of(ax)[key]
        assert to_rgba(mark.get_markerfacecolor()) == to_rgba(mark.get_color())
    assert "hollow: extrapolated" in ax.get_xlabel()


def test_equal_ratios_of_one_comparison_are_drawn_apart() -> None:
    _, ax = plt.subplots(figsize=(style.WIDTHS["text"], 4.4))
    plots_cost.plot_ratios(ax, bench())
    ax.figure.canvas.draw()
    for (one, a), (other, b) in itertools.combinations(rows_of(ax).items(), 2):
        pixels = np.linalg.norm(ax.transData.transform(a.get_xydata()) - ax.transData.transform(b.get_xydata()))
        assert pixels > 7, (one, other)  # a marker is 8 wide


@pytest.mark.parametrize("slower", [1.0, 100.0, 0.001], ids=["both", "all slower", "all faster"])
def test_cwlib_is_a_line_at_one_in_view_with_all_else(slower: float) -> None:
    table = bench()
    other = table["way"] != "cwlib"
    table.loc[other, ["value", "low", "high"]] *= slower
    _, ax = plt.subplots()
    plots_cost.plot_ratios(ax, table)
    assert_in_view(ax)
    (line,) = (line for line in ax.lines if set(line.get_xdata()) == {1})
    assert to_rgba(line.get_color()) == to_rgba(plots_cost.WAYS["cwlib"]["color"])
    low, high = ax.get_xlim()
    assert low < 1 < high


def test_the_legend_of_ratios_names_each_way_once_and_is_legible() -> None:
    _, ax = plt.subplots(figsize=(style.WIDTHS["text"], 4.4))
    plots_cost.plot_ratios(ax, bench())
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    expected = {way for ways in COMPARISONS.values() for way in ways} - {"cwlib"}
    assert sorted(names) == sorted(expected)
    assert_legible(ax)


# --- capture ------------------------------------------------------------------------------------------------------


def test_capture_time_is_counted_in_plain_forward_passes() -> None:
    costs = plots_cost.capture_costs(bench(), "GPT-2 medium", "time")
    assert len(costs) == len(LENGTHS) * len(CAPTURE)
    times = costs["way"].map(CAPTURE)
    np.testing.assert_allclose(costs["value"], times)
    np.testing.assert_allclose(costs["low"], times * LOW / HIGH)
    np.testing.assert_allclose(costs["high"], times * HIGH / LOW)
    assert set(costs["tokens"]) == set(LENGTHS)


def test_capture_memory_is_counted_in_megabytes() -> None:
    costs = plots_cost.capture_costs(bench(), "GPT-2 medium", "memory")
    expected = [memory("GPT-2 medium", line.way, line.tokens) / 1e6 for line in costs.itertuples()]
    np.testing.assert_allclose(costs["value"], expected)
    assert len(costs) == len(LENGTHS) * len(CAPTURE)


@pytest.mark.parametrize(("case", "what"), [("Llama 8B", "time"), ("GPT-2 small", "seconds")])
def test_what_was_not_measured_is_refused(case: str, what: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of \['GPT-2 medium', 'GPT-2 small'\] and 'time' or 'memory'"):
        plots_cost.plot_capture(plt.subplots()[1], bench(), case, what)


@pytest.mark.parametrize("case", MODELS)
def test_capture_time_has_a_line_per_way_above_that_of_the_plain_forward_pass(case: str) -> None:
    _, ax = plt.subplots()
    plots_cost.plot_capture(ax, bench(), case, "time")
    drawn = {line.get_label(): line for line in marks(ax)}
    assert set(drawn) == set(CAPTURE) - {"plain forward"}
    spans = bars(ax)
    for way, line in drawn.items():
        look = plots_cost.WAYS[way]
        assert (line.get_color(), line.get_marker()) == (look["color"], look["marker"])
        np.testing.assert_allclose(line.get_ydata(), CAPTURE[way])
        np.testing.assert_allclose(line.get_xdata(), LENGTHS, rtol=0.15)  # next to each other
        expected = [(x, CAPTURE[way] * LOW / HIGH, CAPTURE[way] * HIGH / LOW) for x in line.get_xdata()]
        np.testing.assert_allclose(spans[to_rgba(look["color"])], expected)
    (plain,) = (line for line in ax.lines if line not in marks(ax))
    assert set(plain.get_ydata()) == {1} and plain.get_color() == plots_cost.WAYS["plain forward"]["color"]
    places = np.array([line.get_xdata() for line in drawn.values()])
    assert all(len(set(column)) == len(drawn) for column in places.T)
    assert_in_view(ax)


@pytest.mark.parametrize("case", MODELS)
def test_capture_memory_starts_at_zero_and_leaves_nothing_out(case: str) -> None:
    _, ax = plt.subplots()
    plots_cost.plot_capture(ax, bench(), case, "memory")
    drawn = {line.get_label(): line for line in marks(ax)}
    assert set(drawn) == set(CAPTURE)
    for way, line in drawn.items():
        expected = [(tokens, memory(case, way, tokens) / 1e6) for tokens in LENGTHS]
        np.testing.assert_allclose(line.get_xydata(), expected)
    assert ax.get_ylim()[0] == 0 and ax.get_yscale() == "linear"
    assert_in_view(ax)
    assert ax.get_ylabel() == "peak memory\nover the weights (MB)"


def test_the_grid_of_capture_has_time_above_memory_and_one_legend() -> None:
    fig = plots_cost.capture_grid(bench())
    axes = np.array(fig.axes).reshape(2, len(MODELS))
    assert [ax.get_title() for ax in axes[0]] == list(MODELS)
    assert [ax.get_ylabel().split("\n")[0] for ax in axes[:, 0]] == ["time /", "peak memory"]
    assert [ax.get_xlabel() for ax in axes[1]] == ["tokens"] * len(MODELS)
    for column, case in enumerate(MODELS):
        (line,) = (line for line in marks(axes[1, column]) if line.get_label() == "TransformerLens")
        assert line.get_ydata()[-1] == pytest.approx(memory(case, "TransformerLens", LENGTHS[-1]) / 1e6)
    for ax in fig.axes:
        assert_in_view(ax)
        assert [label.get_text() for label in ax.get_xticklabels()] == [str(tokens) for tokens in LENGTHS]
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == list(CAPTURE)
    assert fig.get_figwidth() == style.WIDTHS["text"]
    assert_apart(drawn_texts(fig))
    assert_inside_the_figure(fig)


# --- growth -------------------------------------------------------------------------------------------------------

WORKS = list(dict.fromkeys(work for work, _ in THEORY))


def powers(work: str) -> dict[str, float]:
    return {variable: power for (name, variable), power in EXPONENTS.items() if name == work}


@pytest.mark.parametrize("work", WORKS)
def test_growth_is_relative_to_the_smallest_size(work: str) -> None:
    found = plots_cost.growth(bench(), work)
    assert list(dict.fromkeys(found["variable"])) == list(powers(work))
    for variable, power in powers(work).items():
        lines = found[found["variable"] == variable]
        sizes = np.array(SIZES[variable])
        np.testing.assert_array_equal(lines["size"], sizes)
        times = sizes / sizes[0]
        np.testing.assert_allclose(lines["times"], times)
        expected = np.outer(times**power, [1, LOW, HIGH])
        np.testing.assert_allclose(lines[["value", "low", "high"]], expected)


def test_work_that_is_not_bounded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"work: expected one of .*'edge_isometry'.*, got 'edge isometry'"):
        plots_cost.plot_growth(plt.subplots()[1], bench(), "edge isometry")


@pytest.mark.parametrize("work", WORKS)
def test_growth_draws_each_variable_beside_its_bound(work: str) -> None:
    _, ax = plt.subplots()
    plots_cost.plot_growth(ax, bench(), work)
    drawn = {line.get_label().split(":")[0]: line for line in marks(ax)}
    assert set(drawn) == set(powers(work))
    for variable, line in drawn.items():
        power, bound = powers(work)[variable], THEORY[work, variable]
        assert line.get_label() == f"{variable}: {power:.2f} (≤ {bound:g})"
        times = np.array(SIZES[variable]) / SIZES[variable][0]
        np.testing.assert_allclose(line.get_xydata(), np.stack([times, times**power], 1))
        (dotted,) = (b for b in ax.lines if b.get_linestyle() == ":" and b.get_color() == line.get_color())
        np.testing.assert_allclose(dotted.get_xydata(), np.stack([times, times**bound], 1))
        np.testing.assert_allclose(
            bars(ax)[to_rgba(line.get_color())], np.stack([times, LOW * times**power, HIGH * times**power], 1)
        )
    assert len({line.get_marker() for line in drawn.values()}) == len(drawn)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_ylabel().startswith("memory" if work == "capture memory" else "time")
    assert_in_view(ax)


def test_noise_around_a_constant_is_not_drawn_large() -> None:
    _, ax = plt.subplots()
    plots_cost.plot_growth(ax, bench(), "capture memory")
    low, high = ax.get_ylim()
    assert low <= 0.5 and high >= 10


def test_the_grid_of_growth_has_a_panel_per_work_on_one_scale() -> None:
    fig = plots_cost.growth_grid(bench())
    assert [ax.get_legend().get_title().get_text() for ax in fig.axes] == [work.replace("_", " ") for work in WORKS]
    for ax in fig.axes[1:]:
        np.testing.assert_allclose(ax.get_xlim() + ax.get_ylim(), fig.axes[0].get_xlim() + fig.axes[0].get_ylim())
    for ax in fig.axes:
        assert_in_view(ax)
    assert fig.get_figwidth() == style.WIDTHS["text"]
    legends = [ax.get_legend() for ax in fig.axes]
    assert_apart(drawn_texts(fig) + [text for box in legends for text in (box.get_title(), *box.get_texts())])
    assert_inside_the_figure(fig)
