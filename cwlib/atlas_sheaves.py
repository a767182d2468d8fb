"""Atlas: cellular sheaves on graphs, whose restriction maps make the transports."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.linalg import inv, sqrtm
from torch import Tensor

from cwlib.atlas_geometry import icosahedron, laplacian_checks
from cwlib.atlas_pair import Maps, Pair, Placed, defects, scale, system
from cwlib.checks import Check, compare
from cwlib.edges import EdgeWalk, Frames
from cwlib.holonomy import holonomy
from cwlib.synthetic import random_metrics, random_orthogonal

Restrictions = Float[Tensor, "edge end d d"]
#: a prism: two triangles joined by three rungs, so that every token has three neighbours
PRISM = ((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5))


def _sheaf(restrict: Restrictions) -> tuple[Maps, Frames]:
    r"""Blocks :math:`D_i^{-1/2}F_i^TF_jD_j^{-1/2}` of I - Delta on a prism, each F at the common edge, and D^-1/2."""
    width = restrict.shape[-1]
    degree, blocks = restrict.new_zeros(6, width, width), restrict.new_zeros(6, 6, width, width)
    for (i, j), (at_i, at_j) in zip(PRISM, restrict, strict=True):
        degree[i] += at_i.T @ at_i
        degree[j] += at_j.T @ at_j
        blocks[i, j], blocks[j, i] = at_i.T @ at_j, at_j.T @ at_i
    values, vectors = torch.linalg.eigh(degree)
    root = (vectors * values.rsqrt()[:, None, :]) @ vectors.mT
    return root[:, None] @ blocks @ root[None, :], root


def _flattened(blocks: Maps) -> Float[Tensor, "row column"]:
    """Blocks as one matrix."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


@system(
    name="Neural sheaf diffusion",
    paper="2202.04579",
    walk=r"$W_{ij} = 1 / \mathrm{deg}\, i$ on edges",
    transport=r"$\Omega_{ij} = \mathrm{deg}\, i\; D_i^{-1/2} F_i^\top F_j D_j^{-1/2}$",
    remark="A connection Laplacian if restriction maps are orthogonal up to weights of edges and metrics of tokens.",
)
def neural_sheaf_diffusion(seed: int) -> Placed:
    """One linear step X - Delta X with a normalised sheaf Laplacian, general maps (Bodnar et al. 2022); uniform pi."""
    width = 2
    rng = np.random.default_rng(seed)
    restrict, x = rng.standard_normal((9, 2, width, width)), rng.standard_normal((6, width))
    at = {(edge[end], e): restrict[e, end] for e, edge in enumerate(PRISM) for end in (0, 1)}
    root = [inv(sqrtm(sum(f.T @ f for (v, _), f in at.items() if v == i))) for i in range(6)]
    output = np.empty_like(x)
    for i in range(6):
        laplacian = np.zeros(width)
        for e, edge in enumerate(PRISM):
            if i in edge:
                j = sum(edge) - i
                laplacian += at[i, e].T @ (at[i, e] @ root[i] @ x[i] - at[j, e] @ root[j] @ x[j])
        output[i] = x[i] - root[i] @ laplacian

    ends, maps = torch.tensor(PRISM), torch.from_numpy(restrict)
    joined = torch.zeros(6, 6, dtype=torch.float64)
    joined[ends[:, 0], ends[:, 1]] = joined[ends[:, 1], ends[:, 0]] = 1.0
    blocks, _ = _sheaf(maps)
    pair = Pair(joined / 3, 3 * blocks)
    values = 1 - torch.linalg.eigvalsh(_flattened(blocks))
    outside = float(torch.maximum(-values, values - 2).max().clamp_min(0))

    # sqrt(w_e) O_ie B_i: orthogonal for the metric B_i^T B_i of the token. Tokens are rescaled by the root of their
    # degree, which turns D^-1/2 L D^-1/2 into D^-1 L and makes up for degrees that differ
    load, own = torch.from_numpy(rng.uniform(0.5, 2.0, 9)), random_metrics(seed, 6, width)
    turned = random_orthogonal(seed, 18, width).reshape(9, 2, width, width)
    near = joined.clone()
    near[ends[:, 0], ends[:, 1]] = near[ends[:, 1], ends[:, 0]] = load
    rescaled = (near.sum(1).outer(near.sum(1)).sqrt() / near.where(near > 0, 1.0))[:, :, None, None]
    weighted, _ = _sheaf(load.sqrt()[:, None, None, None] * turned @ own[ends])
    metric = Pair(near / near.sum(1, keepdim=True), rescaled * weighted)
    worst = max(defects(metric)[each] for each in ("stochastic", "reversible", "isometric", "inverse"))
    worst = max(worst, abs(scale(metric) - 1))
    # C_e g_i^-1: the global sections are x_i = g_i c
    flat, roots = _sheaf(maps[:, :1] @ torch.linalg.inv(own)[ends])
    levels, modes = torch.linalg.eigh(_flattened(flat))
    kernel = modes[:, 1 - levels < 1e-9]
    sections = torch.linalg.qr((torch.linalg.inv(roots) @ own).flatten(0, 1)).Q
    projections = ("on the kernel", kernel @ kernel.T), ("on D^1/2 g c", sections @ sections.T)
    curve, name = _class_distances(rng), "Neural sheaf diffusion"
    last = curve.groupby("series")["y"].last()
    checks = (
        Check(f"{name}: maps orthogonal up to metrics: a connection Laplacian", "S, R, M if D^-1", "0", worst, 1e-10),
        Check(f"{name}: general maps are no isometries", "defect", "0", defects(pair)["isometric"], 1e-2, False),
        Check(f"{name}: all the same the spectrum lies in [0, 2]", "distance to [0, 2]", "0", outside, 1e-12),
        compare(f"{name}: its kernel is the global sections", *projections, 1e-8),
        Check(f"{name}: identity transports forget two classes", "distance", "0", float(last["identity"]), 1e-4),
        Check(f"{name}: transports -1 across classes keep them", "distance", "0", float(last["signed"]), 1.0, False),
    )
    return Placed(pair, torch.from_numpy(x), torch.from_numpy(output), checks=checks, curve=curve)


