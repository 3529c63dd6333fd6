"""The table of what speculation takes: written, read, refused, looked up, interpolated and grown."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from profiles import made_up
from typer.testing import CliRunner

from hf_sparse_prr import profile as profiles
from hf_sparse_prr.bench_profile import bench_profile
from hf_sparse_prr.budget import Policy
from hf_sparse_prr.commands import app, terminal
from hf_sparse_prr.profile import Cell, Key, find, parse, read, sources_of

pytestmark = pytest.mark.compat
KEY = Key("NVIDIA Test-1000", "triton", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
SMALL = ["--shape", "smollm2", "--budget", 512, "--device", "cpu", "--rounds", 1, "--spec-ratio", "0.5,1"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPARSE_PRR_CACHE", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    return tmp_path / "profiles"


def write(path: Path, profile: profiles.Profile, **changes: object) -> None:
    path.write_text(json.dumps({**profile.document(), **changes}))


def call(*arguments: object):
    return CliRunner().invoke(app, ["profile", *(str(argument) for argument in arguments)])


def test_what_is_written_is_what_is_read(folder):
    write(folder / KEY.file_name, made_up(KEY))
    assert find(KEY) == made_up(KEY)


@pytest.mark.parametrize(
    "other", [dict(device="NVIDIA H200"), dict(backend="cuda"), dict(kv_heads=2), dict(batch=2), dict(blocks=32)]
)
def test_another_gpu_shape_or_kernels_have_none(folder, other):
    write(folder / KEY.file_name, made_up(KEY))
    assert find(KEY._replace(**other)) is None
    (folder / KEY.file_name).rename(folder / KEY._replace(**other).file_name)
    with pytest.raises(ValueError, match=r"expected a profile for .*, got one for NVIDIA Test-1000"):
        find(KEY._replace(**other))


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(format="notes"), "expected the format 'hf_sparse_prr profile', got 'notes'"),
        (dict(version=2), "expected version 1 of it, got 2"),
        (dict(key={"device": "x"}), "expected the figures of a profile"),
        (dict(contexts=[]), "expected ascending contexts"),
        (dict(contexts=[{"context": 1}]), "expected the figures of a profile, got KeyError"),
    ],
)
def test_a_file_that_is_something_else_is_refused(folder, changes, expected):
    write(folder / KEY.file_name, made_up(KEY), **changes)
    with pytest.raises(ValueError, match=expected):
        find(KEY)


@pytest.mark.parametrize(
    "place, value, expected",
    [
        (("contexts", 0, "context"), float("inf"), "expected the figures of a profile, got OverflowError"),
        (("contexts", 0, "context"), 0, r"expected ascending contexts above 0, got \[0, 4096\]"),
        (("contexts", 0, "serial"), 10**400, "expected the figures of a profile, got OverflowError"),
        (("contexts", 0, "cells", 0, 1), float("nan"), r"expected hit rates from 0 to 1, got \[nan"),
        (("contexts", 0, "speculate", 0, 0), float("inf"), r"expected ratios above 0, got \[inf"),
        (("contexts", 0, "cells", 0, 0), -1, r"expected ratios above 0, got \[0.5, 1.0, 2.0, -1.0"),
    ],
    ids=["context inf", "context 0", "serial 1e400", "hit rate nan", "ratio inf", "ratio of a cell -1"],
)
def test_figures_that_no_step_has_are_refused(place, value, expected):
    document = json.loads(json.dumps(made_up(KEY).document()))
    if place[2] in ("cells", "speculate"):  # alike at every context
        document["contexts"].pop()
    *folders, name = place
    held = document
    for each in folders:
        held = held[each]
    held[name] = value
    with pytest.raises(ValueError, match=expected):
        parse(document, "it")


@pytest.mark.parametrize("failure", [PermissionError("no"), ValueError("no home")])
def test_a_folder_that_cannot_be_looked_into_holds_no_profile(monkeypatch, failure):
    def fail():
        raise failure

    monkeypatch.setattr(profiles, "user_folder", fail)
    key = Key("NVIDIA H200", "cuda", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
    assert find(KEY) is None and find(key) is not None  # a committed one is found as ever


def test_without_a_home_a_folder_has_to_be_named(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HF_SPARSE_PRR_CACHE")
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(ValueError, match="HF_SPARSE_PRR_CACHE: expected a folder where there is no home, got none"):
        profiles.user_folder()
    assert find(KEY) is None
    result = call("--context", 1024, "--device", "cpu")
    assert result.exit_code == terminal.EXIT_USAGE and "expected a folder" in result.stderr.replace("\n", " ")


def test_no_json_and_times_of_zero_are_refused(folder):
    (folder / KEY.file_name).write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON.*delete it"):
        read(folder / KEY.file_name)
    document = made_up(KEY).document()
    document["contexts"][0]["select"] = 0
    with pytest.raises(ValueError, match="expected times above 0, got 0"):
        parse(document, "it")
    document = made_up(KEY).document()
    document["contexts"][1]["cells"].pop()
    with pytest.raises(ValueError, match="the same ratios and hit rates"):
        parse(document, "it")


@pytest.mark.parametrize("path", sorted(profiles._COMMITTED.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_profile_is_found_for_its_gpu_and_names_no_folder(path):
    profile = read(path)
    assert path.name == profile.key.file_name
    assert find(profile.key) == profile
    assert not [value for value in profile.made.values() if "/" in str(value)]


def test_the_h200s_profile_says_where_speculation_pays():
    """Llama-3.1-8B's heads with the compiled kernels; no other GPU, kernels or blocks have it."""
    key = Key("NVIDIA H200", "cuda", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
    assert all(find(key._replace(**other)) is None for other in (dict(device="NVIDIA H100"), dict(backend="triton")))
    profile = find(key)
    gains = {
        at.context: at.serial / min(at.step(ratio, min(ratio, 1.0)) for ratio in at.speculate)
        for at in profile.contexts
    }
    assert list(gains) == [2**power for power in range(13, 20)]
    assert [Policy(profile).start(context) > 0 for context in gains] == [gain >= 1.13 for gain in gains.values()]
    assert gains[2**17] > 1.2 and gains[2**14] < 1.1


def test_the_users_own_profile_comes_first(folder):
    key = Key("NVIDIA H200", "cuda", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
    write(folder / key.file_name, made_up(key))
    assert find(key) == made_up(key)


def test_hit_rates_are_interpolated_and_ratios_are_the_nearest():
    at = made_up(KEY).contexts[0]
    half, most = (at.step(1.0, hit) for hit in (0.5, 0.95))
    assert at.step(1.0, 0.725) == pytest.approx((half + most) / 2)
    assert at.step(1.1, 0.5) == half and at.step(9.0, 0.5) == at.step(2.0, 0.5)
    assert at.step(0.5, 1.0) == at.step(0.5, 0.5)  # no more can be hit
    assert at.step(1.0, -1.0) == at.step(1.0, 0.0)


def test_contexts_are_the_nearest_and_grow_past_the_last():
    profile = made_up(KEY, contexts=(1024, 4096, 16384))
    assert profile.at(100).context == 1024 and profile.at(3000).context == 4096
    grown = profile.at(32768)
    assert grown.context == 32768
    assert grown.serial == pytest.approx(20 * (1 + 32768 / 4096))  # made up as a line
    assert grown.step(1.0, 0.95) == pytest.approx(grown.serial * (1.25 - 0.75 * 0.95))
    assert made_up(KEY, contexts=(1024,)).at(2048).serial == made_up(KEY, contexts=(1024,)).at(1024).serial


def test_the_command_measures_writes_and_draws(folder, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "it.png"
    result = call(*SMALL, "--context", "512,1K,2K", "--plot", picture)
    assert result.exit_code == 0, result.output
    (path,) = folder.iterdir()
    profile = read(path)
    assert path.name == profile.key.file_name and find(profile.key) == profile
    assert [at.context for at in profile.contexts] == [1024, 2048]  # 512 tokens fit
    assert profile.key.blocks == 16 and profile.key.backend == "reference"
    for at in profile.contexts:
        assert list(at.speculate) == [0.5, 1.0] and len(at.cells) == 10
        assert {cell.hit_rate for cell in at.cells if cell.ratio == 0.5} == {0.5, 0.475, 0.4, 0.25, 0.0}
    assert profile.made["kernels"] == "bundled 1"
    assert str(path) in result.stdout and "serial" in result.stdout and "…" not in result.stdout
    assert picture.stat().st_size > 10_000


def test_kernels_of_a_folder_are_named_and_not_located(monkeypatch, tmp_path):
    from hf_sparse_prr import bench_profile as module

    folder = tmp_path / "sparse-prr"
    kernels = module.measured_kernels("reference")._replace(source=str(folder))
    monkeypatch.setattr(module, "measured_kernels", lambda key: kernels)
    settings = dict(budget=512, device="cpu", dtype=torch.float32, rounds=1, ratios=[1.0])
    assert bench_profile("smollm2", [1024], kernels=folder, **settings).made["kernels"] == "sparse-prr 1"


def test_sources_are_those_of_a_build_or_of_the_files(tmp_path):
    def module(identity=None, text="one"):
        folder = tmp_path / f"{identity}{text}"
        folder.mkdir()
        (folder / "__init__.py").write_text(text)
        if identity is not None:
            (folder / "metadata.json").write_text(json.dumps({"id": identity}))
        made = ModuleType("made")
        made.__file__ = str(folder / "__init__.py")
        return made

    assert sources_of(module("_sparse_prr_cuda_1_0123456789ab")) == "0123456789ab"
    plain = sources_of(module("_sparse_prr_torch_1"))
    assert len(plain) == 12 and plain == sources_of(module())  # metadata doesn't count
    assert plain != sources_of(module(text="two"))


def test_hit_rates_out_of_range_are_refused():
    for hits in ((), (1.5,)):
        with pytest.raises(ValueError, match="hits: expected numbers from 0 to 1, got"):
            bench_profile("smollm2", [1024], budget=512, device="cpu", dtype=torch.float32, rounds=1, hits=hits)


def test_a_step_with_other_bits_is_not_timed(monkeypatch):
    from hf_sparse_prr import bench_profile as module
    from hf_sparse_prr.bench_exact import ExactnessError

    true = module.Works.prr
    monkeypatch.setattr(module.Works, "prr", lambda *given: lambda index: true(*given)(index) + 1e-6)
    with pytest.raises(ExactnessError, match=r"PRR, spec_ratio 1, hits 1, at 1024 tokens"):
        bench_profile("smollm2", [1024], budget=512, device="cpu", dtype=torch.float32, rounds=1, ratios=[1.0])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--context", 512], ("context", "above the 512 tokens")),
        (["--context", 1024, "--spec-ratio", "0"], ("--spec-ratio", "above 0")),
        (["--context", 1024, "--spec-ratio", "17"], ("spec_ratio", "up to 16")),
        (["--context", 1024, "--spec-ratio", "some"], ("--spec-ratio", "above 0")),
        (["--context", 1024, "--plot", "it.txt"], ("--plot", ".png")),
        (["--context", 1024, "--output", "/"], ("--output", "it is a folder")),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, words):
    result = call(*SMALL, *arguments)
    assert result.exit_code == terminal.EXIT_USAGE, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line


def test_cells_keep_their_order_in_a_document():
    assert parse(made_up(KEY).document(), "it").contexts[0].cells[0] == Cell(
        0.5, 0.0, *made_up(KEY).contexts[0].cells[0][2:]
    )
