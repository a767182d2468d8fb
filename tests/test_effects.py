"""Distances from the nulls and shifts by rounding, on tables small enough to check by hand."""

import numpy as np
import pandas as pd
import pytest

from cwlib.effects import effects_table, rounding_table

T_1 = 12.7062047  # Student's t at 97.5% with one degree of freedom

Values = dict[str, list[float]]  # by passage: one per layer


def quantity(source: str, values: Values, seed: int = 0, **columns: str) -> pd.DataFrame:
    """Rows of one quantity under one set of weights, shuffled."""
    found = [(passage, layer, v) for passage, line in values.items() for layer, v in enumerate(line)]
    head = {"checkpoint": "model", "metric": "m", "gauge": "", "at": "", "source": source, "seed": seed} | columns
    frame = pd.DataFrame(found, columns=["passage", "layer", "value"]).astype({"value": float}).assign(**head)
    return frame.sample(frac=1.0, random_state=0)


TRAINED = quantity("trained", {"a": [1, 2, 5], "b": [1, 1, 2], "c": [0, 0, 100]})
INIT = quantity("init", {"b": [0, 5, 0.5], "a": [1, 9, 2]}, seed=2)


def test_effects_are_differences_on_the_passages_of_the_null() -> None:
    [line] = effects_table(pd.concat([TRAINED, INIT])).to_dict("records")
    assert [line[c] for c in ("checkpoint", "metric", "gauge", "null", "seed")] == ["model", "m", "", "init", 2]
    # late: 5, 2 against 2, 0.5; change: 4, 1 against 1, 0.5
    assert (line["late"], line["null_late"], line["late_gap"]) == pytest.approx((3.5, 1.25, 2.25))
    assert (line["change"], line["null_change"], line["change_gap"]) == pytest.approx((2.5, 0.75, 1.75))
    # gaps of 3 and 1.5 have the standard deviation 1.5 / sqrt 2 and the standard error 0.75; of 3 and 0.5: 1.25
    assert (line["late_low"], line["late_high"]) == pytest.approx((2.25 - 0.75 * T_1, 2.25 + 0.75 * T_1))
    assert (line["change_low"], line["change_high"]) == pytest.approx((1.75 - 1.25 * T_1, 1.75 + 1.25 * T_1))
    assert line["late_effect"] == pytest.approx(2.25 / 1.5 * 2**0.5)
    assert line["change_effect"] == pytest.approx(1.75 / 2.5 * 2**0.5)


def test_effects_of_weights_have_no_interval_and_no_standardised_size() -> None:
    table = pd.concat([quantity("trained", {"-": [1, 2, 5]}), quantity("gaussian", {"-": [4, 4, 4]})])
    [line] = effects_table(table).to_dict("records")
    assert (line["late_gap"], line["late_low"], line["late_high"]) == (1, 1, 1)
    assert (line["change_gap"], line["change_low"], line["change_high"]) == (4, 4, 4)
    assert np.isnan([line["late_effect"], line["change_effect"]]).all()


def test_effects_have_a_line_for_each_null_of_each_quantity() -> None:
    flow = {"metric": "n", "gauge": "norm"}
    other = {"checkpoint": "another"}
    table = pd.concat(
        [
            TRAINED,
            *(quantity("init", {"a": [1, 2, 3]}, seed) for seed in (0, 1)),
            quantity("sinkless", {"a": [1, 2, 3]}),
            quantity("q4_1", {"a": [1, 2, 3]}),  # no null
            quantity("trained", {"a": [7, 8, 9]}, **flow),
            quantity("gaussian", {"a": [1, 1, 1]}, **flow),
            quantity("trained", {"a": [0, 0, 3]}, **other),
            quantity("shuffled", {"a": [0, 0, 1]}, **other),
            quantity("init", {"a": [1, 2, 3]}, metric="trained nowhere"),
            quantity("trained", {"a": [1, 2, 3]}, metric="t2_residual"),
            quantity("init", {"a": [1, 2, 3]}, metric="t2_residual"),
            quantity("trained", {"a": [1, 2, 3]}, metric="density", at="0.5"),
            quantity("gaussian", {"a": [1, 2, 3]}, metric="density", at="0.5"),
        ]
    )
    found = effects_table(table).set_index(["checkpoint", "metric", "gauge", "null", "seed"])["late_gap"]
    assert found.to_dict() == {
        ("model", "m", "", "init", 0): 2,
        ("model", "m", "", "init", 1): 2,
        ("model", "m", "", "sinkless", 0): 2,
        ("model", "n", "norm", "gaussian", 0): 8,
        ("another", "m", "", "shuffled", 0): 2,
    }


