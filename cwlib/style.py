"""How figures look and how they are saved: pure functions from choices to rc dictionaries, after tueplots.

Trained checkpoints are drawn in the colours of Okabe and Ito, null models in grey. Encoders and decoders
differ in marker and line style too, so that no figure rests on colour alone. Saved files are byte-stable on
one machine: fonts are the ones matplotlib ships, and neither dates nor versions go into the files (the manifest
holds the versions).
"""

import hashlib
import io
import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from cwlib.files import write_atomically

WIDTHS = {"column": 3.3, "text": 6.8}
"""Widths in inches of one column and of the whole page."""

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = PALETTE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""The palette of Okabe and Ito (2008) without its yellow, which a white page swallows."""

NULL = {"color": "#8C8C8C", "marker": "", "linestyle": ":"}
"""Plot keywords of every null model."""

_LINE = {"encoder": "-", "decoder": "--"}
_MARKERS = {"encoder": "os*h", "decoder": "^vDP"}
_CATALOGUE = {
    "minilm-l6": (BLUE, "o"),
    "mpnet-base": (SKY, "s"),
    "smollm2-135m": (ORANGE, "^"),
    "gemma3-270m": (VERMILLION, "D"),
    "qwen2.5-coder-0.5b": (GREEN, "v"),
    "qwen2.5-coder-1.5b": (PURPLE, "P"),
}
_RECORDED = ("matplotlib", "numpy", "torch", "transformers")


def rc(width: str = "column", aspect: float = 0.62) -> dict[str, Any]:
    """Return the rc parameters of a figure that is printed at its own size, unscaled.

    Parameters
    ----------
    width : {"column", "text"}
        3.3 or 6.8 inches.
    aspect : float
        Height over width, positive.

    Raises
    ------
    ValueError
        If `width` is unknown or `aspect` is not positive.
    """
    if width not in WIDTHS:
        raise ValueError(f"width: expected one of {sorted(WIDTHS)}, got {width!r}; choose one of them")
    if not aspect > 0:
        raise ValueError(f"aspect: expected a positive height over width, got {aspect!r}; 0.62 is the default")
    return {
        "figure.figsize": (WIDTHS[width], aspect * WIDTHS[width]),
        "figure.constrained_layout.use": True,
        "figure.dpi": 120,
        "savefig.dpi": 200,
        # "tight" would crop, and a cropped figure no longer has the width of its column
        "savefig.bbox": None,
        "font.family": "DejaVu Sans",
        "mathtext.fontset": "dejavusans",
        "text.usetex": False,
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
        "axes.prop_cycle": cycler(color=PALETTE),
        "image.cmap": "cividis",
        # TrueType outlines, so that text in the PDF stays text
        "pdf.fonttype": 42,
        "svg.hashsalt": "cwlib",
    }


def checkpoint(name: str, kind: str) -> dict[str, str]:
    """Return the plot keywords (color, marker, linestyle) of a checkpoint, the same in every figure.

    The six checkpoints of the catalogue have fixed, distinct styles. Any other name is hashed to one, which
    does not depend on what else is drawn; two such names may share a style.

    Parameters
    ----------
    name : str
    kind : {"encoder", "decoder"}

    Raises
    ------
    ValueError
        If `kind` is neither "encoder" nor "decoder".
    """
    if kind not in _LINE:
        raise ValueError(f"kind: expected one of {sorted(_LINE)}, got {kind!r}; read it from the checkpoint")
    choice = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    markers = _MARKERS[kind]
    hashed = PALETTE[choice % len(PALETTE)], markers[choice // len(PALETTE) % len(markers)]
    color, marker = _CATALOGUE.get(name, hashed)
    return {"color": color, "marker": marker, "linestyle": _LINE[kind]}


def figures_dir() -> Path:
    """Return the folder of figures: $CWLIB_FIGURES, else `figures/` of the repository of this package.

    Tables belong in its subfolder `data`. The folder is created.

    Raises
    ------
    ValueError
        If the variable is unset and the package is not installed from a repository.
    """
    if chosen := os.environ.get("CWLIB_FIGURES"):
        folder = Path(chosen).absolute()
    else:
        root = Path(__file__).resolve().parents[1]
        if not (root / "pyproject.toml").is_file():
            raise ValueError(
                f"CWLIB_FIGURES: expected a folder for figures, since cwlib in {root} is not part of its "
                "repository, but it is unset; set it, or install cwlib with `pip install -e .`"
            )
        folder = root / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_figure(fig: Figure, name: str, folder: Path | None = None, notebook: str | None = None) -> list[Path]:
    """Write `name`.pdf and `name`.png (200 dpi), and record both in manifest.json beside them.

    Parameters
    ----------
    fig : matplotlib.figure.Figure
    name : str
        Lower-case letters, digits and underscores.
    folder : Path, optional
        Default: `figures_dir()`.
    notebook : str, optional
        The notebook that makes the figure. Default: $CWLIB_NOTEBOOK, which `cwlib.chain` sets, else the
        notebook that the manifest names already.

    Returns
    -------
    list of Path
        The PDF and the PNG.

    Raises
    ------
    ValueError
        If `name` is not made of the characters above.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"name: expected lower-case letters, digits and _, got {name!r}; no folder, no suffix")
    folder = figures_dir() if folder is None else Path(folder)
    written = {
        folder / f"{name}.pdf": {"CreationDate": None, "Creator": "cwlib", "Producer": "matplotlib"},
        folder / f"{name}.png": {"Software": None},
    }
    hashes = {}
    for path, embedded in written.items():
        buffer = io.BytesIO()
        fig.savefig(buffer, format=path.suffix[1:], dpi=200, metadata=embedded)
        write_atomically(path, buffer.getvalue())
        hashes[path.name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    manifest = read_manifest(folder)
    previous = manifest.get(name, {}).get("notebook")
    threads = os.environ.get("OMP_NUM_THREADS")
    manifest[name] = {
        "notebook": notebook or os.environ.get("CWLIB_NOTEBOOK") or previous,
        "sha256": hashes,
        "packages": {package: metadata.version(package) for package in _RECORDED},
        "threads": int(threads) if threads else None,
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(folder / "manifest.json", text.encode())
    return list(written)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of figures: name -> notebook, sha256 by file, packages, threads."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        [entry["sha256"].items() for entry in manifest.values()]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"folder: {path} is damaged ({error}); restore it, or delete it and make the figures"
        ) from error
    return manifest
