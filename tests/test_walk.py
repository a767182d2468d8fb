"""The lazy connection walk against the dense operator (T2, T3, T7, T9), its symmetries and its refusals."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree
from torch import Tensor

from cwlib import laplacian, measures
from cwlib.cores import HeadTransports
from cwlib.measures import stochastic_walk
from cwlib.synthetic import dependent_walk, isometric_transports, random_walk
from cwlib.walk import ConnectionWalk

kinds = pytest.mark.parametrize("kind", oracles.KINDS)
gauges = pytest.mark.parametrize("gauge", ["mean", "sum", "norm"])
SEEDS = range(3)


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def layer_of(walk: ConnectionWalk) -> Layer:
    return Layer(*(x.double().numpy() for x in (walk.attention, walk.value, walk.output)), walk.groups)


def pairs(kind: str) -> list[tuple[Layer, ConnectionWalk]]:
    """Seeded layers of one kind, dense and lazy."""
    return [(layer, walk_of(layer)) for layer in (oracles.instance(kind, seed) for seed in SEEDS)]


def cyclic_flat_walk(tokens: int) -> ConnectionWalk:
    """A flat connection of many heads: head h serves the edges with i - j = h (mod n), rotating the plane by 2 pi h/n.

    Then Omega_ij = n g_i g_j^-1 with g_i the rotation by 2 pi i/n (T8).
    """
    shifts = torch.arange(tokens)
    attention = torch.stack([torch.eye(tokens, dtype=torch.float64).roll(int(h), 0) for h in shifts])
    angle = 2 * torch.pi * shifts.double() / tokens
    rotations = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).reshape(-1, 2, 2)
    return ConnectionWalk(attention, torch.eye(2, dtype=torch.float64).expand(tokens, 2, 2), rotations)


# --- lazy equals dense -----------------------------------------------------------------------------------------------


@kinds
def test_shape(kind: str) -> None:
    for layer, walk in pairs(kind):
        heads, n_dst, n_src, d_model, _ = layer.shape
        assert (walk.heads, walk.n_dst, walk.n_src, walk.d_model) == (heads, n_dst, n_src, d_model)
        assert walk.support.nonzero().tolist() == [list(edge) for edge in oracles.support(layer)]
        later = any(j > i for i, j in oracles.support(layer))
        assert walk.is_causal == (n_dst == n_src and not later)


@kinds
def test_dense_operator(kind: str) -> None:
    for layer, walk in pairs(kind):
        agree(walk.to_dense(), oracles.operator(layer))


@kinds
def test_application(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        _, n_dst, n_src, d_model, _ = layer.shape
        field = np.random.default_rng(seed).normal(size=(n_src, d_model))
        x = torch.from_numpy(field)
        agree(walk @ x, oracles.apply(layer, field))
        agree((walk @ x).flatten(), walk.to_dense() @ x.flatten())
        agree(walk.apply(x), walk @ x)
        for shape in ((d_model,), (n_dst, d_model)):
            constant = np.random.default_rng([seed, 1]).normal(size=shape)
            biased = ConnectionWalk(*map(torch.from_numpy, (*layer.parts, constant)), groups=layer.groups)
            agree(biased.apply(x), oracles.apply(layer, field) + constant)
            agree(biased @ x, walk @ x)
            agree(biased.to_dense(), walk.to_dense())


@kinds
@gauges
def test_effective_walk(kind: str, gauge: str) -> None:
    for layer, walk in pairs(kind):
        # the norm gauge is the root of a form whose rounding is 1e-16
        agree(walk.effective_walk(gauge), oracles.walk(layer, gauge), atol=1e-11)


@kinds
@gauges
def test_transport_of_every_edge(kind: str, gauge: str) -> None:
    for layer, walk in pairs(kind):
        for i, j in oracles.support(layer):
            omega = walk.transport(i, j, gauge)
            agree(omega, oracles.transport(layer, i, j, gauge))
            agree(walk.effective_walk(gauge)[i, j] * omega, oracles.block(layer, i, j))


@kinds
def test_blocks(kind: str) -> None:
    for layer, walk in pairs(kind):
        for i in range(walk.n_dst):
            for j in range(walk.n_src):
                agree(walk.operator_block(i, j), oracles.block(layer, i, j))
        agree(walk.operator_block(-1, -walk.n_src), oracles.block(layer, walk.n_dst - 1, 0))


@kinds
def test_gates(kind: str) -> None:
    for layer, walk in pairs(kind):
        agree(walk.gates(), oracles.gates(layer))
        agree(walk.gates().sum(0), walk.support.double())


@kinds
def test_norm_and_inner_product(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        dense = oracles.operator(layer)
        agree(walk.norm(), np.linalg.norm(dense))
        agree(walk.inner(), (dense**2).sum())
        rng = np.random.default_rng([5, seed])
        other = Layer(layer.attention[::-1].copy(), rng.normal(size=layer.value.shape), layer.output, layer.groups)
        right = walk_of(other)
        agree(walk.inner(right), (dense * oracles.operator(other)).sum(), atol=1e-11)
        agree(walk.attention_gram(right), oracles.attention_gram(layer, other))
        agree(walk.attention_gram(), oracles.attention_gram(layer, layer))


@kinds
def test_schmidt_values(kind: str) -> None:
    for layer, walk in pairs(kind):
        values, exact = walk.schmidt_values(), oracles.schmidt(layer)
        assert (values.diff() <= 1e-12).all(), "descending"
        agree((values / exact[0]) ** 2, (exact / exact[0]) ** 2, atol=1e-13)
        clear = exact > 0.01 * exact[0]
        agree(values[clear], exact[clear])
        eigenvalues = np.linalg.eigvals(oracles.attention_gram(layer, layer) @ oracles.gram(layer, layer))
        agree(values**2, np.sort(eigenvalues.real)[::-1])


@kinds
def test_singular_values_of_heads(kind: str) -> None:
    for layer, walk in pairs(kind):
        agree(walk.head_singular_values(), oracles.singular_values(layer))


@kinds
def test_isometry_of_every_edge(kind: str) -> None:
    for layer, walk in pairs(kind):
        exact = oracles.edge_isometries(layer)
        agree(walk.edge_isometry(), exact, rtol=1e-9)
        bound = np.array([[oracles.rank_bound(layer, i, j) for j in range(walk.n_src)] for i in range(walk.n_dst)])
        agree(walk.rank_bound(), bound)
        defined = exact[~np.isnan(exact)]
        assert (defined > 0).all() and (defined <= 1 + 1e-12).all()


@kinds
def test_isometry_is_the_distance_from_a_scaled_projection(kind: str) -> None:
    """The identity of T7: sqrt(1 - isometry) = min_c |T^T T - c Pi| / |T^T T|."""
    for layer, walk in pairs(kind):
        isometry = walk.edge_isometry()
        for i, j in oracles.support(layer):
            distance = oracles.distance_from_scaled_projection(
                oracles.transport(layer, i, j), oracles.rank_bound(layer, i, j)
            )
            agree(1 - isometry[i, j], distance**2, atol=1e-9)


@kinds
def test_mixing_contracts(kind: str) -> None:
    """The identity of T6, and |Omega_ij| <= max_h |T_h|, in the sum gauge."""
    for layer, walk in pairs(kind):
        gates, maps = walk.gates().numpy(), oracles.transports(layer)
        for i, j in oracles.support(layer):
            g, squared = gates[:, i, j], float((walk.transport(i, j, "sum") ** 2).sum())
            spread = sum(a * b * ((t - s) ** 2).sum() for a, t in zip(g, maps, strict=True)
                         for b, s in zip(g, maps, strict=True))  # fmt: skip
            agree(squared, sum(a * (t**2).sum() for a, t in zip(g, maps, strict=True)) - spread / 2, atol=1e-11)
            assert squared <= max((t**2).sum() for t in maps) + 1e-12


def test_edge_isometry_in_chunks_of_edges() -> None:
    """More edges than one chunk of the quartic form holds."""
    walk = random_walk(0, heads=2, tokens=8, sources=1500, d_model=4, d_head=1)
    cut = ConnectionWalk(walk.attention[:, 3:5], walk.value, walk.output)
    agree(walk.edge_isometry()[3:5], cut.edge_isometry())
    layer = layer_of(walk)
    for i, j in ((0, 0), (5, 691), (5, 692), (5, 693), (7, 1499)):
        agree(walk.edge_isometry()[i, j], oracles.isometry(oracles.block(layer, i, j), 2))


def test_edge_isometry_at_the_size_of_a_base_model() -> None:
    """Closed forms lose no accuracy at 12 heads of width 64 in dimension 768."""
    walk = random_walk(0, heads=12, tokens=128, d_model=768, d_head=64)
    isometry = walk.edge_isometry()
    assert isometry.shape == (128, 128) and not isometry.isnan().any()
    rng = np.random.default_rng(0)
    for i, j in rng.integers(0, 128, size=(50, 2)):
        omega = walk.operator_block(int(i), int(j)).numpy()
        agree(isometry[i, j], oracles.isometry(omega, rank=768), rtol=1e-8)


def test_edge_isometry_of_heads_that_cancel() -> None:
    """T_0 + T_1 + T_2 = 0 and equal gates: no transport is left, only rounding."""
    walk = random_walk(1, heads=3)
    output, uniform = walk.output.clone(), torch.full((3, 6, 6), 1 / 6, dtype=torch.float64)
    output[2] = -(output[0] + output[1])
    cancelled = ConnectionWalk(uniform, walk.value[:1], output, groups=3)
    assert cancelled.edge_isometry().isnan().all()


def test_flow_of_heads_that_cancel_is_zero_up_to_rounding() -> None:
    """The form under the root may round below zero; its root is a flow, never NaN."""
    for seed in range(20):
        walk = random_walk(seed, heads=3)
        output, uniform = walk.output.clone(), torch.full((3, 6, 6), 1 / 6, dtype=torch.float64)
        output[2] = -(output[0] + output[1])
        cancelled = ConnectionWalk(uniform, walk.value[:1], output, groups=3)
        assert (cancelled.effective_walk("norm") < 1e-7).all() and cancelled.norm() < 1e-6


@pytest.mark.parametrize("rest", [0.1, 0.03, 0.01, 5e-3, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12])
def test_edge_isometry_of_heads_that_nearly_cancel(rest: float) -> None:
    """Where the closed form runs out of digits it says NaN, not a wrong number."""
    walk = random_walk(1, heads=3)
    output, uniform = walk.output.clone(), torch.full((3, 6, 6), 1 / 6, dtype=torch.float64)
    output[2] = rest * output[2] - (output[0] + output[1])
    remaining = ConnectionWalk(uniform, walk.value[:1], output, groups=3)
    isometry = float(remaining.edge_isometry()[0, 0])
    exact = oracles.isometry(walk.output[2].numpy() @ walk.value[0].numpy(), 3)
    if rest > 0.01:
        agree(isometry, exact, rtol=1e-7)
    else:
        assert np.isnan(isometry) or abs(isometry - exact) < 1e-5


# --- known answers ---------------------------------------------------------------------------------------------------


def test_identity_transports() -> None:
    identity = torch.eye(4, dtype=torch.float64)[None]
    attention = random_walk(0, heads=1, tokens=5).attention
    walk = ConnectionWalk(attention, identity, identity)
    agree(walk.to_dense(), np.kron(attention[0], np.eye(4)))
    agree(walk.edge_isometry(), np.ones((5, 5)))
    agree(walk.transport(2, 3), np.eye(4))
    for gauge in ("mean", "sum", "norm"):
        agree(walk.effective_walk(gauge), attention[0])
    agree(walk.norm(), 2 * attention.norm())
    agree(walk.schmidt_values(), [walk.norm()])


def test_one_isometric_head_has_isometry_one_and_mixtures_less() -> None:
    for seed in SEEDS:
        attention = random_walk(seed, heads=3, tokens=5).attention
        for h in range(3):
            transports = isometric_transports(seed, heads=1, d_model=6, scale=2.0)
            agree(ConnectionWalk.from_transports(attention[h : h + 1], transports).edge_isometry(), np.ones((5, 5)))
        uniform = torch.full((3, 5, 5), 0.2, dtype=torch.float64)
        mixed = ConnectionWalk.from_transports(uniform, isometric_transports(seed, heads=3, d_model=6))
        assert (mixed.edge_isometry() < 0.95).all(), "isometries that differ do not mix to one (T6)"


def test_heads_in_orthogonal_blocks_with_equal_gates_are_isometric() -> None:
    """The bound is attained by mixtures too: orthonormal ranges and supports, equal gates."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    output = torch.from_numpy(np.stack([left[:, 2 * h : 2 * h + 2] for h in range(3)]))
    value = torch.from_numpy(np.stack([right[2 * h : 2 * h + 2] for h in range(3)]))
    uniform = torch.full((3, 4, 4), 0.25, dtype=torch.float64)
    walk = ConnectionWalk(uniform, value, output)
    agree(walk.edge_isometry(), np.ones((4, 4)))
    agree(walk.rank_bound(), np.full((4, 4), 6.0))
    # unequal gates scale the blocks unequally: (sum g^2)^2 / (3 sum g^4)
    attention = random_walk(0, heads=3, tokens=4).attention
    gates = ConnectionWalk(attention, value, output).gates()
    expected = (gates**2).sum(0) ** 2 / (3 * (gates**4).sum(0))
    agree(ConnectionWalk(attention, value, output).edge_isometry(), expected)