def _class_distances(rng: np.random.Generator) -> pd.DataFrame:
    """Distance of two class means over the field's size, step by lazy step, on a graph that mostly joins classes.

    A step is X - (I - P) X / 2 with P = D^-1 A, so that without transports the limit is constant, not sqrt(deg).
    """
    label = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(5)
    across = label.outer(label) < 0
    drawn = torch.from_numpy(rng.random((10, 10))) < torch.where(across, 0.5, 0.2)
    near = (drawn.triu(1) | torch.ones(9, dtype=torch.bool).diag(1)).double()  # a path joins all tokens
    near = near + near.T
    weight, start = near / near.sum(1, keepdim=True), torch.from_numpy(rng.standard_normal((10, 1)))
    rows = []
    for series, maps in (("identity", torch.ones_like(near)), ("signed", label.outer(label))):
        pair, field = Pair(weight, maps[..., None, None]), start
        for step in range(101):
            apart = field[label > 0].mean() - field[label < 0].mean()
            rows.append({"x": step, "y": float(apart.abs() / field.square().mean().sqrt()), "series": series})
            field = (field + pair @ field) / 2
    return pd.DataFrame(rows)


@system(
    name="Sheaf network with connection Laplacian",
    paper="2206.08702",
    walk=r"$W_{ij} = 1 / \mathrm{deg}\, i$ on edges",
    transport=r"$\Omega_{ij} = \sqrt{d_i / d_j}\, U V^\top,\ U S V^\top = O_i^\top O_j,\ d$ the degrees",
    remark="Procrustes makes the transports isometries, if all degrees are alike as here; else in the metrics 1 / deg.",
)
def connection_sheaf_network(seed: int) -> Placed:
    """Local PCA of the features, aligned along edges; one linear step X - Delta X (Barbero et al. 2022); uniform pi."""
    vertices, faces = icosahedron()  # a graph in which all tokens have five neighbours
    rng = np.random.default_rng(seed)
    lift = np.linalg.qr(rng.standard_normal((5, 3))).Q
    # noise tells the two equal variances of a tangent plane apart, so that its frame is defined
    points, x = vertices @ lift.T + 0.005 * rng.standard_normal((12, 5)), rng.standard_normal((12, 2))
    joined = np.zeros((12, 12), bool)
    for face in faces:
        joined[face, np.roll(face, 1)] = True
    planes = []
    for i in range(12):
        left = np.linalg.svd((points[joined[i]] - points[i]).T)[0][:, :2]
        planes.append(left * np.sign(left[np.abs(left).argmax(0), [0, 1]]))
    output = np.empty_like(x)
    for i in range(12):
        laplacian = joined[i].sum() * x[i]
        for j in np.flatnonzero(joined[i]):
            u, _, vt = np.linalg.svd(planes[i].T @ planes[j])
            laplacian = laplacian - u @ vt @ x[j]
        output[i] = x[i] - laplacian / joined[i].sum()  # D^-1/2 L D^-1/2: all degrees are five

    cloud, adjacency, field = torch.from_numpy(points), torch.from_numpy(joined).double(), torch.from_numpy(x)
    step = (cloud[None, :] - cloud[:, None]) * adjacency[..., None]
    frames = torch.linalg.eigh(step.mT @ step).eigenvectors.flip(-1)[..., :2]
    largest = frames.gather(1, frames.abs().argmax(1, keepdim=True))
    frames = frames * largest.sign()
    overlap = frames.mT[:, None] @ frames[None, :]
    squares, vectors = torch.linalg.eigh(overlap.mT @ overlap)
    polar = overlap @ (vectors / squares.sqrt()[..., None, :]) @ vectors.mT
    weight = adjacency / adjacency.sum(1, keepdim=True)
    pair, walk = Pair(weight, polar), EdgeWalk.from_dense(weight, polar)
    bend = torch.stack([(holonomy(walk, face).trace() / 2).arccos() for face in faces])
    name, total = "Sheaf network with connection Laplacian", torch.full((), 4 * torch.pi, dtype=torch.float64)
    raw = defects(Pair(weight, overlap))["isometric"]
    checks = (
        compare(f"{name}: Gauss-Bonnet", ("sum of triangle holonomies", bend.sum()), ("4 pi", total), 1e-10),
        Check(f"{name}: frames alone give no isometry", "defect of O_i^T O_j", "0", raw, 1e-2, False),
        *laplacian_checks(name, pair),
    )
    return Placed(pair, field, torch.from_numpy(output), checks=checks)
