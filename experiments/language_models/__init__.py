"""What the experiments with byte-level language models share: the model, its position schemes, texts."""
