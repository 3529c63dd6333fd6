"""Reading a command line of hf-sparse-prr without running it."""

import typer

from hf_sparse_prr.commands import app


def parse(words):
    """Let typer read the arguments of a command; it raises where it can't."""
    command, name = typer.main.get_command(app), "hf-sparse-prr"
    context = None
    while hasattr(command, "commands"):
        group = command
        context = group.context_class(group, info_name=name, parent=context)
        name, command, words = words[0], group.commands[words[0]], words[1:]
    command.make_context(name, list(words), parent=context)
