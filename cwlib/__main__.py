"""The command line: `python -m cwlib`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from cwlib.catalogue import CATALOGUE, CheckpointError, cache_dir, cached_folder, entry, problems
from cwlib.fetch import fetch

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Transformers as connection walks.")
checkpoints = typer.Typer(help="List, fetch and verify the catalogue's checkpoints.")
app.add_typer(checkpoints, name="checkpoints")

Names = Annotated[list[str] | None, typer.Argument(help="Names of the catalogue.")]
All = Annotated[bool, typer.Option("--all", help="All checkpoints of the catalogue.")]


@app.callback()
def main() -> None:
    """Transformers as connection walks: attention, transport and connection Laplacians of real checkpoints."""


@checkpoints.callback(invoke_without_command=True)
def list_checkpoints(context: typer.Context) -> None:
    """List the checkpoints of the catalogue."""
    if context.invoked_subcommand is not None:
        return
    row = "{:<19}{:<9}{:>11}  {:<10}{:<19}{:>12}  {:<8}{}"
    print(row.format("name", "kind", "parameters", "precision", "licence", "download/MB", "cached", "sha256"))
    for name, item in CATALOGUE.items():
        folder = cached_folder(name)
        state = ("damaged" if problems(folder) else "yes") if folder.exists() else "no"
        size = f"{item.download_bytes / 1e6:.0f}"
        parameters = f"{item.parameters / 1e6:.1f}M"
        print(row.format(name, item.kind, parameters, item.precision, item.licence, size, state, item.sha256[:12]))
    print(f"cache: {cache_dir()}")


@checkpoints.command("fetch")
def fetch_checkpoints(names: Names = None, all_: All = False) -> None:
    """Download, check and convert checkpoints; repairs damaged ones, and leaves intact ones alone."""
    with _clean_errors():
        for name in _chosen(names, all_):
            print(f"{name}: {fetch(name)}")


@checkpoints.command("verify")
def verify_checkpoints(names: Names = None, all_: All = False) -> None:
    """Compare every file of fetched checkpoints with its recorded SHA-256."""
    with _clean_errors():
        failed = False
        for name in _chosen(names, all_):
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
    except (ValueError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app(prog_name="python -m cwlib")
