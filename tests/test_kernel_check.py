"""What may be published: a kernel repo, its build, and the commands that build, check and publish it."""

import json
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from hf_sparse_prr import kernel_check, kernel_loader
from hf_sparse_prr.commands import app, terminal
from hf_sparse_prr.commands.kernels import EXIT_UPLOAD

ROOT = Path(__file__).parents[1]
GENERAL = """[general]
name = 'a-b'
version = 1
license = 'x'
backends = ['cpu']
[general.hub]
repo-id = 'a/b'
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A checkout of the kernel repo with the portable variants."""
    root = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("build", "build.new", "__pycache__", ".pytest_cache")
    shutil.copytree(ROOT / "hub_kernels", root / "hub_kernels", ignore=ignored)
    (root / "hf_sparse_prr").mkdir()
    shutil.copy(ROOT / "hf_sparse_prr/kernel_loader.py", root / "hf_sparse_prr")
    result = call("build", root / "hub_kernels/sparse-prr", "--json")
    assert result.exit_code == 0, result.output
    assert [Path(path).name for path in json.loads(result.stdout)["variants"]] == ["torch-cpu", "torch-cuda"]
    return root


@pytest.fixture
def repo(built, tmp_path):
    """A copy to spoil."""
    shutil.copytree(built, tmp_path / "checkout")
    return tmp_path / "checkout/hub_kernels/sparse-prr"


def call(*arguments):
    return CliRunner().invoke(app, ["kernels", *map(str, arguments)])


def problems(repo, **options):
    return [each for each in kernel_check.check(kernel_check.read_repo(repo), **options) if each.problem]


def compiled(repo, native=True):
    """A variant as `--cuda` would write it, of these sources or of others."""
    read, variant = kernel_check.read_repo(repo), repo / "build/torch-stable-abi210-cu130-x86_64-linux"
    shutil.copytree(repo / "build/torch-cuda", variant)
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["id"] = f"_sparse_prr_cuda_{read.version}_{kernel_check._digest(read, native)}"
    metadata["backend"] = {"type": "cuda"}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "_ops.py").write_text("")
    (variant / "x.abi3.so").write_bytes(b"")


def test_what_was_built_is_well(repo):
    assert problems(repo) == []
    result = call("check", repo)
    assert result.exit_code == 0 and "problem" not in result.stdout
    document = json.loads(call("check", repo, "--json").stdout)
    assert len(document["findings"]) == 6 and all(each["problem"] is None for each in document["findings"])


def test_all_variants_are_wanted_for_publishing(repo):
    (found,) = problems(repo, every=True)
    assert found.problem == "build/: expected one compiled for cuda, got torch-cpu, torch-cuda"
    compiled(repo)
    assert problems(repo, every=True) == []


def test_a_compiled_variant_of_other_sources(repo):
    compiled(repo)
    (repo / "topk_cuda/topk.cu").write_text("// another\n")
    (found,) = problems(repo)
    assert "of these sources, got '_sparse_prr_cuda_1_" in found.problem


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda repo: shutil.rmtree(repo / "build/torch-cuda"), "expected torch-cuda, got torch-cpu"),
        (lambda repo: (repo / "CARD.md").write_text("# empty"), f"CARD.md: expected {kernel_loader.OPS[0]}, "),
        (lambda repo: (repo / "torch-ext/sparse_prr/dispatch.py").write_text(""), "got others or none of dispatch.py"),
        (lambda repo: (repo / "build/torch-cpu/extra.py").write_text(""), "got others or none of extra.py"),
        (lambda repo: (repo / "build/torch-cpu/metadata.json").write_text("{"), "metadata.json: expected JSON"),
        (
            lambda repo: (repo / "build/torch-cpu/metadata.json").write_text("{}"),
            "expected name 'sparse-prr', got None",
        ),
        (lambda repo: shutil.rmtree(repo / "build"), "expected torch-cpu, torch-cuda, got nothing"),
        (lambda repo: (repo / "torch-ext/sparse_prr/metadata.json").unlink(), "metadata.json (FileNotFoundError: "),
        (
            lambda repo: (repo / "torch-ext/sparse_prr/metadata.json").write_text("{"),
            "metadata.json (JSONDecodeError: ",
        ),
    ],
)
def test_what_is_wrong_is_named(repo, spoil, words):
    spoil(repo)
    found = problems(repo)
    assert any(words in each.problem for each in found), found
    result = call("check", repo)
    assert result.exit_code == terminal.EXIT_DIFFERENT and "problem:" in result.stdout


def test_versions_that_differ(repo, monkeypatch):
    monkeypatch.setattr(kernel_check, "VERSION", 3)
    (found,) = problems(repo)
    assert found.problem == "expected one, got build.toml 1, metadata.json 1, this library 3"


def test_an_op_that_gives_something_else(repo):
    for path in (repo / "torch-ext/sparse_prr", *(repo / "build").iterdir()):
        file = path / "reference/__init__.py"
        text = file.read_text() + "\n\ndef gvr_topk(scores, k, **_):\n    return scores.topk(k).indices.int()\n"
        file.write_text(text)
    assert any("gvr_topk: expected the indices of a stable sort" in each.problem for each in problems(repo))