def test_flat_connection_of_many_heads() -> None:
    for tokens in (3, 4, 7):
        walk = cyclic_flat_walk(tokens)
        frames = walk.output
        for i in range(tokens):
            for j in range(tokens):
                agree(walk.transport(i, j), tokens * frames[i] @ frames[j].T)
        agree(walk.edge_isometry(), np.ones((tokens, tokens)))
        agree(walk.effective_walk("mean"), np.full((tokens, tokens), 1 / tokens))
        # G_A = n I and (G_T)_hk = 2 cos(2 pi (h - k)/n), whose eigenvalues are n, n, 0, ..
        agree(walk.schmidt_values() ** 2, [tokens**2] * 2 + [0] * (tokens - 2))


def test_one_head_has_one_schmidt_value() -> None:
    for layer, walk in pairs("one head"):
        agree(walk.schmidt_values(), [np.linalg.norm(layer.attention) * np.linalg.norm(oracles.total(layer))])


def test_dependent_heads_have_fewer_schmidt_values() -> None:
    for rank in (1, 2, 3):
        values = dependent_walk(rank, heads=4, rank=rank).schmidt_values()
        assert values[rank - 1] > 1e-2 * values[0]
        assert (values[rank:] < 1e-7 * values[0]).all()


def test_norm_gauge_scales_every_transport_to_the_norm_of_an_isometry() -> None:
    for layer, walk in pairs("zeros"):
        for i, j in oracles.support(layer):
            agree(walk.transport(i, j, "norm").norm(), np.sqrt(walk.d_model))


