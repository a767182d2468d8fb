"""Atlas: attention and the energies whose gradient it is, or is not."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from scipy.integrate import solve_ivp

from cwlib.atlas_pair import Pair, Placed, system
from cwlib.checks import Check, compare


def _attention(query: np.ndarray, memory: np.ndarray, beta: float) -> np.ndarray:
    """Rows softmax_j(beta q_i m_j), of complex tokens too."""
    rows = []
    for q in query:
        exponentials = np.exp([beta * q @ m for m in memory])
        rows.append(exponentials / exponentials.sum())
    return np.array(rows)


def _derivative(function: Callable, x: np.ndarray, along: np.ndarray) -> np.ndarray | np.generic:
    """Im f(x + i h v) / h: the derivative along v up to rounding, since nothing is subtracted."""
    return np.imag(function(x + 1e-30j * along)) / 1e-30


@system(
    name="Hopfield attention",
    paper="2506.11043",
    walk=r"$W = \mathrm{softmax}(\beta X X^\top)$",
    transport=r"$\Omega_{ij} = I + \beta (x_j - m_i) x_i^\top$, on loops $+ \beta C_i / W_{ii}$",
    remark="The derivative of attention. Attention descends an energy of queries; to be a gradient in all tokens, "
    "messages would have to return to keys.",
)
def hopfield(seed: int) -> Placed:
    """How x_i <- sum_j A_ij x_j responds to a change of tokens; its energy after Hopfield (Farooq 2025).

    The energy sum_i |q_i|^2/2 - log(sum_j exp(beta q_i m_j))/beta has attention as its gradient step in q; none of the
    paper's other nonlinear terms is placed. With mean m_i and covariance C_i of the tokens under A_i, the response is
    sum_j A_ij (I + beta (x_j - m_i) x_i^T) dx_j + beta C_i dx_i.
    """
    tokens, d_model, beta, rng = 5, 3, 0.7, np.random.default_rng(seed)
    x, change = rng.standard_normal((2, tokens, d_model))
    axes = np.eye(x.size).reshape(x.size, tokens, d_model)

    def attend(query: np.ndarray, memory: np.ndarray) -> np.ndarray:
        return _attention(query, memory, beta) @ memory

    def energy(query: np.ndarray, memory: np.ndarray) -> np.generic:
        return sum(q @ q / 2 - np.log(sum(np.exp(beta * q @ m) for m in memory)) / beta for q in query)

    def both_ways(x: np.ndarray) -> np.ndarray:
        weights = _attention(x, x, beta)
        return weights @ x + weights.T @ x

    output = _derivative(lambda y: attend(y, y), x, change)
    in_queries = np.array([_derivative(lambda y: energy(y, x), x, axis) for axis in axes]).reshape(x.shape)
    in_all = np.array([_derivative(lambda y: energy(y, y), x, axis) for axis in axes]).reshape(x.shape)
    hessian = torch.from_numpy(np.array([_derivative(both_ways, x, axis).ravel() for axis in axes]))
    queries, energies = x, []
    for _ in range(20):
        energies.append(energy(queries, x))
        queries = attend(queries, x)

    field = torch.from_numpy(x)
    weight = (beta * field @ field.T).softmax(-1)
    apart = field[None] - (weight @ field)[:, None]  # x_j - m_i at [i, j]
    maps = torch.eye(d_model, dtype=torch.float64) + beta * apart[..., None] * field[:, None, None]
    covariance = torch.einsum("ij,ija,ijb->iab", weight, apart, apart)
    maps[range(tokens), range(tokens)] += beta * covariance / weight.diagonal()[:, None, None]
    pair = Pair(weight, maps)
    loops = pair.blocks()[range(tokens), range(tokens)]  # symmetric, if K is self-adjoint in whatever measure
    title, rise = "Hopfield attention: ", float(np.diff(energies).max(initial=0.0))
    steps = torch.from_numpy(np.stack([x - in_queries, x - in_all]))
    found = torch.from_numpy(np.stack([attend(x, x), both_ways(x)]))
    checks = (
        compare(f"{title}attention is the gradient step in the queries", ("q - dE/dq", steps[0]), ("A X", found[0])),
        Check(f"{title}with memories held, the energy falls", "largest rise", "0", rise, 1e-12),
        compare(f"{title}the gradient step in all tokens", ("X - dE/dX", steps[1]), ("A X + A^T X", found[1])),
        compare(f"{title}its tangent map is self-adjoint", ("K", hessian), ("K^T", hessian.T)),
        compare(f"{title}attention's is not", ("K_ii", loops), ("K_ii^T", loops.mT), holds=False),
    )
    return Placed(pair, torch.from_numpy(change), torch.from_numpy(output), None, checks)


@system(
    name="Attention on the sphere",
    paper="2312.10794",
    walk=r"$W = \mathrm{softmax}(\beta X X^\top)$",
    transport=r"$\Omega_{ij} = I - x_i x_i^\top$",
    remark="Transports project on the tangent space where they arrive. An energy grows, and at last all tokens meet.",
)
def sphere(seed: int) -> Placed:
    """The flow dx_i/dt = P_i sum_j A_ij x_j on the unit sphere, P_i = I - x_i x_i^T (Geshkovski et al. 2023).

    The interaction energy E = sum_ij exp(beta x_i x_j) / (2 beta n^2) grows at rate sum_i Z_i |dx_i/dt|^2 / n^2 with
    Z_i the softmax's denominators. Without these, P_i sum_j exp(beta x_i x_j) x_j is n^2 times the gradient of E.
    """
    tokens, d_model, rng = 5, 6, np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))  # n <= d: almost surely in one open hemisphere
    x /= np.linalg.norm(x, axis=1, keepdims=True)

    def velocity(x: np.ndarray, beta: float) -> np.ndarray:
        pulled = _attention(x, x, beta) @ x
        return np.array([y - (x_i @ y) * x_i for x_i, y in zip(x, pulled, strict=True)])

    def energy(x: np.ndarray, beta: float) -> np.generic:
        return np.sum([np.exp(beta * a @ b) for a in x for b in x]) / (2 * beta * tokens**2)

    times, rows, rises = np.linspace(0, 25, 251), [], []
    for beta in (1.0, 4.0):

        def flat(_: float, state: np.ndarray, beta: float = beta) -> np.ndarray:
            return velocity(state.reshape(x.shape), beta).ravel()

        states = solve_ivp(flat, (0, times[-1]), x.ravel(), "DOP853", times, rtol=1e-10, atol=1e-13).y.T
        path = states.reshape(-1, *x.shape)
        rises.extend(np.diff([energy(y, beta) for y in path]))
        rows += [(t, np.linalg.norm(y - y.mean(0)), rf"$\beta$ = {beta:g}") for t, y in zip(times, path, strict=True)]
    curve = pd.DataFrame(rows, columns=["x", "y", "series"]).query("y > 1e-9")
    late = curve[(curve["series"] == rows[0][2]) & curve["y"].between(1e-7, 1e-3)]
    rate = float(np.polyfit(late["x"], np.log(late["y"]), 1)[0])
    beta, output = 1.0, velocity(x, 1.0)
    kernel = np.exp(beta * x @ x.T)
    growth = torch.tensor(_derivative(lambda y: energy(y, beta), x, output))
    speeds = torch.tensor((kernel.sum(1) * (output**2).sum(1)).sum() / tokens**2)

    field = torch.from_numpy(x)
    weight = (beta * field @ field.T).softmax(-1)
    projections = torch.eye(d_model, dtype=torch.float64) - field[:, :, None] * field[:, None]
    pair = Pair(weight, projections[:, None].expand(-1, tokens, -1, -1))
    title = "Attention on the sphere: "
    checks = (
        compare(f"{title}the energy grows with the speeds", ("dE/dt", growth), ("sum Z_i |v_i|^2 / n^2", speeds)),
        Check(f"{title}the energy never falls", "largest fall", "0", max(0.0, -float(min(rises))), 1e-9),
        Check(f"{title}all tokens meet", "rate of the distance, beta = 1", "-1", abs(rate + 1), 0.05),
    )
    return Placed(pair, field, torch.from_numpy(output), None, checks, curve)
