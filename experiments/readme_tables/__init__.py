"""The tables of README.md and experiments/README.md, and the picture of speeds, from the JSON in results/."""
