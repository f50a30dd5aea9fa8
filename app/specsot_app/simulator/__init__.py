"""A ring without weights, for benchmarks and tests: its text is a pure function of the tokens before.

Takes the tokenizer and the config of a model directory. Refuses to know links and requests.
"""
