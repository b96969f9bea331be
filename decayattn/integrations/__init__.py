"""Interfaces of other libraries. Nothing else imports them, and `transformers` needs its library, an optional extra."""
