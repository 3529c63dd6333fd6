"""Run by torch.distributed.run, once a process: ids of a sharded model, stock and patched, to FOLDER/RANK.json."""

import json
import os
import sys
from pathlib import Path

import torch
from models import greedy, prompt
from transformers import AutoModelForCausalLM

from hf_sparse_prr import patch_model

folder = Path(sys.argv[1])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
projection = model.model.layers[0].self_attn.kv_b_proj.weight
ids = prompt(120)
found = {"sharded": type(projection).__name__ == "DTensor", "stock": greedy(model, ids).tolist()}
with patch_model(model, speculate=True, trace=True) as handle:
    found["patched"] = greedy(model, ids).tolist()
    found["selected"] = [entry.selected.tolist() for entry in handle.trace]
(folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
torch.distributed.barrier()  # no process leaves while another still speaks to it
torch.distributed.destroy_process_group()
os._exit(0)  # threads of gloo that outlive the interpreter have aborted a process that was done