@kinds
def test_walks_of_attention_are_stochastic(kind: str) -> None:
    for _, walk in pairs(kind):
        agree(walk.effective_walk("mean").sum(1), np.ones(walk.n_dst))
        agree(walk.effective_walk("sum").sum(1), np.full(walk.n_dst, walk.heads))


# --- symmetries ------------------------------------------------------------------------------------------------------


@kinds
def test_orthogonal_gauge_change(kind: str) -> None:
    """O_h -> g O_h, V_h -> V_h g^-1 conjugates K; the scalars of the walk stay."""
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        g = np.linalg.qr(np.random.default_rng(seed).normal(size=(walk.d_model, walk.d_model)))[0]
        turned = walk_of(Layer(layer.attention, layer.value @ g.T, g @ layer.output, layer.groups))
        for gauge in ("mean", "sum", "norm"):
            agree(turned.effective_walk(gauge), walk.effective_walk(gauge), atol=1e-11)
        agree(turned.schmidt_values() ** 2, walk.schmidt_values() ** 2)
        agree(turned.edge_isometry(), walk.edge_isometry(), rtol=1e-9)
        i, j = oracles.support(layer)[-1]
        agree(turned.transport(i, j), g @ walk.transport(i, j).numpy() @ g.T)


@kinds
@pytest.mark.parametrize("c", [2.5, -0.4])
def test_scaling(kind: str, c: float) -> None:
    for layer, walk in pairs(kind):
        scaled = walk_of(Layer(layer.attention, c * layer.value, layer.output, layer.groups))
        agree(scaled.to_dense(), c * walk.to_dense())
        agree(scaled.norm(), abs(c) * walk.norm())
        agree(scaled.inner(walk), c * walk.inner())
        agree(scaled.schmidt_values() ** 2, c**2 * walk.schmidt_values() ** 2)
        agree(scaled.effective_walk("norm"), abs(c) * walk.effective_walk("norm"), atol=1e-11)
        agree(scaled.effective_walk("mean"), walk.effective_walk("mean"))
        agree(scaled.edge_isometry(), walk.edge_isometry(), rtol=1e-9)


