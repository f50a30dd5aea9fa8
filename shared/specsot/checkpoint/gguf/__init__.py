"""Turns GGUF files (llama.cpp's format) into model directories.

The metadata of a GGUF file become text files (config, tokenizer) in a cache. The tensors stay in the GGUF
file; `specsot_model.gguf_tensors` reads them there. The package knows nothing of layers as they are computed.
"""
