"""Cores of factored transports (T9) against dense traces and singular values."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree

from cwlib import kernels
from cwlib.blocks import attention_factor, attention_gram
from cwlib.cores import HeadTransports
from cwlib.synthetic import isometric_transports, random_walk
from cwlib.walk import ConnectionWalk

kinds = pytest.mark.parametrize("kind", oracles.KINDS)
SEEDS = range(4)


def pairs(kind: str) -> list[tuple[Layer, HeadTransports]]:
    """Seeded layers of one kind, dense and factored."""
    layers = [oracles.instance(kind, seed) for seed in SEEDS]
    return [(x, HeadTransports(torch.from_numpy(x.value), torch.from_numpy(x.output), groups=x.groups)) for x in layers]


def dense(cores: HeadTransports) -> Layer:
    """The same transports for the oracles; attention plays no part."""
    value, output = cores.value.double().numpy(), cores.output.double().numpy()
    return Layer(np.ones((cores.heads, 1, 1)), value, output, cores.groups)


# --- closed forms against oracles ------------------------------------------------------------------------------------


@kinds
def test_shape(kind: str) -> None:
    for layer, cores in pairs(kind):
        heads, _, _, d_model, d_head = layer.shape
        assert (cores.heads, cores.d_model, cores.d_head) == (heads, d_model, d_head)
        assert cores.kv_heads == len(layer.value)


@kinds
def test_cores_are_products_of_the_factors(kind: str) -> None:
    for layer, cores in pairs(kind):
        heads = range(layer.shape[0])
        o, v = layer.output, [layer.value[h // layer.groups] for h in heads]
        agree(cores.output_cores(), [[o[k].T @ o[h] for h in heads] for k in heads])
        agree(cores.value_cores(), [[v[h] @ v[k].T for k in heads] for h in heads])
        agree(cores.mixed_cores(), [[v[h] @ o[k] for k in heads] for h in heads])


@kinds
def test_gram_is_the_frobenius_inner_product(kind: str) -> None:
    for layer, cores in pairs(kind):
        agree(cores.gram(), oracles.gram(layer, layer))
        agree(cores.head_gram, oracles.gram(layer, layer))
        assert cores.head_gram is cores.head_gram, "cached: it is asked for by every walk of the layer"


@kinds
def test_gram_with_another_layer(kind: str) -> None:
    for (layer, cores), seed in zip(pairs(kind), SEEDS, strict=True):
        rng = np.random.default_rng([7, seed])
        other = Layer(layer.attention, rng.normal(size=layer.value.shape), rng.normal(size=layer.output.shape),
                      layer.groups)  # fmt: skip
        right = HeadTransports(torch.from_numpy(other.value), torch.from_numpy(other.output), other.groups)
        agree(cores.gram(right), oracles.gram(layer, other))
        agree(cores.output_cores(right)[0, -1], layer.output[0].T @ other.output[-1])
        agree(cores.value_cores(right)[0, -1], layer.value[0] @ other.value[-1].T)


@kinds
def test_quartic_form(kind: str) -> None:
    for layer, cores in pairs(kind):
        agree(cores.quartic, oracles.quartic(layer))


@kinds
def test_forms_of_two_step_paths(kind: str) -> None:
    for layer, cores in pairs(kind):
        cubic, quartic = cores.triangle_forms
        agree(cubic, oracles.cubic_of_paths(layer))
        agree(quartic, oracles.quartic_of_paths(layer))


@kinds
def test_traces(kind: str) -> None:
    for layer, cores in pairs(kind):
        agree(cores.product_traces, oracles.product_traces(layer))
        agree(cores.traces(), [np.trace(t) for t in oracles.transports(layer)])


@kinds
def test_singular_values_of_every_head(kind: str) -> None:
    for layer, cores in pairs(kind):
        values = cores.singular_values()
        agree(values, oracles.singular_values(layer))
        assert (values.diff(dim=1) <= 0).all(), "descending"


@kinds
def test_total_is_the_sum_of_heads(kind: str) -> None:
    for layer, cores in pairs(kind):
        total = cores.total()
        agree(total.output[0] @ total.value[0], oracles.total(layer))
        assert (total.heads, total.groups) == (1, 1)
        assert total.d_head == len(layer.value) * layer.shape[4], "the rank bound of T7"


@kinds
def test_apply_transports_rows(kind: str) -> None:
    for (layer, cores), seed in zip(pairs(kind), SEEDS, strict=True):
        field = np.random.default_rng(seed).normal(size=(4, layer.shape[3]))
        agree(cores.apply(torch.from_numpy(field)), [[t @ x for x in field] for t in oracles.transports(layer)])


@pytest.mark.parametrize("seed", SEEDS)
def test_forms_give_the_norms_of_mixtures(seed: int) -> None:
    """|Omega|^2 and |Omega^T Omega|^2 of a mixture, as the docstrings state them."""
    (layer, cores), weights = pairs("grouped")[seed], np.random.default_rng(seed).random(4)
    mixture = sum(w * t for w, t in zip(weights, oracles.transports(layer), strict=True))
    w = torch.from_numpy(weights)
    agree(w @ cores.head_gram @ w, (mixture**2).sum())
    fourth = torch.einsum("k,h,l,m,khlm->", w, w, w, w, cores.quartic)
    agree(fourth, ((mixture.T @ mixture) ** 2).sum())


# --- grouped queries -------------------------------------------------------------------------------------------------

grouped = pytest.mark.parametrize(("kv_heads", "groups"), [(kv, groups) for kv in (1, 2) for groups in (1, 2, 3)])


def draw(seed: int, kv_heads: int, groups: int, d_head: int = 3) -> tuple[HeadTransports, np.ndarray]:
    """Transports on R^7, factored and as dense matrices."""
    rng = np.random.default_rng([seed, kv_heads, groups, d_head])
    value, output = rng.normal(size=(kv_heads, d_head, 7)), rng.normal(size=(kv_heads * groups, 7, d_head))
    maps = np.stack([o @ value[h // groups] for h, o in enumerate(output)])
    return HeadTransports(torch.from_numpy(value), torch.from_numpy(output), groups), maps


@grouped
@pytest.mark.parametrize("seed", SEEDS)
def test_forms_of_grouped_queries_are_those_of_the_dense_maps(kv_heads: int, groups: int, seed: int) -> None:
    cores, maps = draw(seed, kv_heads, groups)
    agree(cores.gram(), np.einsum("hab,kab->hk", maps, maps))
    pairs = np.einsum("kab,hac->khbc", maps, maps)  # T_k^T T_h
    agree(cores.quartic, np.einsum("khbc,lmcb->khlm", pairs, pairs))
    paths = np.einsum("hab,lbc->hlac", maps, maps)  # T_h T_l
    cubic, quartic = cores.triangle_forms
    agree(cubic, np.einsum("hlac,mac->hlm", paths, maps))
    agree(quartic, np.einsum("hlac,gmac->hglm", paths, paths))


@grouped
@pytest.mark.parametrize(("other_kv_heads", "other_groups"), [(1, 4), (2, 1), (3, 2)])
def test_gram_of_grouped_layers_whose_value_heads_differ(
    kv_heads: int, groups: int, other_kv_heads: int, other_groups: int
) -> None:
    for seed in SEEDS:
        cores, maps = draw(seed, kv_heads, groups)
        other, others = draw(seed + 10, other_kv_heads, other_groups, d_head=2)
        expected = np.einsum("hab,kab->hk", maps, others)
        agree(cores.gram(other), expected)
        agree(other.gram(cores), expected.T)


def test_gram_remembers_each_other_layer_for_itself() -> None:
    cores, maps = draw(0, 2, 2)
    layers = [draw(seed, 2, 2) for seed in (1, 2)]
    first = [cores.gram(other) for other, _ in layers]
    for _ in range(2):
        for (other, others), before in zip(layers, first, strict=True):
            agree(cores.gram(other), np.einsum("hab,kab->hk", maps, others))
            assert cores.gram(other) is before, "kept: it depends on weights only, and is asked for on every text"
    for seed in range(20):  # layers that are gone are not taken for those that come to lie at their address
        other, others = draw(seed, 2, 2)
        agree(cores.gram(other), np.einsum("hab,kab->hk", maps, others))
        del other


# --- symmetries ------------------------------------------------------------------------------------------------------


@kinds
def test_a_change_of_basis_inside_the_heads_changes_nothing(kind: str) -> None:
    """O_h -> O_h R^-1, V_h -> R V_h leaves T_h, so every quantity of T_h."""
    for (layer, cores), seed in zip(pairs(kind), SEEDS, strict=True):
        rng = np.random.default_rng([3, seed])
        bases = np.eye(layer.shape[4]) + 0.3 * rng.normal(size=(len(layer.value), layer.shape[4], layer.shape[4]))
        inverses = np.repeat(np.linalg.inv(bases), layer.groups, axis=0)
        other = HeadTransports(
            torch.from_numpy(bases @ layer.value), torch.from_numpy(layer.output @ inverses), layer.groups
        )
        for name in ("head_gram", "quartic", "product_traces"):
            agree(getattr(other, name), getattr(cores, name), rtol=1e-9)
        agree(other.traces(), cores.traces(), rtol=1e-9)
        agree(other.singular_values(), cores.singular_values(), rtol=1e-9)


@pytest.mark.parametrize("c", [3.0, -0.5])
def test_scaling(c: float) -> None:
    for _, cores in pairs("grouped"):
        scaled = HeadTransports(cores.value, c * cores.output, cores.groups)
        agree(scaled.head_gram, c**2 * cores.head_gram)
        agree(scaled.quartic, c**4 * cores.quartic)
        agree(scaled.product_traces, c**2 * cores.product_traces)
        agree(scaled.traces(), c * cores.traces())
        agree(scaled.singular_values(), abs(c) * cores.singular_values())
        cubic, quartic = cores.triangle_forms
        agree(scaled.triangle_forms[0], c**3 * cubic)
        agree(scaled.triangle_forms[1], c**4 * quartic)


def test_forms_have_the_symmetries_of_a_trace() -> None:
    for _, cores in pairs("full"):
        agree(cores.head_gram, cores.head_gram.T)
        agree(cores.product_traces, cores.product_traces.T)
        assert torch.linalg.eigvalsh(cores.head_gram).min() > -1e-12
        # tr(X) = tr(X^T), and the trace is cyclic
        agree(cores.quartic, cores.quartic.permute(1, 0, 3, 2))
        agree(cores.quartic, cores.quartic.permute(2, 3, 0, 1))


def test_orthogonal_heads() -> None:
    cores = isometric_transports(0, heads=3, d_model=5, scale=0.7)
    agree(cores.singular_values(), np.full((3, 5), 0.7))
    agree(cores.head_gram.diagonal(), np.full(3, 5 * 0.7**2))
    agree(torch.stack([cores.quartic[h, h, h, h] for h in range(3)]), np.full(3, 5 * 0.7**4))


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_low_precision_are_accumulated_in_float64(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        walk = random_walk(seed, heads=4, d_model=64, d_head=16, groups=2)
        low = HeadTransports(walk.value.to(dtype), walk.output.to(dtype), groups=2)
        high = HeadTransports(low.value.double(), low.output.double(), groups=2)
        for name in ("head_gram", "quartic", "product_traces"):
            assert getattr(low, name).dtype == torch.float64
            agree(getattr(low, name), getattr(high, name), rtol=1e-12)
        agree(low.gram(high), high.head_gram, rtol=1e-12)
        agree(low.traces(), high.traces(), rtol=1e-12)
        agree(low.singular_values(), high.singular_values(), rtol=1e-12)
        agree(low.triangle_forms[0], high.triangle_forms[0], rtol=1e-12)
        total = low.total()
        agree(total.output[0] @ total.value[0], oracles.total(dense(low)), rtol=1e-12)
        field = torch.ones(2, 64, dtype=dtype)
        agree(low.apply(field), high.apply(field.double()), rtol=1e-12)


def test_parameters_that_require_gradients_are_read_as_numbers() -> None:
    walk = random_walk(0)
    trained = HeadTransports(torch.nn.Parameter(walk.value), torch.nn.Parameter(walk.output))
    assert not trained.head_gram.requires_grad
    assert not trained.singular_values().requires_grad
    agree(trained.quartic, walk.transports.quartic)


@pytest.mark.parametrize(
    ("of_value", "of_output"), [(1e-80, 1), (1e-78, 1e-78), (1, 1e77), (1e80, 1e60), (1e-160, 1e150)]
)
def test_numbers_of_edges_and_heads_at_any_scale(of_value: float, of_output: float) -> None:
    """Powers of the transports that leave the range of floats must not spoil what lies in it."""
    walk = random_walk(0, heads=4, d_model=8, d_head=3, groups=2)
    other = ConnectionWalk(walk.attention, of_value * walk.value, of_output * walk.output, groups=2)
    agree(other.edge_isometry(), walk.edge_isometry(), rtol=1e-12)
    agree(other.schmidt_values() / of_value / of_output, walk.schmidt_values(), rtol=1e-12)
    agree(other.head_singular_values() / of_value / of_output, walk.head_singular_values(), rtol=1e-12)


# --- ill-conditioned heads -------------------------------------------------------------------------------------------

WIDE, THIN = 24, 8  # d_model and d_head


def orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def head_with(values: np.ndarray, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Factors O and V of a map with given singular values, s^share of them in O, in rotated bases."""
    rng = np.random.default_rng([17, seed])
    left, right, inner = (orthonormal(rng, rows, len(values)) for rows in (WIDE, WIDE, len(values)))
    return left * values**share @ inner, (inner.T * values ** (1 - share)) @ right.T


