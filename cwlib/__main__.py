"""The command line: `python -m cwlib`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from cwlib.catalogue import CATALOGUE, CheckpointError, cache_dir, cached_folder, entry, problems
from cwlib.fetch import fetch

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Transformers as connection walks: attention, transport and connection Laplacians of real checkpoints."""


@app.command()
def checkpoints(
    action: Annotated[Literal["list", "fetch", "verify"], typer.Argument(help="What to do.")] = "list",
    names: Annotated[list[str] | None, typer.Argument(help="Names of the catalogue.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All checkpoints of the catalogue.")] = False,
) -> None:
    """List the catalogue's checkpoints; fetch or repair some; verify the SHA-256 of every file of some."""
    with _clean_errors():
        if action == "list":
            _list()
        elif action == "fetch":
            for name in _chosen(names, all_):
                print(f"{name}: {fetch(name)}")
        else:
            _verify(_chosen(names, all_))


@app.command()
def study(
    profile: Annotated[
        str, typer.Option(help="smoke (tiny random models), wheels (the catalogue) or hub (the paper's range).")
    ] = "wheels",
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Instead of a profile: a name, folder, .gguf or hub id; repeatable.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="Your own file or folder of .txt/.md files.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the tables go.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Recompute every row.")] = False,
    workers: Annotated[int, typer.Option(help="Processes on this machine, each with whole checkpoints.")] = 1,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler, tcp://host:port.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it will take, and where.")] = False,
) -> None:
    """Measure checkpoints on texts, beside nulls, into a folder of tables; what is current is not computed again."""
    # Imported here, so that the catalogue answers at once.
    from cwlib import corpus, style
    from cwlib import study as module

    with _clean_errors():
        if folder is None:
            # The committed tables are those of the profile wheels on the built-in corpus; anything else goes elsewhere.
            committed = profile == "wheels" and not checkpoint and texts is None
            other = Path("build") / ("hub" if profile == "hub" and not checkpoint else "study")
            folder = style.figures_dir() / "data" if committed else other
        passages = None if texts is None else corpus.read_passages(texts, "texts")
        if dry_run:
            print(module.preview(checkpoint or profile, passages, device))
            return
        options = {"workers": workers, "scheduler": scheduler}
        incomplete = None
        try:
            table = module.run(checkpoint or profile, folder, passages, fresh, device, **options)
        except module.Incomplete as error:
            incomplete, table = error, error.table
        names = set(table["checkpoint"])
        print(f"{len(table)} rows of {len(names)} checkpoints in {folder}")
        for name, commit in module.commits(folder).items():
            if name in names:
                print(f"  {name}: commit {commit}")
        if incomplete:
            raise incomplete


