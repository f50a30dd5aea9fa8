"""What a worker decides, without tensors, clocks and links: frames, acceptance, pipeline depth."""
