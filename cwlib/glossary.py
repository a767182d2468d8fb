"""What every column, symbol and metric of a study's tables means."""

import pandas as pd

from cwlib.metrics import METRICS
from cwlib.statistics import WEIGHTS

COLUMNS = {
    "checkpoint": "catalogue name, folder or hub id",
    "source": "trained, or a null: gaussian (O_h, V_h drawn at random), init (random initialisation), "
    "shuffled (attention dealt out to the heads anew), sinkless (decoders: token 0 removed); or trained weights "
    "rounded to a format of gguf: q4_1, q5_0",
    "seed": "seed of a null; 0 for trained weights",
    "passage": f"text of the corpus; {WEIGHTS}: the value depends on weights only",
    "layer": "attention layer from 0; a step is filed under the later of its two layers",
    "metric": "name of the quantity; the rows below explain each",
    "gauge": "token walk looked at: mean (what attends) or norm (what flows); empty: does not matter",
    "at": "where a metric that is a function is evaluated (the eigenvalue of a spectral density); else empty",
    "value": "the metric's value, averaged over heads where it is one per head",
    "key": "cells.csv: content address of a cell; a new one means that it is computed again",
    "stored_as": "cells.csv: precision of the weights on disk; they are expanded to dtype before the model runs",
    "digest": "cells.csv: hash of the cell's rows in study.csv, which tells whether they are whole",
    "sha256, parameters, dtype, device, threads, torch, transformers": "cells.csv: of the weights, and with what a "
    "cell was computed",
    "revision": "cells.csv: commit of a checkpoint from the hub; else empty",
    "late, change": "effects.csv: trained mean over the last third of layers, and that minus the first third's; "
    "null_late, null_change: of the null",
    "late_gap, change_gap": "effects.csv: trained minus null; low, high: 95% interval over shared passages; effect: "
    "mean over standard deviation between passages",
    "size, shift": "rounding.csv: mean absolute trained value, and mean absolute difference that rounding "
    "makes; late_shift, change_shift: of the last third, and of the change, with sign; null_distance: a yardstick",
    "rho": "evidence.csv: Spearman correlation of the metric with depth; low, high: 95% bootstrap over passages; it "
    "and what follows are positive where the claim has it so",
    "passages": "evidence.csv: number of passages resampled; 0: depends on weights only, no interval",
    "sinkless, gain, gap": "evidence.csv: change without token 0; change minus that of the null that is hardest to "
    "beat, named by null; late layers minus those of the hardest null; each with low and high",
    "verdict, fragile": "evidence.csv: by the rules in cwlib/claims.py; whether rounding could change it, where shift "
    "is what it may move a change by",
    "group, slope": "scale.csv: checkpoints compared, and the slope of the gain over log10 parameters; low, high: 95% "
    "over models; text_low, text_high: over passages",
    "H, d, d_head, n_kv": "heads, dimension of a token's vector, of a head, number of value heads",
    "s, r": "singular values of a map, and the largest rank that its shape allows",
    "T_h, T, Omega_ij": "O_h V_h of head h; their sum over heads; transport of the edge j -> i",
    "W, pi": "token walk (row-stochastic); measure of tokens, stationary if W is irreducible, else uniform",
    "f_ij, K, P": "flow pi_i W_ij; the layer as a matrix of blocks K_ij = W_ij Omega_ij, and as an operator",
    "|.|_M, K*": "norm and adjoint in l2(pi): tokens weighted by pi, fibres with the identity metric",
}


def glossary() -> pd.DataFrame:
    """What every column, symbol and metric means."""
    tables = ("cells.csv", "effects.csv", "rounding.csv", "evidence.csv", "scale.csv")
    kinds = {n: "column" if n.isidentifier() or text.startswith(tables) else "symbol" for n, text in COLUMNS.items()}
    columns = [(name, kinds[name], "", text) for name, text in COLUMNS.items()]
    metrics = [(m.name, m.about, m.range, m.description) for m in METRICS.values()]
    return pd.DataFrame(columns + metrics, columns=["name", "about", "range", "meaning"])
