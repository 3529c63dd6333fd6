"""Pages of docs/: their Python runs, their commands are what the programs take, their links lead somewhere."""

import json
import re
import shlex
import unicodedata
from pathlib import Path

import pytest
import torch
from commandline import parse
from models import prompt, tiny, tiny_llama
from typer.testing import CliRunner

from hf_sparse_prr import SparseConfig, launch_arguments, patches, unpatch_model
from hf_sparse_prr.commands import app
from hf_sparse_prr.launch_prompts import PromptFile

pytestmark = pytest.mark.compat
ROOT = Path(__file__).parents[1]
RUN = (
    "concepts",
    "configuration",
    "caches",
    "kernels",
    "adding",
    "troubleshooting",
)  # quality.md: test_docs.py, results.md: below
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
PAGES += [*(ROOT / "hub_kernels").glob("*/*.md")]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_top_to_bottom(page, monkeypatch):
    monkeypatch.setattr(patches, "FAMILIES", dict(patches.FAMILIES))
    ids = prompt(400)
    given = {"model": tiny_llama(), "inputs": dict(input_ids=ids, attention_mask=torch.ones_like(ids))}
    given |= {"question": prompt(20, seed=1), "tiny_model": tiny}
    path = ROOT / "docs" / f"{page}.md"
    code = blocks(path, "python")
    assert code
    for block in code:
        exec(compile(block, path.name, "exec"), given)
    unpatch_model(given["model"])


def test_a_trace_is_kept_and_replayed_as_the_page_of_results_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs/results.md"
    (kept,) = (line for block in blocks(path, "bash") for line in block.splitlines() if "--trace" in line)
    result = CliRunner().invoke(app, shlex.split(kept)[1:])
    assert result.exit_code == 0, result.output
    capsys.readouterr()
    (code,) = blocks(path, "python")
    exec(compile(code, path.name, "exec"), {})
    found = json.loads((tmp_path / "hit-rates.json").read_text())["layers"]
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [layer for layer, *_ in told] == list(found)
    for layer, *rates in told:
        rule = found[layer]["1.5"]
        expected = [rule["ema"]["rate"], rule["ema"]["weighted"], rule["last"]["rate"]]
        assert [float(rate) for rate in rates] == pytest.approx(expected, abs=6e-5)  # the file has four digits


def test_every_page_with_python_is_run():
    ran = {f"{page}.md" for page in RUN} | {"quality.md", "results.md"}
    assert {path.name for path in (ROOT / "docs").glob("*.md") if blocks(path, "python")} == ran


def test_the_page_of_settings_has_each_field_and_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE)
    fields = {name: field.default for name, field in SparseConfig.__dataclass_fields__.items()}
    assert {name: eval(default) for name, default in rows} == fields
    assert len(rows) == len(fields)


def test_the_prompts_shown_are_prompts(tmp_path):
    (shown,) = blocks(ROOT / "docs/several-gpus.md", "json")
    (tmp_path / "prompts.jsonl").write_text(shown)
    file = PromptFile(tmp_path / "prompts.jsonl")
    assert [file.read(line)["id"] for line in file.lines] == ["a", "b"]


# Commands


def commands(path):
    """Words of each command in a page's bash blocks, without environment and comments."""
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\s\[[^\]]*\]", "", line), comments=True)  # without what may be left out
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield line, words


EVERY = [pytest.param(line, words, id=f"{path.name}: {line[:50]}") for path in PAGES for line, words in commands(path)]


@pytest.mark.parametrize("line, words", EVERY)
def test_a_command_is_one_that_there_is(line, words):
    program, rest = Path(words[0]).name, words[1:]
    if program == "hf-sparse-prr":
        parse([word for word in rest if word not in ("..", "...")])
    elif "hf_sparse_prr.launch" in words:
        launch_arguments.settings_of(launch_arguments.parse(words[words.index("hf_sparse_prr.launch") + 1 :]))
    elif program == "make":
        named = " ".join(re.findall(r"^([^#\t\n:=]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert rest[0] in named.replace("$(VENV)", ".venv").split()
    elif program == "pip":
        extras = re.findall(r"\.\[(\w+)\]", line)
        text = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = ", text, re.MULTILINE) for extra in extras)
    elif program in ("pytest", "python"):
        named = [word for word in rest if re.fullmatch(r"[\w./-]+\.py", word)]
        assert all((ROOT / word).is_file() for word in named)
    elif program == "jupyter":
        assert (ROOT / rest[-1]).is_file()
    else:
        assert program in ("compute-sanitizer", "kernels"), f"who checks {program}?"


# Links


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[*_`]|\]\([^)]*\)|\[", "", heading).strip().lower()
    kept = [letter for letter in text if letter in " -_" or unicodedata.category(letter)[0] in "LN"]
    return "".join(kept).replace(" ", "-")


def anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


def links(text):
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def texts():
    for path in PAGES:
        yield path, path.read_text()
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        yield path, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


LINKS = [pytest.param(path, link, id=f"{path.name} -> {link}") for path, text in texts() for link in links(text)]


@pytest.mark.parametrize("path, link", LINKS)
def test_a_link_leads_somewhere(path, link):
    """Those of the web aren't fetched: only their form is looked at."""
    if re.match(r"[a-z]+:", link):
        assert re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", link)
        return
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    assert target.exists(), f"{path.name}: {link}"
    assert not anchor or anchor in anchors(target), f"{path.name}: {link}, of {sorted(anchors(target))}"


def test_every_page_is_listed():
    listed = set(links((ROOT / "docs/README.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == listed