ROUNDED = quantity("q5_0", {"b": [1.5, 1, 3], "c": [0, 0, 97], "a": [1, 2.5, 4]})


def test_rounding_shifts_are_taken_passage_by_passage_and_layer_by_layer() -> None:
    gaussian = quantity("gaussian", {"a": [2, 2, 2], "c": [0, -6, 70]})
    [line] = rounding_table(pd.concat([TRAINED, ROUNDED, gaussian, INIT])).to_dict("records")
    assert [line[c] for c in ("checkpoint", "metric", "gauge", "scheme")] == ["model", "m", "", "q5_0"]
    assert line["size"] == pytest.approx((1 + 2 + 5 + 1 + 1 + 2 + 100) / 9)
    assert line["shift"] == pytest.approx((0.5 + 1 + 0.5 + 1 + 3) / 9)
    # a: late -1, change -1; b: late 1, change 0.5; c: both -3
    assert line["late_shift"] == pytest.approx(-1)
    assert line["change_shift"] == pytest.approx(-3.5 / 3)
    # on the passages of the null
    assert line["null_distance"] == pytest.approx((1 + 0 + 3 + 0 + 6 + 30) / 6)


def test_sizes_and_shifts_do_not_cancel_between_layers() -> None:
    table = [quantity("trained", {"a": [-1, 0, 1]}), quantity("q4_1", {"a": [-1.5, 0, 1.5]})]
    [line] = rounding_table(pd.concat([*table, quantity("gaussian", {"a": [0, 0, 0]})])).to_dict("records")
    assert (line["size"], line["shift"]) == pytest.approx((2 / 3, 1 / 3))
    assert (line["late_shift"], line["change_shift"]) == pytest.approx((0.5, 1.0))
    assert line["null_distance"] == pytest.approx(2 / 3)


def test_random_initialisation_is_the_yardstick_where_gaussian_maps_change_nothing() -> None:
    init = quantity("init", {"a": [0, 0, 1]})
    [line] = rounding_table(pd.concat([TRAINED, ROUNDED, init, INIT])).to_dict("records")
    assert line["null_distance"] == pytest.approx((1 + 2 + 4) / 3)  # of seed 0


def test_rounding_has_a_line_for_each_scheme_of_the_checkpoints_of_the_control() -> None:
    null = quantity("init", {"a": [0, 0, 0]})
    table = pd.concat(
        [
            *(TRAINED, null, ROUNDED, quantity("q4_1", {"a": [1, 2, 5], "b": [1, 1, 2], "c": [0, 0, 100]})),
            *(frame.assign(checkpoint="not in the control") for frame in (TRAINED, null)),
            *(frame.assign(metric="density", at="0.5") for frame in (TRAINED, null, ROUNDED)),
        ]
    )
    found = rounding_table(table)
    assert found[["checkpoint", "metric", "scheme"]].to_numpy().tolist() == [
        ["model", "m", "q4_1"], ["model", "m", "q5_0"],
    ]  # fmt: skip
    assert found.set_index("scheme").loc["q4_1", ["shift", "late_shift", "change_shift"]].tolist() == [0, 0, 0]


def test_without_nulls_or_control_the_tables_are_empty() -> None:
    assert effects_table(TRAINED).empty and rounding_table(pd.concat([TRAINED, INIT])).empty
