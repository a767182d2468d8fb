"""What the study says: the evidence by scale (C3), the verdicts, and every table that is derived from its rows."""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import linregress
from scipy.stats import t as student_t

from cwlib.claims import CLAIMS, MIXED, NOT_SUPPORTED, NOT_TESTABLE, SUPPORTED, Evidence, combine, evidence_table
from cwlib.effects import effects_table, rounding_table
from cwlib.hub import known
from cwlib.statistics import estimate, thirds
from cwlib.study import load

MINIMUM_MODELS = 3  #: checkpoints of one kind without which a trend over scale is not tested
DIGITS = 6  #: of the derived tables as they are written


def _gains(table: pd.DataFrame, line: pd.Series, evidence: Evidence) -> pd.Series:
    """Per passage, the gain that a line of evidence speaks of."""
    rows = table[(table["checkpoint"] == line["checkpoint"]) & (table["metric"] == evidence.metric)]
    rows = rows[rows["gauge"] == evidence.gauge]
    null, _, seed = line["null"].partition(" ")
    own, other = (
        thirds(rows[(rows["source"] == source) & (rows["seed"] == int(number or 0))])["change"]
        for source, number in (("trained", 0), (null, seed))
    )
    return evidence.direction * (own[own.index.isin(other.index)] - other)


def model_groups(evidence: pd.DataFrame) -> dict[str, list[str]]:
    """Checkpoints to compare over scale: those of one kind, and those of one family if two or more.

    Families are those of the catalogue and of the list of the hub.
    """
    kinds = evidence.drop_duplicates("checkpoint").groupby("kind")["checkpoint"].apply(list).to_dict()
    families: dict[str, list[str]] = {}
    facts = {name: known(name) for name in evidence["checkpoint"].unique()}
    for name, item in sorted((pair for pair in facts.items() if pair[1]), key=lambda pair: pair[1].parameters):
        families.setdefault(item.family, []).append(name)
    return kinds | {f"family {family}": names for family, names in families.items() if len(names) > 1}


def scale_table(table: pd.DataFrame, evidence: pd.DataFrame, parameters: dict[str, int]) -> pd.DataFrame:
    r"""Does the evidence for C1 and C2 grow with scale? One line per group of checkpoints and metric (C3).

    The strength of a checkpoint is its gain over the null that is hardest to beat; its slope over
    :math:`\log_{10}` parameters is a least-squares fit.

    Parameters
    ----------
    table : pandas.DataFrame
        From `cwlib.study.load`.
    evidence : pandas.DataFrame
        From `evidence_table`.
    parameters : dict of str to int
        Parameter count by checkpoint.

    Returns
    -------
    pandas.DataFrame
        Columns group (encoder, decoder, or a family), rests on (C1 or C2), metric, models; slope; low, high: 95%
        t-interval over models, NaN with fewer than three; text_low, text_high: interval of the slope over the passages
        that all of them share, models taken as given; verdict.
    """
    rules = {(c.id, e.metric): e for c in CLAIMS.values() for e in c.evidence}
    lines = []
    for group, names in model_groups(evidence).items():
        for (claim, metric), mine in evidence[evidence["checkpoint"].isin(names)].groupby(["claim", "metric"]):
            size = np.log10([parameters[c] for c in mine["checkpoint"]])
            line = {"group": group, "rests on": claim, "metric": metric, "models": len(mine)}
            if len(mine) < 2 or (mine["null"] == "").any() or np.ptp(size) == 0:
                blank = dict.fromkeys(("slope", "low", "high", "text_low", "text_high"), np.nan)
                lines.append(line | blank | {"verdict": NOT_TESTABLE})
                continue
            gains = pd.concat([_gains(table, m, rules[claim, metric]) for _, m in mine.iterrows()], axis=1).dropna()
            centred = size - size.mean()
            by_text = estimate(pd.Series(gains.to_numpy() @ centred / (centred @ centred), index=gains.index))
            low = high = np.nan
            verdict = NOT_TESTABLE
            fit = linregress(size, mine["gain"])
            if len(mine) >= MINIMUM_MODELS:
                margin = fit.stderr * student_t.ppf(0.975, len(mine) - 2)
                low, high = fit.slope - margin, fit.slope + margin
                verdict = SUPPORTED if low > 0 else MIXED if fit.slope > 0 else NOT_SUPPORTED
            bounds = {"low": low, "high": high, "text_low": by_text.low, "text_high": by_text.high}
            lines.append(line | {"slope": fit.slope} | bounds | {"verdict": verdict})
    return pd.DataFrame(lines)


def verdict_table(evidence: pd.DataFrame, scale: pd.DataFrame) -> pd.DataFrame:
    """Verdicts: one line per claim, one column per checkpoint, and the overall verdict.

    Parameters
    ----------
    evidence, scale : pandas.DataFrame
        From `evidence_table` and `scale_table`.
    """
    order = evidence[["kind", "checkpoint"]].drop_duplicates()
    order = order.sort_values(["kind", "checkpoint"], ascending=[False, True])  # encoders first
    lines = []
    for claim in CLAIMS.values():
        per = {}
        for kind, checkpoint in order.itertuples(index=False):
            if claim.id == "C3":
                parts = scale[scale["group"] == kind]
            else:
                parts = evidence[(evidence["claim"] == claim.id) & (evidence["checkpoint"] == checkpoint)]
            per[checkpoint] = combine(parts["verdict"])
        lines.append({"claim": claim.id, "statement": claim.statement, **per, "overall": combine(per.values())})
    return pd.DataFrame(lines).set_index("claim")


def markdown(verdicts: pd.DataFrame) -> str:
    """The verdict table in Markdown, as README quotes it.

    Parameters
    ----------
    verdicts : pandas.DataFrame
        From `verdict_table`.
    """
    frame = verdicts.reset_index()
    lines = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parameter_counts(folder: str | Path) -> dict[str, int]:
    """Parameters of each checkpoint of the study in a folder."""
    cells = pd.read_csv(Path(folder) / "cells.csv")
    return cells.groupby("checkpoint")["parameters"].first().to_dict()


def derived_tables(folder: str | Path) -> dict[str, pd.DataFrame]:
    """Every table that follows from the rows of a study: effects, rounding, evidence, scale, verdicts.

    Parameters
    ----------
    folder : path
        As in `cwlib.study.load`.

    Returns
    -------
    dict of str to pandas.DataFrame
        By the name of its file, numbers rounded as they are written.
    """
    table = load(folder)
    evidence = evidence_table(table)
    scale = scale_table(table, evidence, parameter_counts(folder))
    tables = {
        "effects": effects_table(table),
        "rounding": rounding_table(table),
        "evidence": evidence,
        "scale": scale,
        "verdicts": verdict_table(evidence, scale).reset_index(),
    }
    return {name: frame.round(DIGITS) for name, frame in tables.items()}


def supported_lines(evidence: pd.DataFrame) -> str:
    """What is supported, as a list in Markdown with the numbers behind it, as README quotes it.

    Parameters
    ----------
    evidence : pandas.DataFrame
        From `cwlib.claims.evidence_table`.
    """
    return "\n".join(
        f"- {line.claim}, `{line.metric}` of `{line.checkpoint}`: {line.expected} by {line.change:.3f} from the first "
        f"third of layers to the last, {line.gain:.3f} more than in the null that comes closest"
        for line in evidence[evidence["verdict"] == SUPPORTED].itertuples()
    )
