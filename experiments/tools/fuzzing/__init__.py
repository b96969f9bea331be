"""Random calls of decay_attention: drawn, built, and judged by an oracle of their own."""