@kinds
def test_order_of_heads_does_not_matter(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        order = np.random.default_rng(seed).permutation(len(layer.value))
        query = np.concatenate([np.arange(layer.groups) + layer.groups * h for h in order])
        other = walk_of(Layer(layer.attention[query], layer.value[order], layer.output[query], layer.groups))
        agree(other.to_dense(), walk.to_dense())
        agree(other.gates(), walk.gates()[query])
        agree(other.schmidt_values() ** 2, walk.schmidt_values() ** 2)
        agree(other.head_singular_values(), walk.head_singular_values()[query])
        agree(other.edge_isometry(), walk.edge_isometry(), rtol=1e-9)


def test_grouped_heads_equal_heads_with_repeated_values() -> None:
    for kind in ("grouped", "grouped causal", "one value head"):
        for layer, walk in pairs(kind):
            plain = walk_of(Layer(layer.attention, np.repeat(layer.value, layer.groups, 0), layer.output))
            agree(plain.to_dense(), walk.to_dense())
            agree(plain.schmidt_values() ** 2, walk.schmidt_values() ** 2)
            agree(plain.transports.quartic, walk.transports.quartic)
            # the rank bound, and with it isometry, sees that the repeated values are the same
            ratio = plain.rank_bound() / walk.rank_bound()
            agree(plain.edge_isometry() * ratio, walk.edge_isometry(), rtol=1e-9)


def test_order_of_tokens() -> None:
    for layer, walk in pairs("zeros"):
        order = np.random.default_rng(0).permutation(walk.n_src)
        other = walk_of(Layer(layer.attention[:, order][:, :, order], layer.value, layer.output))
        agree(other.edge_isometry(), walk.edge_isometry()[order][:, order])
        agree(other.schmidt_values() ** 2, walk.schmidt_values() ** 2)


# --- precision, construction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2])
def test_low_precision_is_accumulated_in_float64(dtype: torch.dtype, groups: int) -> None:
    for seed in SEEDS:
        low = random_walk(seed, heads=4, tokens=8, d_model=32, d_head=8, groups=groups, dtype=dtype)
        layer = layer_of(low)
        field = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        high = dict(rtol=1e-12, atol=1e-12)
        agree(low @ field, oracles.apply(layer, field.double().numpy()), **high)
        agree(low.to_dense(), oracles.operator(layer), **high)
        agree(low.gates(), oracles.gates(layer), **high)
        agree(low.effective_walk(), oracles.walk(layer, "mean"), **high)
        agree(low.effective_walk("norm"), oracles.walk(layer, "norm"), **high)
        agree(low.operator_block(3, 5), oracles.block(layer, 3, 5), **high)
        agree(low.head_singular_values(), oracles.singular_values(layer), **high)
        agree(low.schmidt_values(), oracles.schmidt(layer))
        agree(low.edge_isometry(), oracles.edge_isometries(layer))
        constant = torch.full((32,), 0.1, dtype=dtype)
        biased = ConnectionWalk(low.attention, low.value, low.output, constant, groups)
        agree(biased.apply(field), (low @ field) + constant.double(), **high)


def test_attention_rounded_to_its_dtype_is_accepted() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        logits = torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(0)) * 3
        walk = random_walk(0, heads=4)
        ConnectionWalk(logits.softmax(-1).to(dtype), walk.value, walk.output)
        with pytest.raises(ValueError, match="sum to one"):
            ConnectionWalk((0.98 * logits.softmax(-1)).to(dtype), walk.value, walk.output)


