"""The pure rules of a drafter, without tensors, clocks and links: budget, costs, selection, sequences."""
