r"""The spectrum of a layer's generator as metrics: a smoothed density and the ends.

The operator is :math:`I - \frac1{2s}(P + P^*)`: additive reversibilisation in the measure of
`cwlib.measures.choose_measure` (stationary if W is irreducible, uniform under causal attention, T5), fibres with the
identity metric, transports divided by their scale s (see `cwlib.laplacian.scale`). For a connection Laplacian up to
scale all eigenvalues lie in [0, 2] (T4 c).
"""

from weakref import WeakKeyDictionary

import numpy as np

from cwlib.laplacian import scale
from cwlib.spectra import SpectralDensity, additive, walk_operator
from cwlib.spectra import spectral_density as quadrature
from cwlib.walk import ConnectionWalk

STEPS = 30  #: of the stochastic Lanczos quadrature
ENTRIES = 400_000  #: of all its random probes together: the error of a probe falls as the operator grows
WIDTH = 0.1  #: standard deviation of the smoothing kernel, in units of the eigenvalue
GRID = np.round(np.linspace(-1, 3, 41), 2)  #: where the density is reported

_KNOWN: "WeakKeyDictionary[ConnectionWalk, tuple[float, SpectralDensity]]" = WeakKeyDictionary()


def _spectrum(walk: ConnectionWalk) -> tuple[float, SpectralDensity]:
    """The scale of the transports and the spectral measure of 1/2 (P + P*), remembered while the walk lives."""
    if walk not in _KNOWN:
        probes = min(max(round(ENTRIES / (walk.n_src * walk.d_model)), 2), 4)
        _KNOWN[walk] = scale(walk), quadrature(additive(walk_operator(walk)), probes, STEPS)
    return _KNOWN[walk]


def _smoothed(walk: ConnectionWalk) -> tuple[np.ndarray, np.ndarray]:
    """The density of the generator on the grid and its error; NaN where all transports vanish."""
    s, found = _spectrum(walk)
    if not s > 0:
        return np.full(len(GRID), np.nan), np.full(len(GRID), np.nan)
    density, error = found.smooth(s * (1 - GRID), s * WIDTH)
    return density * s, error * s


def spectral_density(walk: ConnectionWalk) -> np.ndarray:
    r"""Density of the eigenvalues of :math:`I - \frac1{2s}(P + P^*)` at ``at``, smoothed with a Gaussian of width 0.1.

    By stochastic Lanczos quadrature; 2 to 4 probes, 30 steps.
    """
    return _smoothed(walk)[0]


def spectral_density_error(walk: ConnectionWalk) -> np.ndarray:
    """Estimated error of the spectral density, one standard deviation."""
    return _smoothed(walk)[1]


def spectrum_lowest(walk: ConnectionWalk) -> float:
    r"""Lowest eigenvalue of :math:`I - \frac1{2s}(P + P^*)` that Lanczos iteration finds; >= 0 by T4 (c)."""
    s, found = _spectrum(walk)
    return float(1 - found.nodes.max() / s) if s > 0 else np.nan


def spectrum_highest(walk: ConnectionWalk) -> float:
    r"""Highest eigenvalue of :math:`I - \frac1{2s}(P + P^*)` that Lanczos iteration finds; <= 2 by T4 (c)."""
    s, found = _spectrum(walk)
    return float(1 - found.nodes.min() / s) if s > 0 else np.nan
