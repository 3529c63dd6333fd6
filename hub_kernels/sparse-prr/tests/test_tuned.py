"""Launch parameters: which file counts, what is refused, one warning; how they are chosen, and that results stay."""

import json
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from .drawn import INTERPRETED

GPU = "NVIDIA Test-1000 80GB (no such)"


@pytest.fixture
def package(ops):
    """The folder of what was loaded: sources, or a variant that was built."""
    return Path(ops.__file__).parent


@pytest.fixture
def tuned(package, tmp_path, monkeypatch):
    """The module by itself, as it needs no Triton, with an empty cache folder."""
    spec = spec_from_file_location("tuned_alone", package / "triton_kernels" / "tuned.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HF_SPARSE_PRR_CACHE", str(tmp_path))
    return module


@pytest.fixture
def tune(ops):
    pytest.importorskip("triton")
    return import_module(f"{ops.__name__}.tune")


def leave(tuned, text):
    path = tuned.user_folder() / tuned.file_name(GPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_committed_file_can_be_read_and_is_complete(tuned, package):
    files = sorted((package / "triton_kernels" / "tuned").glob("*.json"))
    assert "NVIDIA_H200.json" in [file.name for file in files]
    for file in files:
        found = json.loads(file.read_text())
        assert tuned.file_name(found["gpu"]) == file.name
        assert found["config"].keys() == tuned.DEFAULTS.keys()
        assert tuned.load(found["gpu"]) == tuned.read(file) == found["config"]


def test_unknown_gpu_runs_the_defaults_and_names_the_command(tuned):
    with pytest.warns(UserWarning, match=r"no tuned configuration for 'NVIDIA Test.*defaults.*hf-sparse-prr tune"):
        assert tuned.load(GPU) == tuned.DEFAULTS


def test_users_file_counts_and_may_leave_ops_out(tuned, recwarn):
    leave(tuned, '{"config": {"quest": {"BN": 64, "num_warps": 8}}}')
    assert tuned.load(GPU) == {**tuned.DEFAULTS, "quest": {"BN": 64, "num_warps": 8}}
    assert not recwarn


def test_file_names_have_no_spaces_or_slashes(tuned):
    assert tuned.file_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert tuned.file_name("a/b\\c d") == "a_b_c_d.json"


def test_without_the_variable_the_folder_is_the_projects_cache(tuned, monkeypatch):
    monkeypatch.delenv("HF_SPARSE_PRR_CACHE")
    assert tuned.user_folder().parts[-3:] == (".cache", "hf_sparse_prr", "tuned")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "expected JSON, got"),
        ("[" * 200_000, "expected JSON, got"),
        ("[1]", 'expected an object "config", got None'),
        ('{"config": {"no_op": {}}}', "expected one of quest, .*got 'no_op'"),
        ('{"config": {"quest": {"BN": 32}}}', r"expected \['BN', 'num_warps'\] of quest, got"),
        ('{"config": {"merge": {"DS": 24}}}', "merge's DS to be a power of two from 16 to 256, got 24"),
        ('{"config": {"merge": {"DS": true}}}', "got True"),
        ('{"config": {"select": {"num_warps": 64}}}', "from 1 to 32, got 64"),
    ],
)
def test_broken_file_is_named_with_the_remedy(tuned, text, message):
    """And a step runs: by the defaults, with a warning."""
    path = leave(tuned, text)
    with pytest.raises(ValueError, match=message) as caught:
        tuned.read(path)
    assert str(path) in str(caught.value)
    assert "delete it, or run `hf-sparse-prr tune` again" in str(caught.value)
    with pytest.warns(UserWarning, match=message):
        assert tuned.load(GPU) == tuned.DEFAULTS


