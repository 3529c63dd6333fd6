"""HF_SPARSE_PRR_TEST_DEVICE=cuda runs the tests of decoding on a GPU: the default device is set for all of them."""

import os

import torch

if device := os.environ.get("HF_SPARSE_PRR_TEST_DEVICE"):
    torch.set_default_device(device)