def test_shared_transports_keep_their_cores() -> None:
    walk = random_walk(0, heads=4, groups=2)
    constant = torch.ones(8, dtype=torch.float64)
    shared = ConnectionWalk.from_transports(walk.attention.flip(0), walk.transports, constant)
    assert shared.transports is walk.transports
    agree(shared.to_dense(), ConnectionWalk(walk.attention.flip(0), walk.value, walk.output, groups=2).to_dense())
    agree(shared.apply(torch.zeros(6, 8)), np.ones((6, 8)))


def test_gradients_are_not_recorded() -> None:
    walk = random_walk(0)
    trained = ConnectionWalk(walk.attention.requires_grad_(), walk.value.requires_grad_(), walk.output)
    for result in (trained @ torch.ones(6, 8, requires_grad=True), trained.gates(), trained.edge_isometry()):
        assert not result.requires_grad


def test_walk_is_immutable() -> None:
    walk = random_walk(0)
    with pytest.raises(AttributeError):
        walk.attention = walk.attention * 2


# --- wrong inputs ----------------------------------------------------------------------------------------------------


GOOD = random_walk(0, heads=4, tokens=6, d_model=8, d_head=3, groups=2)
ROWS = GOOD.attention.clone()
ROWS[2, 5] *= 1.5


def spoilt(entry: float) -> Tensor:
    attention = GOOD.attention.clone()
    attention[1, 3, 2] = entry
    return attention