@pytest.mark.parametrize("failure", [PermissionError("no"), RuntimeError("Could not determine home directory.")])
def test_no_home_is_no_file(tuned, monkeypatch, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr(tuned, "user_folder", fail)
    with pytest.warns(UserWarning, match="no tuned configuration for"):
        assert tuned.load(GPU) == tuned.DEFAULTS


def test_cpu_takes_the_defaults_without_a_warning_or_a_file(tuned, monkeypatch, recwarn):
    monkeypatch.setattr(tuned, "load", lambda gpu: pytest.fail("read a file"))
    x = torch.zeros(1, device="cpu")
    assert {op: tuned.config(op, x) for op in tuned.DEFAULTS} == tuned.DEFAULTS
    assert not recwarn


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_reads_its_file_once(tuned, monkeypatch):
    calls = []
    monkeypatch.setattr(tuned, "load", lambda gpu: calls.append(gpu) or tuned.DEFAULTS)
    x = torch.zeros(1, device="cuda")
    assert all(tuned.config(op, x) is tuned.DEFAULTS[op] for op in tuned.DEFAULTS)
    assert calls == [torch.cuda.get_device_name(x.device)]


def test_trying_ends_as_it_began(tuned):
    x, table = torch.zeros(1, device="cpu"), {"merge": {"DS": 64}}
    for _ in range(2):  # with nothing known of the device, and after it was used
        with tuned.trying(-1, table):
            assert tuned.config("merge", x) == {"DS": 64}
        assert tuned.config("merge", x) == tuned.DEFAULTS["merge"]


def fake(tune, prices):
    """A clock that reads the time off the parameters in force, and one call that returns one tensor."""
    current = sys.modules[f"{tune.__package__}.triton_kernels.tuned"]
    x = torch.zeros(1, device="cpu")
    return lambda calls: prices(current.config("quest", x)), {"case": [lambda: torch.ones(3)]}


def test_choice_is_the_fastest_of_one_parameter_after_the_other(tune):
    prices = {16: 5.0, 32: 6.0, 64: 3.0, 128: 7.0}
    clock, cases = fake(tune, lambda values: prices[values["BN"]] - values["num_warps"] / 8)
    choice = tune.choose("quest", -1, cases, clock, tune.CANDIDATES["quest"])
    assert choice.values == {"BN": 64, "num_warps": 8}
    assert choice.before == {"case": 5.5}
    assert choice.after == {"case": 2.0}
    assert choice.ratio == pytest.approx(2.0 / 5.5)


def test_gain_below_the_noise_keeps_the_defaults(tune):
    clock, cases = fake(tune, lambda values: 1.0 - values["BN"] / 1e5)
    choice = tune.choose("quest", -1, cases, clock, tune.CANDIDATES["quest"])
    assert choice.values == {"BN": 32, "num_warps": 4}
    assert choice.ratio == 1


def test_candidate_with_another_result_is_not_taken(tune):
    clock, _ = fake(tune, lambda values: 100.0 / values["BN"])
    current = sys.modules[f"{tune.__package__}.triton_kernels.tuned"]
    call = lambda: torch.ones(3) * (2 if current.config("quest", torch.zeros(1, device="cpu"))["BN"] == 128 else 1)  # noqa: E731
    choice = tune.choose("quest", -1, {"case": [call]}, clock, {"BN": (64, 128)})
    assert choice.values["BN"] == 64
    assert choice.refused == ["{'BN': 128, 'num_warps': 4}: another result, case"]


def test_every_parameter_has_candidates_within_its_limits(tune, tuned, tmp_path):
    for op, values in tuned.DEFAULTS.items():
        assert tune.CANDIDATES[op].keys() == values.keys()
        assert all(values[name] in numbers for name, numbers in tune.CANDIDATES[op].items())
        for name, numbers in tune.CANDIDATES[op].items():
            for number in numbers:
                leave(tuned, json.dumps({"config": {op: {**values, name: number}}}))
                assert tuned.load(GPU)[op][name] == number


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton kernels that run")
@pytest.mark.parametrize(
    "op", ["quest", "window_logits", "window_shares", "merge", "select", "ema_step", "linear", "gate"]
)
def test_candidates_give_the_results_of_the_defaults(tune, tuned, monkeypatch, op):
    monkeypatch.setattr(tune, "SHAPES", {"tiny": (1, 2, 32)})
    monkeypatch.setattr(tune, "SELECTED", 8)
    monkeypatch.setattr(tune, "_L2", 1)  # one layer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = tune.tune(
        device, lambda *_: None, clock=lambda calls: float(len(calls)), contexts=(2048,),
        candidates={op: {name: numbers[::2] for name, numbers in tune.CANDIDATES[op].items()}}, dtype=torch.float16,
    )  # fmt: skip
    assert chosen[op].values == tuned.DEFAULTS[op]
    assert chosen[op].refused == []
    path = leave(tuned, json.dumps(tune.document(GPU, chosen)))
    assert tuned.read(path) == tuned.DEFAULTS


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton kernels that run")
def test_ways_are_measured_on_rows_with_and_without_a_threshold(tune):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = tune.cases_of("ways", device, contexts=(64, 128))
    assert len(cases) == 32
    for columns in (8, 16, 64, 128):
        plain, guessed = (cases[f"4 x {columns}{name}"] for name in ("", ", threshold"))
        assert torch.equal(plain[0](), guessed[0]())
