"""Byte-level language models of the experiments: the model, its position schemes, texts."""
