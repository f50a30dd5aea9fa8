"""GGUF files (llama.cpp's format) as model directories: what a file's metadata says becomes text files in a
cache. `specsot_model.gguf_tensors` reads the tensors out of the file itself.

Knows nothing of layers as they are computed.
"""