@app.command()
def verify(
    profile: Annotated[str, typer.Option(help="The profile that was measured.")] = "wheels",
    folder: Annotated[Path | None, typer.Option(help="Where the tables are; figures/data by default.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Every cell instead of a sample.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "cpu",
) -> None:
    """Recompute a sample of the committed numbers and compare; exit status 1 if any differs."""
    from cwlib import style
    from cwlib import verify as module

    with _clean_errors():
        found = module.verify(style.figures_dir() / "data" if folder is None else folder, profile, full, seed, device)
        print(found.report())
    if not found.reproduced:
        raise typer.Exit(1)


@app.command()
def measure(
    source: Annotated[str, typer.Argument(help="A name, folder, .gguf file or hub id.")],
    text: Annotated[Path, typer.Option(help="A file with the text.")],
    out: Annotated[Path, typer.Option(help="The table, as CSV.")] = Path("table.csv"),
    figure: Annotated[Path | None, typer.Option(help="A figure over depth: .png, .pdf or .svg.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="A name of cwlib.METRICS; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    offload: Annotated[bool, typer.Option("--offload", help="Leave weights that do not fit on the disk.")] = False,
) -> None:
    """Measure one checkpoint on one text: every layer, beside Gaussian maps of the same shape, into a table."""
    from cwlib import corpus, single
    from cwlib.checkpoints import open_checkpoint

    with _clean_errors():
        if figure is not None and figure.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"figure: expected a .png, .pdf or .svg file, got {figure}")
        for option, path in (("out", out), ("figure", figure)):  # before the work, not after it
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir() or not os.access(path.parent, os.W_OK):
                    raise ValueError(f"{option}: expected a file in a folder that can be written to, got {path}")
        if text.is_dir():
            raise ValueError(f"text: expected one file, got the folder {text}; `study --texts` takes folders")
        [passage] = corpus.read_passages(text, "text")
        checkpoint = open_checkpoint(source, device=device, dtype=dtype, offload=offload)
        table = single.collect(
            single.measured_layers(checkpoint, passage.text, metric and list(dict.fromkeys(metric))), out
        )
        print(f"{checkpoint.name}, trained, mean gauge; cwlib.METRICS[name].description says what each line is")
        print(single.report(table))
        print(f"{len(table)} rows in {out}: these, and the norm gauge, and the same layers with Gaussian maps")
        if figure is not None:
            single.draw(table, figure)
            print(f"figure in {figure}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what would fail on it; exit status 1 if something that users do would."""
    from cwlib import doctor as module

    with _clean_errors():
        sound = module.report(module.examine(), lambda line: print(line, flush=True))
    if not sound:
        raise typer.Exit(1)


@app.command()
def bench(
    profile: Annotated[str, typer.Option(help="full, or smoke (tiny sizes, to see that it works).")] = "full",
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    folder: Annotated[Path, typer.Option(help="Where bench.csv and bench.json go.")] = Path("build") / "bench",
) -> None:
    """Time cwlib beside other ways to the same numbers, in one run; a table of ratios."""
    from cwlib import bench as module
    from cwlib import cost
    from cwlib.checkpoints import require_device
    from cwlib.timing import machine

    with _clean_errors():
        require_device(device)
        try:
            table = module.run(
                profile,
                device,
                report=lambda part: print(f"measured: {part}", flush=True),
                keep=lambda rows: cost.write_partial(rows, folder),
            )
        except RuntimeError as error:  # of a process that measured memory: its traceback ends in what was wrong
            first, *rest = str(error).splitlines()
            raise ValueError(" ".join([first, *rest[-1:]]) + f"; rows so far are in {folder}") from error
        cost.write(table, folder, machine(device))
        print(cost.report(table))
        print(f"bench.csv and bench.json are in {folder}")


def _list() -> None:
    row = "{:<19}{:<9}{:>10}  {:<10}{:<19}{:>11}  {:<8}{}".format
    print(row("name", "kind", "parameters", "precision", "licence", "download/MB", "cached", "sha256"))
    for name, item in CATALOGUE.items():
        folder = cached_folder(name)
        cached = ("damaged" if problems(folder) else "yes") if folder.exists() else "no"
        sizes = f"{item.parameters / 1e6:.1f}M", f"{item.download_bytes / 1e6:.0f}"
        print(row(name, item.kind, sizes[0], item.precision, item.licence, sizes[1], cached, item.sha256[:12]))
    print(f"cache: {cache_dir()}")


def _verify(names: list[str]) -> None:
    failed = False
    for name in names:
        folder = cached_folder(name)
        faults = problems(folder, full=True) if folder.exists() else ["not fetched"]
        failed = failed or bool(faults)
        print(f"{name}: {'; '.join(faults) if faults else 'intact'}")
    if failed:
        raise CheckpointError("`python -m cwlib checkpoints fetch NAME` fetches or repairs a checkpoint")


def _chosen(names: list[str] | None, all_: bool) -> list[str]:
    if bool(names) == all_:
        raise ValueError(f"expected names or --all; the names are {', '.join(CATALOGUE)}")
    return list(CATALOGUE) if all_ else [entry(name).name for name in names or ()]


@contextlib.contextmanager
def _clean_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, CheckpointError) as error:
        hint = "; what was finished is kept: mend this and run again" if isinstance(error, OSError) else ""
        typer.echo(f"error: {error}{hint}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("stopped; what was finished is kept", err=True)
        raise typer.Exit(130) from error


if __name__ == "__main__":
    app(prog_name="python -m cwlib")
