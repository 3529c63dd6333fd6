"""SparseConfig: every field is checked with "field: expected .., got ..", and plan() says what each layer does."""

import dataclasses
import inspect
import pickle
import re
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

from hf_sparse_prr import SparseConfig

FIELDS = [field.name for field in dataclasses.fields(SparseConfig)]
BAD = [
    ("selector", "Quest"),
    ("selector", None),
    ("selector", ["quest"]),
    ("budget", 0),
    ("budget", -4096),
    ("budget", 127),
    ("budget", 4096.0),
    ("budget", "4096"),
    ("budget", True),
    ("budget", float("nan")),
    ("block_size", 0),
    ("block_size", 48),
    ("block_size", 64.0),
    ("block_size", "64"),
    ("block_size", None),
    ("sink_blocks", -1),
    ("sink_blocks", 1.0),
    ("sink_blocks", True),
    ("local_blocks", 0),
    ("local_blocks", None),
    ("dense_layers", -1),
    ("dense_layers", 1.5),
    ("dense_layers", "all"),
    ("dense_layers", False),
    ("speculate", 1),
    ("speculate", "on"),
    ("speculate", None),
    ("spec_ratio", 0),
    ("spec_ratio", -0.5),
    ("spec_ratio", float("nan")),
    ("spec_ratio", float("inf")),
    ("spec_ratio", "auto"),
    ("spec_ratio", True),
    ("ema", "best"),
    ("ema", 0.4),
    ("ema", (0.4, 0.1)),
    ("ema", (0.0, 0.1, 0.25)),
    ("ema", (0.4, 1.5, 0.25)),
    ("ema", (0.4, 0.1, -0.25)),
    ("ema", (0.4, 0.1, float("nan"))),
    ("ema", (True, 0.1, 0.25)),
    ("semantics", "paper"),
    ("hint", "best"),
    ("hint", True),
    ("kernels", "no/such/folder"),
    ("kernels", None),
    ("dense_length", -1),
    ("dense_length", 8192.0),
    ("dense_length", None),
    ("group", "mean"),
    ("group", None),
    ("sparse_prefill", 1),
    ("workspace", 0),
    ("strict", 1),
    ("strict", "yes"),
    ("trace", None),
]
GOOD = [
    ("selector", "infllm_v2"),
    ("budget", None),
    ("budget", 128),
    ("dense_length", 8192),
    ("group", "max"),
    ("sparse_prefill", True),
    ("block_size", 128),
    ("sink_blocks", 0),
    ("local_blocks", 1),
    ("dense_layers", 0),
    ("speculate", False),
    ("spec_ratio", 1e-9),
    ("spec_ratio", 10**9),
    ("spec_ratio", Fraction(1, 3)),
    ("ema", (1, 1, 0)),
    ("semantics", "superset"),
    ("hint", "none"),
    ("kernels", "reference"),
    ("kernels", Path("a/path/that/may/come/later")),
]


def test_defaults_are_those_of_the_contract():
    settings = dataclasses.asdict(SparseConfig())
    settings.pop("ema")
    assert settings == {
        "selector": "auto",
        "budget": 4096,
        "block_size": "auto",
        "sink_blocks": 1,
        "local_blocks": 2,
        "dense_layers": "auto",
        "speculate": "auto",
        "spec_ratio": "profile",
        "semantics": "exact",
        "hint": "predicted",
        "kernels": "auto",
        "strict": False,
        "trace": False,
        "dense_length": 0,
        "group": "sum",
        "sparse_prefill": False,
        "workspace": 2**30,
        "cuda_graph": True,
        "fused_layers": True,
    }


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_raises_and_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: expected .+, got {re.escape(repr(value))}$"):
        SparseConfig(**{field: value})


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_goes_unchecked(field):
    with pytest.raises(ValueError, match=rf"^{field}: expected "):
        SparseConfig(**{field: object()})


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_a_good_value_is_kept(field, value):
    assert getattr(SparseConfig(**{field: value}), field) == value


def test_infllm_v2_sums_over_the_group():
    with pytest.raises(ValueError, match="group: expected one of 'sum' for selector 'infllm_v2', got 'max'"):
        SparseConfig(selector="infllm_v2", group="max")


def test_each_selector_has_its_block_size():
    assert SparseConfig(selector="infllm_v2").plan([""] * 3)[2].block_size == 64
    assert SparseConfig().plan([""] * 3)[2].block_size == 32


def test_what_is_not_full_attention_stays_dense_and_says_why():
    plans = SparseConfig(dense_layers=1).plan(["a window", "", "a window", ""])
    assert [plan.status for plan in plans] == ["dense", "sparse", "dense", "sparse"]
    assert [plan.reason for plan in plans] == ["a window", "", "a window", ""]
    assert [plan.full for plan in plans] == [False, True, False, True]


def test_a_row_fits_up_to_its_budget_or_the_dense_length():
    def fits(**settings):
        return SparseConfig(budget=200, block_size=64, local_blocks=1, dense_layers=0, **settings).plan([""])[0].fits

    assert [fits(), fits(dense_length=193), fits(dense_length=1000)] == [192, 192, 999]


