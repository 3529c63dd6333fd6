"""`hf-sparse-prr kernels`: build a kernel repo, check what was built, publish it."""

from __future__ import annotations

import json
import runpy
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hf_sparse_prr import kernel_check, kernel_loader
from hf_sparse_prr.commands.terminal import EXIT_DIFFERENT, EXIT_USAGE, Bar, CommandError, Commands, one_line_errors
from hf_sparse_prr.kernel_check import Finding, KernelRepo

EXIT_UPLOAD = 4  # the Hub didn't take it
kernels = Commands(help="Build, check and publish a kernel repo.", no_args_is_help=True)
Repo = Annotated[Path, typer.Argument(help="A folder with a build.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Tests = Annotated[bool, typer.Option("--tests", help="Run the repo's tests through the built copy as well: minutes.")]


@kernels.callback()
def root() -> None:
    """Build, check and publish a kernel repo."""


@kernels.command(epilog="Example: hf-sparse-prr kernels build hub_kernels/sparse-prr --cuda")
def build(
    repo: Repo,
    cuda: Annotated[bool, typer.Option("--cuda", help="Also compile the variant of this torch: needs nvcc.")] = False,
    as_json: Json = False,
) -> None:
    """Write build/ of a kernel repo, what is published: a folder for each variant. The last one stays if a build fails.

    Exit codes: 0 done, 2 not a kernel repo, or it can't be built here, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        script = _read(repo).folder.parent / "build.py"
        if not script.is_file():
            raise CommandError(f"expected {script}, which builds: kernels are built in a checkout", EXIT_USAGE)
        _refuse_cuda(cuda)
        with Bar(notes) as bar:
            bar("building", 0, None)
            try:
                folders = runpy.run_path(str(script))["build"](repo, cuda=cuda)
            except ValueError as error:
                raise CommandError(error, EXIT_USAGE) from error
            except subprocess.CalledProcessError as error:
                raise CommandError("nvcc failed, see above", EXIT_USAGE) from error
    names = [str(folder) for folder in folders]
    print(json.dumps({"variants": names}, indent=2) if as_json else "\n".join(names))


@kernels.command(epilog="Example: hf-sparse-prr kernels check hub_kernels/sparse-prr --tests")
def check(repo: Repo, tests: Tests = False, as_json: Json = False) -> None:
    """Look at a repo and its build/: one version, the card, a variant for each backend, all of these sources; load and
    run the one that fits this machine.

    Exit codes: 0 all is well, 1 something isn't, 2 not a kernel repo, 130 stopped.
    """
    with one_line_errors(Console(stderr=True)):
        read = _read(repo)
        found = _show(_findings(read, tests, every=False), as_json)
    if found:
        raise typer.Exit(EXIT_DIFFERENT)


@kernels.command(epilog="Example: hf-sparse-prr kernels bump hub_kernels/sparse-prr")
def bump(repo: Repo) -> None:
    """Raise the version where an op takes or gives something else: in build.toml, metadata.json and the library.

    Exit codes: 0 done, 2 not a kernel repo in a checkout of this library.
    """
    with one_line_errors(Console(stderr=True)):
        read = _read(repo)
        library = read.folder.resolve().parents[1] / "hf_sparse_prr" / Path(kernel_loader.__file__).name
        try:
            version = kernel_check.raise_version(read, library)
        except ValueError as error:
            raise CommandError(error, EXIT_USAGE) from error
    print(f"{read.general['name']} is version {version} now; build and check it again")


@kernels.command(epilog="Example: hf-sparse-prr kernels publish hub_kernels/sparse-prr")
def publish(
    repo: Repo,
    really: Annotated[bool, typer.Option("--upload", help="Upload it; otherwise say what would be.")] = False,
    tests: Annotated[bool, typer.Option(help="Run the repo's tests through the built copy.")] = True,
) -> None:
    """Check everything, then upload CARD.md, benchmarks and build/ to the repo of build.toml, as the branch of its
    version. Without --upload nothing leaves this machine.

    Exit codes: 0 done, 1 something isn't right: nothing was uploaded, 2 not a kernel repo, 4 the Hub didn't take
    it, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        read = _read(repo)
        if _show(_findings(read, tests, every=True), False):
            raise CommandError(
                "expected all of the above to be well, got problems: nothing was uploaded", EXIT_DIFFERENT
            )
        names = ", ".join(["CARD.md", *read.beside, *(variant.name for variant in read.variants)])
        if not really:
            print(f"would upload {names} to {read.repo_id}, branch v{read.version}; --upload does")
            return
        with Bar(notes) as bar:
            bar(f"uploading to {read.repo_id}", 0, None)
            try:
                address = kernel_check.upload(read)
            except ValueError as error:
                raise CommandError(error, EXIT_UPLOAD) from error
    print(f"uploaded {names}: {address}")


def _read(folder: Path) -> KernelRepo:
    try:
        return kernel_check.read_repo(folder)
    except ValueError as error:
        raise CommandError(error, EXIT_USAGE) from error


def _refuse_cuda(cuda: bool) -> None:
    if cuda:
        import torch

        if torch.version.cuda is None:
            raise CommandError(f"--cuda: expected a CUDA build of torch, got {torch.__version__}", EXIT_USAGE)


def _findings(repo: KernelRepo, tests: bool, every: bool) -> Iterable[Finding]:
    yield from kernel_check.check(repo, every=every)
    if tests:
        with Bar(Console(stderr=True)) as bar:
            bar("running the repo's tests", 0, None)
            yield kernel_check.run_tests(repo)


def _show(findings: Iterable[Finding], as_json: bool) -> int:
    """Print each as it comes; returns how many are problems."""
    out, seen = Console(), []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            verdict = "[green]ok[/]" if finding.problem is None else f"[bold red]problem:[/] {escape(finding.problem)}"
            out.print(f"{escape(finding.what)}: {verdict}", soft_wrap=True, highlight=False)
    if as_json:
        document: dict[str, Any] = {"findings": [{"what": each.what, "problem": each.problem} for each in seen]}
        print(json.dumps(document, indent=2))
    return sum(finding.problem is not None for finding in seen)
