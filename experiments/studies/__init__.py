"""Studies: models that are trained to answer a question about decays."""