def build(**changed: object) -> ConnectionWalk:
    return ConnectionWalk(**({"attention": GOOD.attention, "value": GOOD.value, "output": GOOD.output, "groups": 2}
                             | changed))  # fmt: skip


LOGITS = GOOD.attention.log()
HALF = torch.full((4, 6), 0.5, dtype=torch.float64)
ABSORBING = build(attention=GOOD.attention / 2, absorption=HALF)
WRONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "rows": (lambda: build(attention=ROWS), ["attention", "sum to one", "1.5", "head 2", "dst 5", "softmax over src"]),
    "columns": (lambda: build(attention=GOOD.attention.mT), ["attention", "sum to one", "transpose"]),
    "logits": (lambda: build(attention=LOGITS), ["attention", "nonnegative", "logits", "head 0", "dst 0", "src 0"]),
    "negative": (lambda: build(attention=spoilt(-0.25)), ["nonnegative", "-0.25", "head 1", "dst 3", "src 2"]),
    "NaN": (lambda: build(attention=spoilt(float("nan"))), ["attention", "finite", "nan", "[1, 3, 2]"]),
    "inf": (lambda: build(attention=spoilt(float("inf"))), ["attention", "finite", "inf", "[1, 3, 2]"]),
    "integers": (lambda: build(attention=torch.eye(6).int().expand(4, 6, 6)), ["attention", "floating-point", "int32"]),
    "numpy": (lambda: build(attention=GOOD.attention.numpy()), ["attention", "torch.Tensor", "ndarray", "as_tensor"]),
    "meta": (lambda: build(attention=GOOD.attention.to("meta")), ["attention", "holds numbers", "meta"]),
    "sparse": (lambda: build(attention=GOOD.attention.to_sparse()), ["attention", "dense", ".to_dense()"]),
    "nothing": (lambda: build(attention=None), ["attention", "torch.Tensor", "NoneType"]),
    "one head's matrix": (lambda: build(attention=GOOD.attention[0]), ["attention", "(head, dst, src)", "(6, 6)"]),
    "batch": (lambda: build(attention=GOOD.attention[None]), ["attention", "(head, dst, src)", "(1, 4, 6, 6)"]),
    "no token": (lambda: build(attention=GOOD.attention[:, :0]), ["attention", "non-empty", "(4, 0, 6)"]),
    "heads of attention": (lambda: build(attention=GOOD.attention[:3]), ["attention", "4 heads", "got 3"]),
    "heads of value": (lambda: build(value=GOOD.value[:1]), ["value", "groups=2", "got 1"]),
    "heads of output": (lambda: build(output=GOOD.output[:2]), ["value", "2 heads", "got 2"]),
    "value transposed": (lambda: build(value=GOOD.value.mT), ["value", "(2, 3, 8)", "(2, 8, 3)", "transpose"]),
    "value from numpy": (lambda: build(value=GOOD.value.numpy()), ["value", "torch.Tensor", "ndarray"]),
    "NaN in output": (lambda: build(output=GOOD.output * float("nan")), ["output", "finite", "nan", "[0, 0, 0]"]),
    "short constant": (lambda: build(constant=torch.zeros(7)), ["constant", "(8,)", "(6, 8)", "got (7,)"]),
    "constant per source": (lambda: build(constant=torch.zeros(5, 8)), ["constant", "(6, 8)", "got (5, 8)"]),
    "constant with three axes": (lambda: build(constant=torch.zeros(1, 6, 8)), ["constant", "(1, 6, 8)"]),
    "scalar constant": (lambda: build(constant=torch.tensor(1.0)), ["constant", "()"]),
    "integer constant": (lambda: build(constant=torch.zeros(8).int()), ["constant", "floating-point", "int32"]),
    "NaN constant": (lambda: build(constant=torch.full((8,), torch.nan)), ["constant", "finite", "nan"]),
    "constant from numpy": (lambda: build(constant=np.zeros(8)), ["constant", "torch.Tensor", "ndarray"]),
    "constant a list": (lambda: build(constant=[0.0] * 8), ["constant", "torch.Tensor", "list"]),
    "absorption undeclared": (lambda: build(attention=GOOD.attention / 2), ["sum to one", "0.5", "absorption="]),
    "absorption too small": (lambda: build(attention=GOOD.attention / 2, absorption=HALF / 2), ["sum to one", "0.75"]),
    "absorption of full rows": (lambda: build(absorption=HALF), ["sum to one", "1.5"]),
    "absorption per row": (lambda: build(attention=GOOD.attention / 2, absorption=HALF[0]), ["absorption", "(6,)"]),
    "absorption transposed": (lambda: build(absorption=HALF.T), ["absorption", "(4, 6)", "(6, 4)"]),
    "absorption negative": (lambda: build(absorption=HALF - 1), ["absorption", "[0, 1]", "[-0.5, -0.5]"]),
    "absorption and W": (lambda: stochastic_walk(ABSORBING), ["row-stochastic", "absorption", "norm gauge"]),
    "field too short": (lambda: GOOD.apply(torch.zeros(5, 8)), ["field", "(6, 8)", "got (5, 8)"]),
    "field too wide": (lambda: GOOD @ torch.zeros(6, 9), ["field", "(6, 8)", "got (6, 9)"]),
    "field of integers": (lambda: GOOD @ torch.ones(6, 8).long(), ["field", "floating-point", "int64", ".double()"]),
    "field meta": (lambda: GOOD.apply(torch.ones(6, 8, device="meta")), ["field", "holds numbers", "meta", "load"]),
    "field sparse": (lambda: GOOD.apply(torch.ones(6, 8).to_sparse()), ["field", "dense", "sparse_coo", ".to_dense()"]),
    "field flat": (lambda: GOOD.apply(torch.zeros(48)), ["field", "(6, 8)", "(48,)"]),
    "field from numpy": (lambda: GOOD.apply(np.zeros((6, 8))), ["field", "(6, 8)", "got ndarray"]),
    "gauge of the walk": (lambda: GOOD.effective_walk("average"), ["gauge", "mean, sum, norm", "'average'"]),
    "gauge of a transport": (lambda: GOOD.transport(0, 0, "max"), ["gauge", "mean, sum, norm", "'max'"]),
    "dst too large": (lambda: GOOD.transport(6, 0), ["dst", "below 6", "got 6"]),
    "src too large": (lambda: GOOD.operator_block(0, 6), ["src", "below 6", "got 6"]),
    "dst too negative": (lambda: GOOD.transport(-7, 0), ["dst", "from -6", "got -7"]),
    "dst of half a token": (lambda: GOOD.transport(0.5, 0), ["dst", "integer", "below 6", "got 0.5"]),
    "src a truth": (lambda: GOOD.operator_block(0, True), ["src", "integer", "below 6", "got True"]),
    "src a letter": (lambda: GOOD.transport(0, "a"), ["src", "integer", "below 6", "got 'a'"]),
    "other tokens": (lambda: GOOD.attention_gram(random_walk(0, heads=4, tokens=7)), ["other", "(6, 6)", "got (7, 7)"]),
    "inner of other tokens": (lambda: GOOD.inner(random_walk(0, heads=4, tokens=7)), ["other", "(6, 6)", "(7, 7)"]),
    "inner of other d_model": (lambda: GOOD.inner(random_walk(0, heads=4, d_model=9)), ["other", "d_model 8", "got 9"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_a_walk_that_absorbs_half_of_every_row() -> None:
    """Edges and their transports are those of the whole walk; it carries half of it."""
    assert ABSORBING.absorption is HALF
    field = torch.randn(6, 8, dtype=torch.float64)
    agree(2 * ABSORBING.apply(field), GOOD.apply(field))
    agree(2 * ABSORBING.to_dense(), GOOD.to_dense())
    for same in ("edge_isometry", "gates", "rank_bound"):
        agree(getattr(ABSORBING, same)(), getattr(GOOD, same)())
    found, whole = laplacian.conditions(ABSORBING), laplacian.conditions(GOOD, measures.uniform_measure(6))
    assert found["measure"] == "uniform"
    agree(found["laplacian_defect"], whole["laplacian_defect"])
    assert found["stochasticity_defect"] > 0.3
    agree(stochastic_walk(ABSORBING, "norm"), stochastic_walk(GOOD, "norm"))
    assert laplacian.in_metric(ABSORBING, 4 * torch.eye(8, dtype=torch.float64)).absorption is HALF


def test_transport_along_an_edge_without_weight() -> None:
    walk = random_walk(0, causal=True)
    for gauge in ("mean", "sum", "norm"):
        with pytest.raises(ValueError, match=r"dst=0, src=3.*expected W > 0, got 0.*support"):
            walk.transport(0, 3, gauge)
    assert walk.edge_isometry()[0, 3].isnan()
    agree(walk.operator_block(0, 3), np.zeros((8, 8)))


def test_dense_operator_beyond_a_gibibyte_is_refused() -> None:
    value = torch.zeros(1, 1, 1025, dtype=torch.float32)
    attention = torch.full((1, 12, 12), 1 / 12)
    with pytest.raises(ValueError, match=r"to_dense.*1 GiB.*12300 x 12300.*edge_isometry"):
        ConnectionWalk(attention, value, value.mT).to_dense()


def test_walks_with_other_heads_have_an_inner_product() -> None:
    left, right = random_walk(0, heads=3), random_walk(1, heads=5, d_head=2)
    dense = oracles.operator(layer_of(left)), oracles.operator(layer_of(right))
    agree(left.inner(right), (dense[0] * dense[1]).sum())


def test_transports_without_a_walk() -> None:
    """Zero transports are a walk too: nothing flows, and no edge has an isometry."""
    zero = HeadTransports(torch.zeros(2, 3, 8), torch.zeros(2, 8, 3))
    walk = ConnectionWalk.from_transports(random_walk(0, heads=2).attention, zero)
    assert walk.norm() == 0 and walk.edge_isometry().isnan().all()
    agree(walk.effective_walk("norm"), np.zeros((6, 6)))
    agree(walk.schmidt_values(), np.zeros(2))
    with pytest.raises(ValueError, match="expected W > 0"):
        walk.transport(0, 0, "norm")


@pytest.mark.parametrize("thing", [(1, 2), "x", None])
def test_other_things_than_transports_are_refused(thing: object, unchecked: None) -> None:
    walk = random_walk(0)
    with pytest.raises(ValueError, match=r"transports: expected HeadTransports, got .*; pass HeadTransports"):
        ConnectionWalk.from_transports(walk.attention, thing)
    if thing is not None:
        with pytest.raises(ValueError, match=r"other: expected HeadTransports, got"):
            walk.transports.gram(thing)