def test_the_version_is_raised_everywhere_or_nowhere(repo):
    library = repo.parents[1] / "hf_sparse_prr/kernel_loader.py"
    result = call("bump", repo)
    assert result.exit_code == 0 and "version 2 now" in result.stdout
    assert kernel_check.read_repo(repo).version == 2
    assert "\nVERSION = 2\n" in library.read_text()
    assert json.loads((repo / "torch-ext/sparse_prr/metadata.json").read_text())["version"] == 2
    library.write_text("VERSION = two")
    before = (repo / "build.toml").read_text()
    result = call("bump", repo)
    assert result.exit_code == terminal.EXIT_USAGE and "expected 'VERSION = 2' once, got it 0 times" in result.stderr
    assert (repo / "build.toml").read_text() == before


class Hub:
    """A Hub that takes notes."""

    calls: list = []  # noqa: RUF012

    def __getattr__(self, name):
        return lambda **given: self.calls.append((name, given))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_publishing_is_a_dry_run_unless_asked(repo, hub):
    compiled(repo)
    result = call("publish", repo, "--no-tests")
    assert result.exit_code == 0, result.output
    assert "would upload CARD.md, benchmarks, torch-cpu, torch-cuda, torch-stable-abi210" in result.stdout.replace(
        "\n", " "
    )
    assert f"to {kernel_loader.REPO_ID}, branch v{kernel_loader.VERSION}" in result.stdout
    assert hub.calls == []


def test_publishing_uploads_what_was_checked(repo, hub):
    compiled(repo)
    result = call("publish", repo, "--no-tests", "--upload")
    assert result.exit_code == 0, result.output
    assert all(given["repo_id"] == kernel_loader.REPO_ID and given["repo_type"] == "kernel" for _, given in hub.calls)
    names = [name for name, _ in hub.calls]
    assert names == ["create_repo", "create_branch", "upload_folder", "upload_folder", "upload_file", "upload_file"]
    given = hub.calls[2][1]
    assert (given["revision"], given["path_in_repo"], given["folder_path"]) == ("v1", "build", repo / "build")


def test_a_checkout_with_changes_is_not_published(repo, hub):
    compiled(repo)
    (repo.parents[1] / ".gitignore").write_text("build/\n")
    git = ["git", "-C", str(repo.parents[1]), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    assert call("publish", repo, "--no-tests").exit_code == 0
    with (repo / "NOTES.md").open("a") as file:
        file.write("more\n")
    result = call("publish", repo, "--no-tests", "--upload")
    assert result.exit_code == terminal.EXIT_DIFFERENT and hub.calls == []
    assert "expected a clean checkout, got changes in hub_kernels/sparse-prr/NOTES.md" in result.stdout
    assert problems(repo) == []  # `check` looks at work in progress


def test_sources_that_are_named_and_gone(repo):
    (repo / "topk_cuda/host.h").unlink()
    result = call("check", repo)
    assert result.exit_code == terminal.EXIT_USAGE
    assert "expected the sources that build.toml names, got none of topk_cuda/host.h" in result.stderr


def test_a_hub_that_refuses_is_one_line(repo, hub, monkeypatch):
    def refuse(**_):
        raise OSError("403 Forbidden")

    compiled(repo)
    monkeypatch.setattr(hub, "create_repo", lambda self, **given: refuse(**given), raising=False)
    result = call("publish", repo, "--no-tests", "--upload")
    assert result.exit_code == EXIT_UPLOAD
    assert "expected hf-sparse-prr/sparse-prr to take an upload, got OSError: 403 Forbidden" in result.stderr


def test_nothing_is_uploaded_where_something_is_wrong(repo, hub):
    result = call("publish", repo, "--no-tests", "--upload")
    assert result.exit_code == terminal.EXIT_DIFFERENT and "nothing was uploaded" in result.stderr
    assert hub.calls == []


def test_tests_that_fail_through_the_built_copy_are_a_problem(repo):
    for path in (repo / "tests").glob("test_*.py"):
        path.unlink()
    (repo / "tests/test_one.py").write_text("def test_one(repo_path):\n    assert (repo_path / 'build').is_dir()\n")
    assert kernel_check.run_tests(kernel_check.read_repo(repo)).problem is None
    (repo / "tests/test_one.py").write_text("def test_one(repo_path):\n    assert not repo_path\n")
    assert "1 failed" in kernel_check.run_tests(kernel_check.read_repo(repo)).problem


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "expected a folder with a build.toml, got none"),
        ("[general", "expected TOML with"),
        ("[general]\nname = 'x'\n", "expected TOML with general.name, version, license, backends and hub"),
        (GENERAL.replace("1", "'1'"), "hub.repo-id, got TypeError(\"version '1'\")"),
        (GENERAL.replace("'a-b'", "5"), "hub.repo-id, got TypeError('name 5')"),
        (GENERAL.replace("'a/b'", "5"), "hub.repo-id, got TypeError('hub.repo-id 5')"),
        (GENERAL.replace("license", "licence"), "hub.repo-id, got KeyError('license')"),
        (GENERAL, "expected the sources in"),
        ("\0", "expected TOML with"),
    ],
)
def test_what_is_no_kernel_repo_is_refused(text, words, tmp_path):
    if text is not None:
        (tmp_path / "build.toml").write_text(text)
    for command in ("build", "check", "bump", "publish"):
        result = call(command, tmp_path)
        assert result.exit_code == terminal.EXIT_USAGE
        assert words in result.stderr and result.stdout == ""


def test_ctrl_c_while_building_leaves_the_last_build(repo, monkeypatch):
    before = sorted(path.name for path in repo.rglob("*"))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    result = call("build", repo)
    assert result.exit_code == terminal.EXIT_STOPPED
    assert "stopped; nothing half-written is left behind" in result.stderr
    assert sorted(path.name for path in repo.rglob("*")) == before
