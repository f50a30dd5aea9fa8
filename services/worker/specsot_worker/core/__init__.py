"""The pure rules of a worker, without tensors, clocks and links: frames, acceptance, pipeline depth."""
