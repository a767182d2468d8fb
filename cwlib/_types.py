"""Axis names, tensor aliases and the index convention, stated once.

An edge ``j -> i`` carries a message *from* the source token ``j`` *to* the destination token ``i``. Every
pair index in the package is therefore ordered ``(dst, src) = (i, j)``, as the rows and columns of an
attention matrix are. Vectors are columns: ``y_i = sum_j W_ij Omega_ij x_j``. In code a *field* stores the
token vectors as rows, so that ``x_i`` is ``field[i]``.

Axis names
----------
head      query heads h = 0..H-1
kv_head   value heads; under grouped-query attention ``groups`` consecutive query heads share one
dst, src  destination and source tokens i, j
d_model   dimension of a fibre (the residual stream)
d_head    dimension of a head
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

Attention = Float[Tensor, "head dst src"]  #: A^h, row-stochastic
Value = Float[Tensor, "kv_head d_head d_model"]  #: V_h = W_V^h
Output = Float[Tensor, "head d_model d_head"]  #: O_h = W_O^h
Field = Float[Tensor, "src d_model"]  #: X, one row per source token
Section = Float[Tensor, "dst d_model"]  #: a field over the destination tokens
Walk = Float[Tensor, "dst src"]  #: W, nonnegative
HeadGram = Float[Tensor, "head other"]  #: inner products between the heads of one layer, or of two

Gauge = Literal["mean", "sum", "norm"]  #: how K is split into W and Omega (T2)
GAUGES: tuple[Gauge, ...] = ("mean", "sum", "norm")
