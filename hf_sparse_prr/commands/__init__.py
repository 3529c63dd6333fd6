"""The command line's subcommands. To add one: a file here with a function, and one line at the end of this file."""

import typer

from hf_sparse_prr.commands import ablation, bench, doctor, generate, kernels, profile, tune

app = typer.Typer(
    help="Sparse decoding for Transformers models: predict, reuse, repair.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def root() -> None:
    """Sparse decoding for Transformers models: predict, reuse, repair."""


app.command()(generate.generate)
app.command()(doctor.doctor)
app.command()(tune.tune)
app.command()(profile.profile)
bench.bench.command()(ablation.ablation)
app.add_typer(bench.bench, name="bench")
app.add_typer(kernels.kernels, name="kernels")
