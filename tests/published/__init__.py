"""Published GGUF files, read by SpecSoT and by Transformers. Run by `make test-models`."""