def test_a_folder_is_a_source_of_kernels(tmp_path):
    assert SparseConfig(kernels=str(tmp_path)).kernels == str(tmp_path)


@pytest.mark.parametrize(
    ("field", "choice"),
    [("selector", "quest"), ("selector", "infllm_v2"), ("semantics", "superset"), ("hint", "previous")],
)
def test_an_unknown_choice_lists_the_known_ones(field, choice):
    with pytest.raises(ValueError, match=f"one of .*'{choice}'"):
        SparseConfig(**{field: "unknown"})


@pytest.mark.parametrize(("block_size", "sink", "local"), [(16, 0, 1), (32, 1, 2), (64, 3, 2), (128, 0, 5)])
def test_the_budget_holds_at_least_one_block_more_than_the_forced_ones(block_size, sink, local):
    least = (sink + local + 1) * block_size
    settings = {"block_size": block_size, "sink_blocks": sink, "local_blocks": local}
    assert SparseConfig(budget=least, **settings).plan([""])[0].free_blocks == 1
    with pytest.raises(ValueError, match=f"budget: expected None or an int >= {least} "):
        SparseConfig(budget=least - 1, **settings)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseConfig().budget = 128


def test_equal_settings_compare_and_hash_alike():
    one, other = SparseConfig(ema=[1, 0.5, 0]), SparseConfig(ema=(1.0, 0.5, 0.0))
    assert one == other
    assert hash(one) == hash(other)
    assert one != SparseConfig()


def test_pickle_keeps_the_settings():
    config = SparseConfig(budget=256, speculate=True, kernels=Path("here"))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("made", [SparseConfig, SparseConfig().replace])
def test_an_unknown_name_is_refused_and_the_fields_are_listed(made):
    with pytest.raises(TypeError, match="unknown setting block, budgets; the fields are selector, budget") as caught:
        made(budgets=1, block=2, trace=True)
    assert all(name in str(caught.value) for name in FIELDS)


def test_its_signature_is_its_fields():
    assert [*inspect.signature(SparseConfig).parameters] == FIELDS
    with pytest.raises(TypeError, match="positional arguments"):
        SparseConfig(*range(len(FIELDS) + 1))


def test_replace_checks_the_new_values():
    config = SparseConfig(budget=128)
    assert config.replace(trace=True) == SparseConfig(budget=128, trace=True)
    with pytest.raises(ValueError, match=r"^budget: expected"):
        config.replace(block_size=64)


@pytest.mark.parametrize(
    ("dense_layers", "layers", "dense"),
    [("auto", 1, 0), ("auto", 2, 1), ("auto", 3, 2), ("auto", 9, 2), (0, 3, 0), (3, 3, 3)],
)
def test_plan_keeps_the_first_layers_dense(dense_layers, layers, dense):
    plans = SparseConfig(dense_layers=dense_layers).plan([""] * layers)
    assert [plan.status for plan in plans] == ["dense"] * dense + ["sparse"] * (layers - dense)
    assert all("dense_layers" in plan.reason for plan in plans[:dense])


def test_plan_refuses_more_dense_layers_than_there_are():
    with pytest.raises(ValueError, match="dense_layers: expected at most 3, the model's layers, got 4"):
        SparseConfig(dense_layers=4).plan([""] * 3)


def test_plan_without_a_budget_is_dense():
    plans = SparseConfig(budget=None, dense_layers=0).plan([""] * 3)
    assert [(plan.status, plan.reason) for plan in plans] == [("dense", "budget=None")] * 3


@pytest.mark.parametrize(("block_size", "tokens", "blocks"), [("auto", 32, 6), (16, 16, 12), (64, 64, 3)])
def test_plan_rounds_the_budget_down_to_whole_blocks(block_size, tokens, blocks):
    plan = SparseConfig(budget=200, block_size=block_size, local_blocks=1, dense_layers=0).plan([""])[0]
    assert (plan.selector, plan.block_size, plan.blocks) == ("quest", tokens, blocks)


@pytest.mark.parametrize(
    ("speculate", "ratio", "predicted"),
    [(True, "profile", 5), (True, 0.5, 2), (True, 3.0, 15), (True, 0.1, 0), (False, 3.0, 0), ("auto", 3.0, 0)],
)
def test_plan_predicts_a_share_of_the_blocks_chosen_by_score(speculate, ratio, predicted):
    plan = SparseConfig(budget=128, block_size=16, speculate=speculate, spec_ratio=ratio, dense_layers=0).plan([""])[0]
    assert (plan.free_blocks, plan.predicted_blocks) == (5, predicted)


def test_plan_turns_the_integers_of_numpy_into_plain_ones():
    """Block counts become the k of gvr_topk, which takes an int."""
    plan = SparseConfig(budget=numpy.int64(128), block_size=numpy.int32(16), dense_layers=0).plan([""])[0]
    assert (type(plan.blocks), type(plan.block_size), type(plan.free_blocks)) == (int, int, int)
