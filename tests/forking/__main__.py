"""Trains the model that is kept here."""

import torch

from tests.forking import MODEL, train

torch.set_num_threads(1)
train(MODEL)
