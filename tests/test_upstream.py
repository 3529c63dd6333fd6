"""transformers' own ModelTesterMixin on patched models: what passes stock passes patched.

The tests come from the source distribution of the installed transformers on PyPI, fetched once into the cache folder
and never committed. Two of its modules aren't in the distribution and are stood in for by empty mixins.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import types
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from models import INDEXED
from transformers import AutoConfig, AutoModelForCausalLM

from hf_sparse_prr import patch_model

pytestmark = pytest.mark.xdist_group("upstream")  # the fixture downloads
CACHE = Path(os.environ.get("HF_SPARSE_PRR_CACHE", Path.home() / ".cache" / "hf_sparse_prr"))
SUBSET = [
    "test_save_load",
    "test_torch_save_load",
    "test_determinism",
    "test_training",
    "test_training_gradient_checkpointing",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
    "test_attention_outputs",
    "test_hidden_states_output",
    "test_retain_grad_hidden_states_attentions",
    "test_model_outputs_equivalence",
    "test_inputs_embeds",
    "test_inputs_embeds_matches_input_ids",
    "test_disk_offload_bin",
    "test_disk_offload_safetensors",
    "test_cpu_offload",
    "test_can_set_attention_dynamically",
    "test_config_attn_implementation_setter",
    "test_batching_equivalence",
    "test_resize_tokens_embeddings",
    "test_can_be_initialized_on_meta",
    "test_tp_plan_matches_params",
    "test_capture_outputs_decorator",
    "test_bc_cache_name_forward",
]


# What patch_model is given, and what a config has beside the usual
MODELS = {
    "llama": (dict(budget=80, block_size=16, dense_layers=0, speculate=True), dict(num_key_value_heads=2)),
    "deepseek_v32": (dict(speculate=True), {**INDEXED, "index_topk": 4}),
    "glm_moe_dsa": (dict(speculate=True), {**INDEXED, "index_topk": 4, "indexer_types": ["full", "shared"]}),
}


def config_of(model_type):
    return AutoConfig.for_model(
        model_type,
        vocab_size=Tiny.vocab_size,
        hidden_size=Tiny.hidden_size,
        intermediate_size=37,
        num_hidden_layers=Tiny.num_hidden_layers,
        num_attention_heads=Tiny.num_attention_heads,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **MODELS[model_type][1],
    )


def stock_class(model_type):
    return AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]


def patched_class(model_type):
    """Instances are patched as soon as they exist, so that every test of the mixin meets a patched model."""
    stock = stock_class(model_type)

    def __init__(self, config):
        stock.__init__(self, config)
        patch_model(self, **MODELS[model_type][0])

    patched = type(stock.__name__, (stock,), {"__init__": __init__, "__module__": __name__})
    patched.__qualname__ = f"Patched{stock.__name__}"  # the mixin looks up by name whether a model takes labels
    globals()[patched.__qualname__] = patched  # to be found by pickle
    return patched


@pytest.fixture(scope="session")
def mixin(pytestconfig):
    """`ModelTesterMixin` of the transformers that is installed."""
    for marker in (
        "accelerate_tests",
        "flash_attn_test",
        "flash_attn_3_test",
        "flash_attn_4_test",
        "torch_compile_test",
    ):
        pytestconfig.addinivalue_line("markers", f"{marker}: of transformers")
    folder = CACHE / f"transformers-{transformers.__version__}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        requirement = f"transformers=={transformers.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "transformers", "--dest", str(CACHE), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"the source distribution of {requirement} can't be fetched: {done.stderr.strip()[-200:]}")
        archive = CACHE / f"transformers-{transformers.__version__}.tar.gz"
        with tarfile.open(archive) as tar:
            tar.extractall(CACHE, filter="data")
        archive.unlink()
    package = types.ModuleType("upstream_tests")
    package.__path__ = [str(folder / "tests")]
    sys.modules["upstream_tests"] = package
    for name, stub in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parent = types.ModuleType(f"upstream_tests.{name.split('.')[0]}")
        parent.__path__ = []
        module = types.ModuleType(f"upstream_tests.{name}")
        setattr(module, stub, type(stub, (), {}))
        sys.modules[parent.__name__], sys.modules[module.__name__] = parent, module
    return importlib.import_module("upstream_tests.test_modeling_common").ModelTesterMixin


class Tiny:
    """What the mixin asks a model tester for."""

    batch_size, seq_length, is_training, hidden_size = 13, 7, True, 32
    num_hidden_layers, num_attention_heads, vocab_size = 2, 4, 99

    def __init__(self, parent, model_type):
        self.parent, self.model_type = parent, model_type

    def get_config(self):
        return config_of(self.model_type)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outcome(mixin, model_class, model_type, name):
    """("passed" | "skipped" | "failed", why) of one test of the mixin with one model class."""

    def set_up(self):
        self.model_tester = Tiny(self, model_type)

    body = {"setUp": set_up, "all_model_classes": (model_class,), "all_generative_model_classes": ()}
    case = type(f"{model_class.__name__}Test", (mixin, unittest.TestCase), body)
    if not hasattr(case, name):
        return "skipped", "this transformers has no such test"
    result = unittest.TestResult()
    case(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    broken = [*result.failures, *result.errors]
    return ("failed", broken[0][1]) if broken else ("passed", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SUBSET)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_patched_model_passes_where_stock_passes(mixin, model_type, name):
    stock, why = outcome(mixin, stock_class(model_type), model_type, name)
    if stock != "passed":
        pytest.skip(f"stock {stock}: {why.strip().splitlines()[-1]}")
    patched, why = outcome(mixin, patched_class(model_type), model_type, name)
    assert patched == "passed", why
