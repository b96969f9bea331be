"""Interfaces to other libraries. No other module imports them. `transformers` needs that library, an optional extra."""
