"""Atlas: connections that come from geometry, where vectors in local frames are carried along edges."""

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from cwlib.atlas_pair import Pair, Placed, defects, scale, system
from cwlib.checks import Check, compare
from cwlib.edges import EdgeWalk, Frames
from cwlib.holonomy import holonomy
from cwlib.synthetic import random_metrics, random_orthogonal


def _in_frames(pair: Pair, frames: Frames) -> Pair:
    r"""The pair after :math:`x_i \to g_ix_i`: transports become :math:`g_i\Omega_{ij}g_j^{-1}`, W stays."""
    return Pair(pair.weight, frames[:, None] @ pair.maps @ torch.linalg.inv(frames)[None, :])


def _moved(frames: Frames, field: Tensor) -> Tensor:
    """The field in other frames, token by token."""
    return torch.einsum("iab,ib->ia", frames, field)


def _rotations(angle: Tensor) -> Tensor:
    """Rotations of the plane by angles."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, -sin, sin, cos], -1).reshape(*angle.shape, 2, 2)


def laplacian_checks(name: str, pair: Pair) -> tuple[Check, Check, Check]:
    """The conditions of T4 for a symmetric P, the interval they give, and how far curvature lifts the spectrum."""
    found = defects(pair)
    worst = max(found[each] for each in ("stochastic", "reversible", "isometric", "inverse"))
    worst = max(worst, abs(scale(pair) - 1))  # other scales give a massive one (T4 f)
    values = 1 - torch.linalg.eigvalsh(EdgeWalk.from_dense(pair.weight, pair.maps).to_dense())
    outside = float(torch.maximum(-values, values - 2).max().clamp_min(0))
    return (
        Check(f"{name}: I - P is a connection Laplacian (T4)", "defects of S, R, M", "0", worst, 1e-10),
        Check(f"{name}: its spectrum lies in [0, 2] (T4 c)", "distance to [0, 2]", "0", outside, 1e-12),
        Check(
            f"{name}: curvature leaves no parallel field", "lowest eigenvalue", "0", float(values.min()), 1e-2, False
        ),
    )


@system(
    name="Geometric deep learning",
    paper="2104.13478",
    walk=r"$W_{ij} = a_{ij} / \sum_k a_{ik}$",
    transport=r"$\Omega_{ij} = F_i^{-1} R_{ij} F_j \mapsto g_i \Omega_{ij} g_j^{-1}$",
    remark="Covariant in all frames; orthogonal ones change no defect but 'constant', which speaks of frames alone.",
)
def geometric_deep_learning(seed: int) -> Placed:
    """Vectors in local frames, carried along edges and averaged (Bronstein et al. 2021); pi is the degree of a."""
    tokens, d_model = 6, 3
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    near = np.triu(rng.uniform(0.2, 1.0, (tokens, tokens)), 1)
    near = near + near.T
    frames = np.linalg.qr(rng.standard_normal((tokens, d_model, d_model))).Q
    carry = np.linalg.qr(rng.standard_normal((tokens, tokens, d_model, d_model))).Q
    output = np.empty_like(x)
    for i in range(tokens):
        received = np.zeros(d_model)
        for j in range(tokens):
            there = carry[i, j] if i < j else carry[j, i].T  # the way back undoes the way there
            received += near[i, j] * (there @ (frames[j] @ x[j]))
        output[i] = np.linalg.solve(frames[i], received / near[i].sum())

    field, local, weight = torch.from_numpy(x), torch.from_numpy(frames), torch.from_numpy(near)
    there = torch.from_numpy(carry)
    upper = torch.ones(tokens, tokens).triu(1)[:, :, None, None] > 0
    there = torch.where(upper, there, there.transpose(0, 1).mT)
    pair = Pair(weight / weight.sum(1, keepdim=True), local.mT[:, None] @ there @ local[None, :])
    orthogonal = random_orthogonal(seed, tokens, d_model)
    frame = random_metrics(seed, tokens, d_model) @ orthogonal
    moved = _in_frames(pair, frame)
    around = [holonomy(EdgeWalk.from_dense(p.weight, p.maps), [0, 2, 1, 4]) for p in (pair, moved)]
    traces = [torch.stack([torch.linalg.matrix_power(h, k).trace() for k in (1, 2, 3)]) for h in around]
    # a pair that meets no condition, so that the defects compared do not vanish
    noise = torch.from_numpy(0.3 * rng.standard_normal(pair.maps.shape))
    rough = Pair((3 * pair.weight).softmax(1), pair.maps + noise)
    before, after = (
        torch.tensor([defects(p)[k] for k in ("reversible", "isometric", "inverse", "flat")], dtype=torch.float64)
        for p in (rough, _in_frames(rough, orthogonal))
    )
    one = _in_frames(Pair.constant(pair.weight, orthogonal[0]), orthogonal)
    name, other = "Geometric deep learning", "in other frames"
    checks = (
        compare(
            f"{name}: a layer is covariant in all frames",
            ("P' g X", moved @ _moved(frame, field)),
            ("g P X", _moved(frame, pair @ field)),
        ),
        compare(f"{name}: holonomy keeps its conjugacy class (T8)", ("tr Hol^k", traces[0]), (other, traces[1])),
        compare(f"{name}: orthogonal frames keep R, M and flatness", ("defects", before), (other, after), 1e-10),
        Check(f"{name}: 'constant' is no invariant", f"defect {other}", "0", defects(one)["constant"], 1e-2, False),
        Check(
            f"{name}: 'isometric' needs the metric", f"defect {other}", "0", defects(moved)["isometric"], 1e-2, False
        ),
    )
    return Placed(pair, field, torch.from_numpy(output), checks=checks)


def icosahedron() -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """The 12 vertices on the unit sphere, and the 20 faces, each counterclockwise from outside."""
    golden = (1 + 5**0.5) / 2
    base = np.array([(0, s, t * golden) for s in (1, -1) for t in (1, -1)])
    vertices = np.concatenate([np.roll(base, k, 1) for k in range(3)])
    near = np.isclose(np.linalg.norm(vertices[:, None] - vertices[None], axis=-1), 2)
    triples = [(a, b, c) for a in range(12) for b in range(a) for c in range(b) if near[[a, b, c], [b, c, a]].all()]
    faces = [(a, b, c) if np.linalg.det(vertices[[a, b, c]]) > 0 else (a, c, b) for a, b, c in triples]
    return vertices / np.linalg.norm(vertices[0]), faces


@system(
    name="Gauge equivariant CNN",
    paper="1902.04615",
    walk=r"$W_{ij} = \frac{1}{3}$ for faces that share an edge",
    transport=r"$\Omega_{ij}$: unfold face $j$ about the edge into the plane of face $i$",
    remark="The Levi-Civita connection of the icosahedron: an isometric reversible walk, curved by pi/3 at a vertex.",
)
def gauge_equivariant_cnn(seed: int) -> Placed:
    """Tangent vectors on the 20 faces of an icosahedron, transported and averaged (Cohen et al. 2019); uniform pi."""
    vertices, faces = icosahedron()
    rng = np.random.default_rng(seed)
    x, tilt, output = rng.standard_normal((20, 2)), rng.uniform(0, 2 * np.pi, 20), np.zeros((20, 2))
    normals, frames = np.empty((20, 3)), np.empty((20, 3, 2))
    for i, (a, b, c) in enumerate(vertices[list(face)] for face in faces):
        normals[i] = np.cross(b - a, c - a) / np.linalg.norm(np.cross(b - a, c - a))
        first = Rotation.from_rotvec(tilt[i] * normals[i]).apply((b - a) / np.linalg.norm(b - a))
        frames[i] = np.stack([first, np.cross(normals[i], first)], 1)
    for i, face in enumerate(faces):
        for j, other in enumerate(faces):
            shared = [v for v in face if v in other]
            if len(shared) == 2:
                hinge = vertices[shared[1]] - vertices[shared[0]]
                hinge /= np.linalg.norm(hinge)
                fold = np.arctan2(hinge @ np.cross(normals[j], normals[i]), normals[j] @ normals[i])
                output[i] += frames[i].T @ Rotation.from_rotvec(fold * hinge).apply(frames[j] @ x[j]) / 3

    # In the plane: side k of a triangle runs at angle 2 pi k/3 to its first side, and the neighbour runs it backwards.
    side = {(face[k], face[(k + 1) % 3]): (i, k) for i, face in enumerate(faces) for k in range(3)}
    weight, angle = torch.zeros(2, 20, 20, dtype=torch.float64)
    for (a, b), (i, k) in side.items():
        j, m = side[b, a]
        weight[i, j], angle[i, j] = 1 / 3, (2 * k / 3 - 2 * m / 3 - 1) * torch.pi - float(tilt[i] - tilt[j])
    pair, field = Pair(weight, _rotations(angle)), torch.from_numpy(x)
    bend = _vertex_angles(EdgeWalk.from_dense(weight, pair.maps), side, faces)
    corners = vertices[np.array(faces)]
    ahead, behind = np.roll(corners, -1, 1) - corners, np.roll(corners, 1, 1) - corners
    lengths = np.linalg.norm(ahead, axis=-1) * np.linalg.norm(behind, axis=-1)
    missing = np.full(12, 2 * np.pi)
    np.subtract.at(missing, np.array(faces), np.arccos((ahead * behind).sum(-1) / lengths))

    frame = _rotations(torch.from_numpy(rng.uniform(0, 2 * np.pi, 20)))
    mixed = _in_frames(pair, frame) @ _moved(frame, field), pair @ field  # before the kernel, in both frames
    steered, shear = torch.tensor([[[1.0, -2.0], [2.0, 1.0]], [[1.0, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    values = 1 - torch.linalg.eigvalsh(EdgeWalk.from_dense(weight, pair.maps).to_dense()).flip(0)
    name, total = "Gauge equivariant CNN", torch.full((), 4 * torch.pi, dtype=torch.float64)

    def around_kernel(kernel: Tensor) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        return ("kernel P' g X", mixed[0] @ kernel.T), ("g kernel P X", _moved(frame, mixed[1] @ kernel.T))

    levels = torch.cat([values[:6].mean().expand(6), values[6:16].mean().expand(10)])
    checks = (
        compare(f"{name}: holonomy is the angle defect", ("angle", bend), ("2 pi - angles", torch.from_numpy(missing))),
        compare(f"{name}: Gauss-Bonnet", ("sum of holonomy angles", bend.sum()), ("4 pi", total)),
        compare(f"{name}: multiplicities 6, 10 of the sphere", ("spectrum", values[:16]), ("two levels", levels)),
        compare(f"{name}: kernels that commute with rotations are covariant", *around_kernel(steered)),
        compare(f"{name}: other kernels are not", *around_kernel(shear), holds=False),
        *laplacian_checks(name, pair),
    )
    return Placed(pair, field, torch.from_numpy(output), checks=checks)


def _vertex_angles(walk: EdgeWalk, side: dict[tuple[int, int], tuple[int, int]], faces: list) -> Tensor:
    """Angles by which transport counterclockwise around each vertex of the icosahedron turns a vector."""
    angles = []
    for vertex in range(12):
        out = next(b for a, b in side if a == vertex)
        star: list[int] = []
        while len(star) < 5:  # the face to the left of vertex -> out, then the next one counterclockwise
            star.append(side[vertex, out][0])
            out = next(v for v in faces[star[-1]] if v not in (vertex, out))
        around = holonomy(walk, star[::-1])  # a product of maps acts from the right
        angles.append(torch.atan2(around[1, 0], around[0, 0]))
    return torch.stack(angles)
