"""Atlas: attention layers as the steps, or as the velocity, of a dynamical system of tokens."""

import numpy as np
import pandas as pd
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import linear_sum_assignment

from cwlib.atlas_pair import Pair, Placed, fitted_slope, system
from cwlib.checks import Check


def _attention(x: np.ndarray, form: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Rows softmax_j(x_i^T B x_j), over the tokens j that i may see."""
    weights = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        seen = range(len(x)) if mask is None else np.flatnonzero(mask[i])
        exponentials = np.exp([x[i] @ form @ x[j] for j in seen])
        weights[i, seen] = exponentials / exponentials.sum()
    return weights


def _spread(x: np.ndarray) -> float:
    """Distance from the nearest consensus, |X - 1 mean|."""
    return float(np.linalg.norm(x - x.mean(0)))


def _on_sphere(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@system(
    name="Masked attention",
    paper="2405.18781",
    walk=r"$W = \mathrm{softmax}(X B X^\top)$ on $|i - j| \leq 1$",
    transport=r"$\Omega_{ij} = V$, orthogonal",
    remark="Over layers tokens meet at the second eigenvalue of the mask's uniform walk: the more local, the slower.",
)
def masked(seed: int) -> Placed:
    """Pure attention X <- A(X) X V^T under masks, layer on layer (Wu et al. 2024): rank collapse.

    As tokens meet, A tends to the uniform walk on the mask, whose second eigenvalue gives the rate. On the full mask
    that eigenvalue is 0, and each layer cubes the distance instead.
    """
    tokens, layers, rng = 6, 200, np.random.default_rng(seed)
    form, drawn, noise = rng.standard_normal((3, tokens, tokens)) / tokens
    value, start = np.linalg.qr(drawn)[0], _on_sphere(rng.standard_normal((tokens, tokens)))
    apart = abs(np.subtract.outer(range(tokens), range(tokens)))
    masks = {"full": apart >= 0, "causal": np.tri(tokens) > 0, "local": apart <= 1}
    rows, checks = [], []
    for key, mask in masks.items():
        x = start
        for layer in range(layers):
            rows.append((layer, _spread(x), key))
            x = _attention(x, form, mask) @ x @ value.T
    curve = pd.DataFrame(rows, columns=["x", "y", "series"]).query("y > 1e-14")
    for key in ("causal", "local"):
        late = curve[(curve["series"] == key) & curve["y"].between(1e-12, 1e-7)]
        rate = np.polyfit(late["x"], np.log(late["y"]), 1)[0]
        second = np.sort(abs(np.linalg.eigvals(masks[key] / masks[key].sum(1, keepdims=True))))[-2]
        name, residual = f"Masked attention: the {key} mask collapses exponentially", abs(float(rate - np.log(second)))
        checks.append(Check(name, "fitted rate", "log of the second eigenvalue of its walk", residual, 5e-3))
    sizes = [2.0**-k for k in range(4, 10)]
    after = [_spread(_attention(x, form) @ x) for x in (start[0] + size * tokens * noise for size in sizes)]
    cube = abs(fitted_slope(sizes, after) - 3)
    checks.append(Check("Masked attention: a full layer cubes the distance", "fitted exponent", "3", cube, 0.1))
    output = _attention(start, form, masks["local"]) @ start @ value.T

    field, hidden = torch.from_numpy(start), ~torch.ones(tokens, tokens).triu(-1).tril(1).bool()
    scores = (field @ torch.from_numpy(form) @ field.T).masked_fill(hidden, -torch.inf)
    pair = Pair.constant(scores.softmax(-1), torch.from_numpy(value))
    return Placed(pair, field, torch.from_numpy(output), None, tuple(checks), curve)


@system(
    name="Attention with LayerNorm",
    paper="2405.18781",
    walk=r"$W = \mathrm{softmax}(X B X^\top)$, causal",
    transport=r"$\Omega_{ij} = V / |\sum_k W_{ik} V x_k|$",
    remark="LayerNorm scales what arrives. Full rank may survive, here as token i lies in the first i + 1 axes of V.",
)
def layernorm(seed: int) -> Placed:
    """X <- LN(A(X) X V^T) with LN(x) = x/|x|, causal, layer on layer (Wu et al. 2024): values decide about collapse.

    The instance that keeps full rank, our own: V = diag(1, 4, 16, ...), token i in the span of the first i + 1 axes.
    Token 0 stays; each later one balances the pull of those before it against growth along an axis of its own.
    """
    tokens, layers, rng = 6, 200, np.random.default_rng(seed)
    form, drawn, noise = rng.standard_normal((3, tokens, tokens)) / tokens
    turn, growing, causal = np.linalg.qr(drawn)[0], np.diag(4.0 ** np.arange(tokens)), np.tri(tokens)
    cone = _on_sphere(abs(rng.standard_normal((tokens, tokens))))  # all tokens in one open hemisphere
    ladder = _on_sphere(np.tril(rng.standard_normal((tokens, tokens))))
    tilted = _on_sphere(ladder + 1e-3 * np.eye(tokens)[:, :1] * noise)  # token 0 a little off its eigenvector

    def run(x: np.ndarray, value: np.ndarray, norm: bool = True) -> list[np.ndarray]:
        path = [x]
        for _ in range(layers):
            x = _attention(x, form, causal) @ x @ value.T
            x = _on_sphere(x) if norm else x
            path.append(x)
        return path

    paths = {"V orthogonal": run(cone, turn), "V growing": run(ladder, growing), "token 0 tilted": run(tilted, growing)}
    kept, bare = paths["V growing"], run(ladder, growing / growing.max(), norm=False)
    rows = [(layer, _spread(x), key) for key, path in paths.items() for layer, x in enumerate(path)]
    curve = pd.DataFrame(rows, columns=["x", "y", "series"]).query("y > 1e-14")
    least, second = np.linalg.svd(kept[-1])[1][-1], np.linalg.svd(paths["token 0 tilted"][-1])[1][1]
    title, moved = "Attention with LayerNorm: ", float(abs(kept[-1] - kept[-2]).max())
    meets, vanishes = _spread(paths["V orthogonal"][-1]), _spread(bare[-1])
    checks = (
        Check(f"{title}with V orthogonal tokens of a hemisphere meet", "distance after 200 layers", "0", meets, 1e-8),
        Check(f"{title}growing V over its norm, no LayerNorm", "distance after 200 layers", "0", vanishes, 1e-8),
        Check(f"{title}growing V has an equilibrium", "X after 200 layers", "X after 199", moved, 1e-12),
        Check(f"{title}growing V keeps full rank", "least singular value", "0", float(least), 0.3, holds=False),
        Check(f"{title}token 0 off the eigenvector: rank one", "second singular value", "0", float(second), 1e-8),
    )

    field, value = torch.from_numpy(ladder), torch.from_numpy(growing)
    scores = field @ torch.from_numpy(form) @ field.T
    weight = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    lengths = torch.linalg.vector_norm(weight @ field @ value.T, dim=1)
    maps = (value / lengths[:, None, None])[:, None].expand(-1, tokens, -1, -1)
    return Placed(Pair(weight, maps), field, torch.from_numpy(kept[1]), None, checks, curve)


@system(
    name="Neural ODE transformer",
    paper="2503.01329",
    walk=r"$W = (I + \epsilon A(t)) / (1 + \epsilon)$",
    transport=r"$\Omega_{ij} = (1 + \epsilon) V(t)$; on loops mixed with $I$",
    remark="A residual layer is a lazy walk times 1 + step, and an explicit Euler step of a flow (T4 g).",
)
def neural_ode(seed: int) -> Placed:
    """The attention part of dX/dt = f(X, t), weights being functions of depth t (Tong et al. 2025), and its layers."""
    tokens, d_model, rng = 5, 4, np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    even, odd = rng.standard_normal((2, 3, d_model, d_model)) / d_model**0.5

    def weights(time: float) -> np.ndarray:  # query, key, value
        return even * np.cos(np.pi * time) + odd * np.sin(np.pi * time)

    def velocity(time: float, x: np.ndarray) -> np.ndarray:
        query, key, value = weights(time)
        return _attention(x, query.T @ key / d_model**0.5) @ x @ value.T

    def layers(count: int, shared: bool) -> np.ndarray:
        here = x
        for layer in range(count):
            here = here + velocity(0.0 if shared else layer / count, here) / count
        return here

    def flat(time: float, state: np.ndarray) -> np.ndarray:
        return velocity(time, state.reshape(x.shape)).ravel()

    end = solve_ivp(flat, (0, 1), x.ravel(), "DOP853", rtol=1e-12, atol=1e-12).y[:, -1].reshape(x.shape)
    rows = []
    for shared, key in ((False, "weights follow depth"), (True, "weights shared")):
        for count in (16, 32, 64, 128, 256):
            rows.append((1 / count, float(np.linalg.norm(layers(count, shared) - end) / np.linalg.norm(end)), key))
    curve = pd.DataFrame(rows, columns=["x", "y", "series"])
    steps, errors = ([row[k] for row in rows if row[2] == "weights follow depth"] for k in (0, 1))
    slope, left = fitted_slope(steps, errors), rows[-1][1]
    title = "Neural ODE transformer: "
    checks = (
        Check(f"{title}layers are explicit Euler", "fitted exponent of the error", "1", abs(slope - 1), 0.1),
        Check(f"{title}shared weights give another flow", "relative error", "0", left, 1e-2, holds=False),
    )
    step, time = 1 / 8, 0.25
    output = x + step * velocity(time, x)

    field, (query, key, value) = torch.from_numpy(x), torch.from_numpy(weights(time))
    attention = ((field @ query.T) @ (field @ key.T).T / d_model**0.5).softmax(-1)
    weight = (torch.eye(tokens) + step * attention) / (1 + step)
    maps = ((1 + step) * value).repeat(tokens, tokens, 1, 1)
    loops = step * attention.diagonal()[:, None, None]
    maps[range(tokens), range(tokens)] = (1 + step) * (torch.eye(d_model) + loops * value) / (1 + loops)
    return Placed(Pair(weight, maps), field, torch.from_numpy(output), None, checks, curve)


@system(
    name="OT-Transformer",
    paper="2501.18793",
    walk=r"$W = \mathrm{softmax}(X B X^\top)$",
    transport=r"$\Omega_{ij} = \omega J$, a turn by $90^\circ$",
    remark="A turning transport costs more than straight paths; values written where nothing is read go straight.",
)
def ot_transformer(seed: int) -> Placed:
    """The flow dX/dt = f(X) of attention, and its transport cost 1/2 int |f(X)|^2 dt (Kan et al. 2025).

    By Jensen's inequality the cost is at least |X_T - X_0|^2 / 2T, with equality iff tokens move straight and at
    constant speed, and that is at least the cost of the best matching of the two clouds of tokens.
    """
    tokens, d_model, rng = 5, 6, np.random.default_rng(seed)
    x, half, speed = rng.standard_normal((tokens, d_model)), d_model // 2, 2.0
    form, drawn = rng.standard_normal((2, d_model, d_model)) / d_model
    turn = speed * np.kron(np.eye(half), [[0.0, -1.0], [1.0, 0.0]])
    lower = np.diag(np.arange(d_model) >= half).astype(float)
    upper = np.eye(d_model) - lower

    def cost(x: np.ndarray, form: np.ndarray, value: np.ndarray) -> tuple[float, float, float]:
        """Energy of the flow up to time 1, and the two bounds."""

        def rates(_: float, state: np.ndarray) -> np.ndarray:
            here = state[:-1].reshape(x.shape)
            velocity = _attention(here, form) @ here @ value.T
            return np.append(velocity, (velocity**2).sum() / 2)

        state = solve_ivp(rates, (0, 1), np.append(x, 0.0), "DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
        far = ((x[:, None] - state[:-1].reshape(x.shape)[None]) ** 2).sum(2) / 2
        return float(state[-1]), float(np.trace(far)), float(far[linear_sum_assignment(far)].sum())

    turned, chord, matching = cost(x, form, turn)
    met = cost(np.ones((tokens, 1)) * x[0], form, turn)
    unread = cost(x, upper @ form @ upper, lower @ drawn @ upper)
    circle = abs(met[0] / met[1] / float(speed / 2 / np.sin(speed / 2)) ** 2 - 1)
    straight, short = abs(unread[0] / unread[1] - 1), max(0.0, 1 - turned / matching)
    title = "OT-Transformer: "
    checks = (
        Check(f"{title}cost >= that of the best matching", "shortfall", "0", short, 1e-9),
        Check(f"{title}turning costs more than straight paths", "cost / bound", "1", turned / chord - 1, 1e-2, False),
        Check(f"{title}equal tokens turn in circles", "cost / bound", "(a / sin a)^2, 2a = wT", circle, 1e-9),
        Check(f"{title}V writes where nothing is read: straight", "cost / bound", "1", straight, 1e-9),
    )
    output = _attention(x, form) @ x @ turn.T

    field = torch.from_numpy(x)
    pair = Pair.constant((field @ torch.from_numpy(form) @ field.T).softmax(-1), torch.from_numpy(turn))
    return Placed(pair, field, torch.from_numpy(output), None, checks)
