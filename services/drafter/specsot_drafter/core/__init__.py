"""What a drafter decides, without tensors, clocks and links: budget, costs, selection, sequences."""