def transports_with(*heads: tuple[np.ndarray, np.ndarray]) -> HeadTransports:
    outputs, values = (torch.from_numpy(np.stack(factors)) for factors in zip(*heads, strict=True))
    return HeadTransports(values, outputs)


def assert_singular(cores: HeadTransports, each: float | None = None) -> None:
    """Assert values up to 1e-12 of the head's largest, and up to ``each`` of themselves, against the dense maps."""
    found, expected = cores.singular_values().numpy(), oracles.singular_values(dense(cores))
    assert found.shape == np.shape(expected)
    for head, truth in zip(found, np.asarray(expected), strict=True):
        assert (np.diff(head) <= 0).all() and (head >= 0).all()
        np.testing.assert_allclose(head, truth, rtol=0, atol=1e-12 * truth[0])
        if each is not None:
            np.testing.assert_allclose(head, truth, rtol=each)


@pytest.fixture
def accurate(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The heads whose singular values were left to QR factors, call by call."""
    calls: list[list[int]] = []
    original = HeadTransports._accurate_singular_values

    def record(self: HeadTransports, heads: torch.Tensor) -> torch.Tensor:
        calls.append(heads.tolist())
        return original(self, heads)

    monkeypatch.setattr(HeadTransports, "_accurate_singular_values", record)
    return calls


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0], ids=["in O", "in both", "in V"])
@pytest.mark.parametrize("digits", [0, 1, 2, 3, 6, 9, 12])
def test_singular_values_that_fall_over_many_digits(digits: int, share: float) -> None:
    for seed in SEEDS:
        expected = np.logspace(0, -digits, THIN)
        cores = transports_with(head_with(expected, share, seed))
        assert_singular(cores, each=1e-9 if digits <= 3 else None)
        agree(cores.singular_values()[0], expected, rtol=1e-9 if digits <= 3 else 0, atol=1e-12)


@pytest.mark.parametrize(("condition", "by_qr"), [(3000, False), (11000, True)])
def test_singular_values_are_right_on_both_sides_of_the_switch(
    condition: float, by_qr: bool, accurate: list[list[int]]
) -> None:
    """Squares of singular values that differ by more than 1e8 are left to QR factors."""
    each = 1e-11 if by_qr else 1e-8
    for seed in SEEDS:
        # O is an isometry in the basis of its head, so that T alone decides
        output, value = head_with(np.logspace(0, -np.log10(condition), THIN), 0.0, seed)
        cores = transports_with((output, value))
        assert_singular(cores, each=each)
        assert accurate == ([[0]] if by_qr else [])
        accurate.clear()
        for scale in (1e-6, 1e6):
            assert_singular(transports_with((scale * output, value)), each=each)
            assert bool(accurate) == by_qr
            accurate.clear()


def test_an_ill_conditioned_output_is_noticed_although_the_transport_is_not(accurate: list[list[int]]) -> None:
    for digits in (4, 6):
        output, value = head_with(np.ones(THIN), 0.0)
        stretch = np.logspace(0, -digits, THIN)
        cores = transports_with((output * stretch, value / stretch[:, None]))
        assert_singular(cores, each=1e-9)
        assert accurate.pop() == [0]


def test_an_ill_conditioned_output_is_noticed_although_its_pivots_are_equal() -> None:
    """A triangular matrix of ones, whose condition number is 2^n: every pivot of its Gram matrix is one."""
    width, rng = 24, np.random.default_rng(0)
    triangle = np.eye(width) - np.triu(np.ones((width, width)), 1)
    left, right = (orthonormal(rng, 64, width) for _ in range(2))
    cores = transports_with((left @ triangle, np.linalg.inv(triangle) @ right.T))
    agree(cores.singular_values(), np.ones((1, width)), rtol=1e-8)


DEGENERATE: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "value zero": lambda o, v: v.fill(0),
    "output zero": lambda o, v: o.fill(0),
    "both zero": lambda o, v: (o.fill(0), v.fill(0)),
    "a row of V zero": lambda o, v: v[3].fill(0),
    "a column of O zero": lambda o, v: o[:, 0].fill(0),
    "a row of V twice": lambda o, v: v.__setitem__(5, v[2]),
    "a column of O three times": lambda o, v: o.__setitem__((slice(None), slice(1, 3)), o[:, [0]]),
    "rank one": lambda o, v: v.__setitem__(slice(1, None), v[:1]),
    "one column left": lambda o, v: o[:, :-1].fill(0),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_singular_values_of_heads_without_full_rank(name: str, accurate: list[list[int]]) -> None:
    """Between two good heads, which stay as they are."""
    for seed in SEEDS:
        rng = np.random.default_rng([19, seed])
        heads = [(rng.normal(size=(WIDE, THIN)), rng.normal(size=(THIN, WIDE))) for _ in range(3)]
        DEGENERATE[name](*heads[1])
        cores = transports_with(*heads)
        assert_singular(cores)
        assert accurate.pop() == [1]
        good = cores.singular_values()[[0, 2]]
        agree(good, oracles.singular_values(dense(transports_with(heads[0], heads[2]))), rtol=1e-9)
        rank = np.linalg.matrix_rank(heads[1][0] @ heads[1][1])
        assert (cores.singular_values()[1, rank:] <= 1e-12 * cores.singular_values()[1, 0]).all()


def test_doubtful_heads_of_a_group_take_their_own_value_head(accurate: list[list[int]]) -> None:
    cores, _ = draw(0, kv_heads=2, groups=3)
    output = cores.output.clone()
    output[[1, 5], :, 2] = 0
    assert_singular(HeadTransports(cores.value, output, 3))
    assert accurate.pop() == [1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ill_conditioned_heads_in_low_precision(dtype: torch.dtype) -> None:
    cores = transports_with(*(head_with(np.logspace(0, -digits, THIN), 0.5, digits) for digits in (0, 2, 4, 6)))
    assert_singular(HeadTransports(cores.value.to(dtype), cores.output.to(dtype)))


# --- threads and pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_singular_values_do_not_depend_on_the_number_of_threads(heads: int, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_num_threads(1))
    cores = transports_with(*(head_with(np.logspace(0, -3 * n, THIN), 0.5, n) for n in range(heads)))
    wide = random_walk(0, heads=heads, d_model=3, d_head=5).transports
    alone = [each.singular_values() for each in (cores, wide)]
    torch.set_num_threads(2)
    for each, expected in zip((cores, wide), alone, strict=True):
        agree(each.singular_values(), expected, rtol=1e-13, atol=1e-15)


def everything(layer: Layer) -> dict[str, torch.Tensor]:
    """What is computed in pieces, of a layer and of it with another, from the start."""
    rng = np.random.default_rng(5)
    walk = ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)
    maps = (torch.from_numpy(rng.normal(size=part.shape)) for part in (layer.value, layer.output))
    other = ConnectionWalk(walk.attention.flip(0), *maps, groups=layer.groups)
    field = torch.from_numpy(rng.normal(size=(walk.n_src, walk.d_model)))
    flow = walk.effective_walk() * torch.linspace(1, 2, walk.n_dst, dtype=torch.float64)[:, None]
    factor = attention_factor(walk.attention)
    found = {
        "gram of one layer": walk.transports.gram(),
        "gram of two layers": walk.transports.gram(other.transports),
        "quartic": walk.transports.quartic,
        "singular values": walk.transports.singular_values(),
        "row sums": kernels.row_sums(walk.attention),
        "gram of attention": attention_gram(walk.attention, other.attention),
        "factor of attention": factor.T @ factor,  # rows have no sign of their own
        "totals": walk.blocks.totals,
        "squares": walk.blocks.squares,
        "quartics": walk.blocks.quartics,
        "ranks": walk.blocks.ranks,
        "traces of incoming": walk.blocks.incoming(flow)[0],
        "squares of incoming": walk.blocks.incoming(flow)[1],
        "energy of incoming": walk.blocks.incoming_energy(flow, field),
        "step": walk @ field,
        "isometry": walk.edge_isometry(),
        "Schmidt values": walk.schmidt_values(),
        "norm": torch.tensor(walk.norm()),
        "inner product": torch.tensor(walk.inner(other)),
    }
    if walk.n_dst == walk.n_src:
        found |= {"pairings": walk.blocks.pairings, "round trips": walk.blocks.round_trips}
    return found


@pytest.mark.parametrize("room", [1, 3000])
@kinds
def test_many_pieces_give_what_one_piece_gives(kind: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, attention = oracles.instance(kind, 0), torch.from_numpy(oracles.instance(kind, 0).attention)
    whole = everything(layer)
    assert len(list(kernels.pieces(attention))) == 1
    monkeypatch.setattr(kernels, "WORKSPACE", room)
    if room == 1:
        assert len(list(kernels.pieces(attention))) == attention.shape[1]
    for name, pieced in everything(layer).items():
        agree(pieced, whole[name], rtol=1e-11, atol=1e-12 * float(whole[name].nan_to_num().abs().max()))


def test_pieces_cover_every_destination_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = random_walk(0, heads=3, tokens=10, sources=4).attention
    monkeypatch.setattr(kernels, "WORKSPACE", 4 * 32 * 3 * 4)
    assert [rows.indices(10)[:2] for rows in kernels.pieces(attention)] == [(0, 4), (4, 8), (8, 10)]
    assert torch.equal(torch.cat(list(kernels.upcast(attention.float())), 1), attention.float().double())


# --- wrong inputs ----------------------------------------------------------------------------------------------------


V, O = torch.ones(2, 3, 8), torch.ones(4, 8, 3)  # noqa: E741
NAN, INF = float("nan"), float("inf")


def spoilt(tensor: torch.Tensor, entry: float) -> torch.Tensor:
    result = tensor.clone()
    result[1, 2, 0] = entry
    return result


WRONG: dict[str, tuple[Callable[[], HeadTransports], list[str]]] = {
    "value from numpy": (lambda: HeadTransports(V.numpy(), O, 2), ["value", "torch.Tensor", "ndarray", "as_tensor"]),
    "output a list": (lambda: HeadTransports(V, O.tolist(), 2), ["output", "torch.Tensor", "list"]),
    "integers": (lambda: HeadTransports(V.int(), O, 2), ["value", "floating-point", "int32", ".double()"]),
    "complex": (lambda: HeadTransports(V, O.to(torch.complex64), 2), ["output", "floating", "complex64", ".real"]),
    "meta value": (lambda: HeadTransports(V.to("meta"), O, 2), ["value", "holds numbers", "meta", "load the weights"]),
    "sparse output": (lambda: HeadTransports(V, O.to_sparse(), 2), ["output", "dense", "sparse_coo", ".to_dense()"]),
    "two axes": (lambda: HeadTransports(V[0], O, 2), ["value", "kv_head, d_head, d_model", "(3, 8)"]),
    "four axes": (lambda: HeadTransports(V, O[None], 2), ["output", "head, d_model, d_head", "(1, 4, 8, 3)"]),
    "no heads": (lambda: HeadTransports(V[:0], O[:0]), ["value", "non-empty", "(0, 3, 8)"]),
    "no width": (lambda: HeadTransports(V[:, :0], O[..., :0], 2), ["value", "non-empty", "(2, 0, 8)"]),
    "NaN": (lambda: HeadTransports(spoilt(V, NAN), O, 2), ["value", "nan at [1, 2, 0], the first of 1", "recompute"]),
    "inf": (lambda: HeadTransports(V, spoilt(O, -INF), 2), ["output", "finite", "-inf", "[1, 2, 0]"]),
    "groups forgotten": (lambda: HeadTransports(V, O), ["value", "4 heads", "groups=1", "got 2", "grouped-query"]),
    "groups wrong": (lambda: HeadTransports(V, O, 4), ["value", "groups=4", "got 2"]),
    "no groups": (lambda: HeadTransports(O.mT, O, 0), ["groups: ", "positive integer", "got 0", "per value head"]),
    "groups negative": (lambda: HeadTransports(V, O, -2), ["groups: ", "positive integer", "got -2"]),
    "groups a float": (lambda: HeadTransports(V, O, 2.0), ["groups: ", "positive integer", "got 2.0"]),
    "groups a truth": (lambda: HeadTransports(O.mT, O, True), ["groups: ", "positive integer", "got True"]),
    "groups a text": (lambda: HeadTransports(V, O, "2"), ["groups: ", "positive integer", "got '2'"]),
    "groups uneven": (lambda: HeadTransports(V, O, np.int64(3)), ["groups: ", "divides output's 4 heads", "3"]),
    "value transposed": (lambda: HeadTransports(V.mT, O, 2), ["value", "(2, 3, 8)", "got (2, 8, 3)", "transpose"]),
    "other d_model": (lambda: HeadTransports(V[..., :7], O, 2), ["value", "(2, 3, 8)", "got (2, 3, 7)"]),
    "other d_head": (lambda: HeadTransports(V[:, :2], O, 2), ["value", "(2, 3, 8)", "got (2, 2, 8)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_factors_are_refused(name: str, unchecked: None) -> None:
    build, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        build()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_groups_of_numpy_are_integers(unchecked: None) -> None:
    transports = HeadTransports(V, O, np.int64(2))
    assert type(transports.groups) is int and transports.groups == 2
    assert type(ConnectionWalk(torch.full((4, 6, 6), 1 / 6), V, O, groups=np.int32(2)).groups) is int


def test_gram_of_layers_of_different_width_is_refused() -> None:
    left, right = random_walk(0, d_model=8).transports, random_walk(0, d_model=9).transports
    with pytest.raises(ValueError, match="other: expected d_model 8, got 9"):
        left.gram(right)


def test_gram_of_layers_with_other_heads() -> None:
    """Only d_model must be shared."""
    left, right = random_walk(0, heads=3, d_head=2).transports, random_walk(1, heads=5, d_head=4).transports
    agree(left.gram(right), oracles.gram(dense(left), dense(right)))
