"""Trains the model in this folder."""

import torch

from tests.forking import MODEL, train

torch.set_num_threads(1)
train(MODEL)
