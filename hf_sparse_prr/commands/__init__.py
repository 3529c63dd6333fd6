"""The command line's subcommands. To add one: a file here with a function, and one line at the end of this file."""

from hf_sparse_prr.commands import (
    ablation,
    bench,
    doctor,
    evaluate,
    generate,
    hit_rates,
    kernels,
    profile,
    speculation,
    train_tiny,
    tune,
)
from hf_sparse_prr.commands.terminal import Commands

app = Commands(
    help="Sparse decoding for Transformers models: predict, reuse, repair.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def root() -> None:
    """Sparse decoding for Transformers models: predict, reuse, repair."""


# In the help, the epilog is an example; one that can't be read fails tests/test_cli_help.py.
_ASK = 'hf-sparse-prr generate --model path/to/llama --file report.txt --prompt "Summary:" --budget 2048'
app.command(epilog=f"Example: {_ASK}")(generate.generate)
app.command(epilog="Example: hf-sparse-prr doctor --hub")(doctor.doctor)
app.command(epilog="Example: hf-sparse-prr tune --device cuda:1")(tune.tune)
app.command(epilog="Example: hf-sparse-prr profile --shape llama-3.1-8b --device cuda")(profile.profile)
bench.bench.command(epilog="Example: hf-sparse-prr bench ablation --context 16K,128K --device cuda")(ablation.ablation)
_PAYS = "hf-sparse-prr bench speculation --context 16K,128K --device cuda"
bench.bench.command(epilog=f"Example: {_PAYS}")(speculation.speculation)
app.command(epilog="Example: hf-sparse-prr train-tiny --family llama --minutes 6 --device cuda")(train_tiny.train_tiny)
_EVAL = "hf-sparse-prr eval --model tiny:llama --task needle_multi_query,tracking --length 2K --episodes 4"
app.command(name="eval", epilog=f"Example: {_EVAL}")(evaluate.evaluate_command)
app.command(epilog="Example: hf-sparse-prr hit-rates --model smollm2 --length 2K --budget 512")(hit_rates.hit_rates)
app.add_typer(bench.bench, name="bench")
app.add_typer(kernels.kernels, name="kernels")
