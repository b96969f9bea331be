"""Interfaces of other libraries. Each module needs its library, an optional extra; nothing else imports them."""
