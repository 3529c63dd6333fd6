"""Every command says what it is for, with an example that it takes, its exit codes, and --json for figures."""

import inspect
import shlex

import pytest
import typer
from commandline import parse
from typer.testing import CliRunner

from hf_sparse_prr import launch_arguments
from hf_sparse_prr.commands import app

WITHOUT_JSON = {"kernels bump", "kernels publish"}  # one line each


def leaves(command, path=()):
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*path, name))
    if not hasattr(command, "commands"):
        yield pytest.param(command, path, id=" ".join(path))


EVERY = list(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("command, path", EVERY)
def test_a_command_has_an_example_that_it_takes(command, path):
    assert command.epilog.startswith("Example: hf-sparse-prr " + " ".join(path))
    parse(shlex.split(command.epilog.removeprefix("Example: "))[1:])


@pytest.mark.parametrize("command, path", EVERY)
def test_its_help_shows_the_example_and_the_exit_codes(command, path):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Exit codes: 0 " in result.stdout and "Example: hf-sparse-prr" in result.stdout
    assert "--json" in result.stdout or " ".join(path) in WITHOUT_JSON
    assert "Exit codes" in inspect.getdoc(command.callback)


@pytest.mark.parametrize("command, path", EVERY)
def test_its_help_fills_the_lines(command, path):
    """Not those of the source, which a narrow terminal would break once more."""
    assert all("\n" not in paragraph for paragraph in command.help.split("\n\n"))
    words = inspect.getdoc(command.callback).split()
    assert command.help.split() == words


def test_the_launchers_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        launch_arguments.parse(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "accelerate launch -m hf_sparse_prr.launch" in shown and "exit codes: 0 done" in shown
