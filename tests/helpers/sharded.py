"""Run by torch.distributed.run, once a process, or started by `shard`: ids of sharded models, stock and patched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from models import SPARSE, greedy, prompt
from transformers import AutoModelForCausalLM

from hf_sparse_prr import patch_model

PROMPT = 120
GPUS = torch.cuda.is_available()


def shard(*folders):
    """Two gloo processes over the models of these folders. Leaves RANK.json in each, and `saved`, the model as it was
    saved while sharded and patched. Returns [[rank 0, rank 1] of each folder]."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*launch, *map(str, folders)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [[json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)] for folder in folders]


def run(folder):
    device = torch.device("cuda", torch.cuda.current_device()) if GPUS else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    attention = model.model.layers[0].self_attn
    projection = attention.kv_b_proj if hasattr(attention, "kv_b_proj") else attention.k_proj
    ids = prompt(PROMPT).to(device)
    found = {"sharded": type(projection.weight).__name__ == "DTensor", "stock": greedy(model, ids).tolist()}
    settings = {} if hasattr(attention, "kv_b_proj") else SPARSE
    with patch_model(model, **settings, speculate=True, trace=True) as handle:
        found["patched"] = greedy(model, ids).tolist()
        found["selected"] = [entry.selected.tolist() for entry in handle.trace]
        model.save_pretrained(folder / "saved")
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # no process leaves while another still speaks to it


if __name__ == "__main__":
    torch.set_num_threads(1)
    if GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if GPUS else "gloo")
    for name in sys.argv[1:]:
        run(Path(name))
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of gloo that outlive the interpreter have aborted a process that was done
